"""How to measure. What changes a number is noted with it, so that numbers of another kind are not put beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

MATTERS = {
    "perplexity": ("stride", "mask_share", "bins"),
    "passkey": ("depths", "trials", "digits"),
    "order": ("blocks", "mask_share"),
    "similarity": (),
}
"""The settings that each measure hangs on, beside those of all."""
FOR_ALL = ("confidence", "seed", "dtype", "max_tokens", "task")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    stride: int | None = None
    """Tokens between the beginnings of windows; None: side by side. Only tokens that are new in a window count."""
    mask_share: float = 0.15
    bins: int = 16
    """Parts of a window that are told apart."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 10
    digits: int = 5
    blocks: tuple[int | None, ...] = (4, 16, None)
    """Tokens that are shuffled among each other; None: all of a window."""
    confidence: float = 0.95
    seed: int = 0
    max_tokens: int = 131_072
    """Of the text, from its beginning: the same for all lengths and models."""
    batch_tokens: int = 4096
    dtype: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name in ("bins", "trials", "digits", "max_tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence is a share between 0 and 1, such as 0.95, not {self.confidence}")
        if not 0 < self.mask_share < 1:
            raise ValueError(f"mask_share, of hidden tokens, must be between 0 and 1, not {self.mask_share}")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths go from 0 (the beginning) to 1 (the end), not {self.depths}")
        if not self.blocks or any(block is not None and block < 2 for block in self.blocks):
            raise ValueError(f"a block of tokens to shuffle has 2 or more, or is None for all, not {self.blocks}")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"a stride must be 1 token or more, not {self.stride}")

    def that_matter(self, measure: str) -> dict[str, Any]:
        """As JSON has them."""
        values = {name: getattr(self, name) for name in (*MATTERS[measure], *FOR_ALL)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
