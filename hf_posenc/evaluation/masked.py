"""Text with some tokens hidden, for a masked model to guess: the same ones every time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from .subject import Subject
from .windows import Windows


@dataclasses.dataclass(frozen=True)
class MaskedText:
    """Which tokens are hidden hangs on the seed and the window's number, not on batches or processes.

    All of them are hidden behind the mask token; training replaces some by random ones or leaves them, which would
    only blur what is measured.
    """

    mask_id: int
    special: torch.Tensor
    """Tokens that are no text, such as those between documents: training does not hide them either."""
    text_N: torch.Tensor
    share: float
    seed: int

    @classmethod
    def of(cls, subject: Subject, windows: Windows, share: float, seed: int) -> MaskedText:
        if not 0 < share < 1:
            raise ValueError(f"the share of hidden tokens must be between 0 and 1, not {share}")
        mask_id = getattr(subject.tokenizer, "mask_token_id", None)
        if mask_id is None:
            raise ValueError(f"{subject.name} is a masked model, and its tokenizer has no mask token: pass tokenizer=")
        special = torch.tensor(sorted(subject.tokenizer.all_special_ids), dtype=torch.long)
        return cls(mask_id, special, windows.text_places(), share, seed)

    def hide(self, rows_BN: torch.Tensor, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows with tokens hidden, and which."""
        hidden_BN = torch.stack([self.places(row_N, number) for row_N, number in zip(rows_BN, numbers, strict=True)])
        return rows_BN.masked_fill(hidden_BN, self.mask_id), hidden_BN

    def places(self, row_N: torch.Tensor, number: int) -> torch.Tensor:
        """The hidden places of one window, (N,): the share of its text, one token at least."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        text = (self.text_N & ~torch.isin(row_N, self.special)).nonzero()[:, 0]
        count = max(math.floor(self.share * len(text)), 1)
        hidden = torch.zeros_like(self.text_N)
        hidden[text[torch.randperm(len(text), generator=generator)[:count]]] = True
        return hidden
