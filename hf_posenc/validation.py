"""How large the numbers of a config may be. What is beyond was not meant, or is meant to fill somebody's memory.

A config.json comes from strangers: whatever is refused here is refused before anything is allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

MAX_INTEGER = 2**31 - 1
"""Of any whole number that a scheme is told."""
MAX_SCHEMES = 32
"""In one `position_scheme`."""
MAX_DEPTH, MAX_VALUES, MAX_STRING = 8, 20_000, 10_000
"""Of a `position_scheme`: lists inside of lists, values in all, and letters in a word."""
MAX_CONFIG_DEPTH, MAX_CONFIG_VALUES, MAX_CONFIG_STRING = 32, 1_000_000, 1_000_000
"""Of a whole config.json, which may have long lists of labels."""
MAX_SCHEME_PARAMETERS = 2**28
"""Of all schemes of a model. Of a model whose layers have more, as many as these."""
MAX_MODEL_PARAMETERS = 2**40
MAX_LAYERS = 1024
MAX_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd"), 2**16),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 2**13),
    "head_dim": 2**16,
    **dict.fromkeys(("intermediate_size", "n_inner"), 2**19),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 2**24),
    "vocab_size": 2**26,
    **dict.fromkeys(("type_vocab_size", "num_labels"), 2**20),
}
"""Fields of a stock config that models are built from, and the most that each may be: beyond the largest known."""
_SHOWN = 500
_ALLOCATING = ("empty", "zeros", "ones", "full", "rand", "randn")


def truncate_repr(value: Any, write: Callable[[Any], str] = repr) -> str:
    """A value as an error message shows it, which is short whatever it is."""
    try:
        text = write(value)
    except (TypeError, ValueError, RecursionError):  # a number of thousands of digits; a list inside of itself
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} letters)"


def check_json_limits(
    value: Any,
    what: str = "position_scheme",
    deepest: int = MAX_DEPTH,
    most: int = MAX_VALUES,
    longest: int = MAX_STRING,
) -> None:
    """Raise ValueError for JSON that is too deep or too long to be meant. Goes down by no recursion of its own."""
    waiting, seen = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        parts: list[Any] = []
        if isinstance(item, (list, tuple)):
            parts = list(item)
        elif isinstance(item, dict):
            parts = [*item, *item.values()]
        elif isinstance(item, str) and len(item) > longest:
            raise ValueError(f"{what} has a string of {len(item):,} letters, and may have {longest:,}")
        seen += len(parts)
        if seen > most:
            raise ValueError(f"{what} has more than {most:,} values, which no model needs: look where it comes from")
        if parts and depth == deepest:
            raise ValueError(f"{what} is nested deeper than {deepest} lists or dicts: look where it comes from")
        waiting.extend((part, depth + 1) for part in parts)


def check_model_sizes(fields: Mapping[str, Any]) -> None:
    """Raise ValueError if a config's sizes are no sizes, or beyond any model's. None is let by."""
    for name, most in MAX_SIZES.items():
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int:
            raise ValueError(f"the config's {name} must be a whole number, got {truncate_repr(value)}")
        least = 0 if name in ("num_labels", "type_vocab_size") else 1
        if not least <= value <= most:
            raise ValueError(f"the config's {name} must be from {least} to {most:,}, got {truncate_repr(value)}")
    width = fields.get("hidden_size") or fields.get("n_embd") or 1
    layers = fields.get("num_hidden_layers") or fields.get("n_layer") or 1
    heads = fields.get("num_attention_heads") or fields.get("n_head") or 1
    inner = fields.get("intermediate_size") or fields.get("n_inner") or 4 * width
    attention = heads * fields["head_dim"] if fields.get("head_dim") else width
    total = layers * width * (4 * attention + 2 * inner) + width * (fields.get("vocab_size") or 1)
    if total > MAX_MODEL_PARAMETERS:
        raise ValueError(
            f"the config is of a model with about {total:,} parameters, more than the {MAX_MODEL_PARAMETERS:,} that "
            "any has: look where it comes from"
        )


class ParameterBudget(TorchFunctionMode):
    """While it is entered, tensors that are made count, and the one that would be too much is refused."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.most = max(MAX_SCHEME_PARAMETERS, 12 * num_layers * hidden_size**2)
        self.spent = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ALLOCATING:
            size = (kwargs or {}).get("size") or (args[0] if args and isinstance(args[0], (tuple, list)) else args)
            self.spent += math.prod(number for number in size if type(number) is int)
            if self.spent > self.most:
                raise ValueError(
                    f"position_scheme would have more than {self.most:,} parameters in this model, which is the most "
                    "that is built: take smaller tables (max_positions, max_distance, num_buckets, window_size)"
                )
        return func(*args, **(kwargs or {}))
