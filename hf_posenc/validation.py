"""Limits on untrusted input: a config.json may ask for absurd sizes, and is refused before anything is allocated."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from .errors import PosEncError

MAX_INTEGER = 2**31 - 1
"""Largest integer that a scheme option may have."""
MAX_SCHEMES = 32
"""Most schemes in one `position_scheme`."""
MAX_DEPTH, MAX_VALUES, MAX_STRING = 8, 20_000, 10_000
"""Limits of a `position_scheme`: nesting depth, number of values, length of a string."""
CONFIG_LIMITS = (32, 1_000_000, 1_000_000)
"""The same limits of a whole config.json, which may have long lists of labels."""
YAML_LIMITS, MAX_YAML_LENGTH = (16, 100_000, 100_000), 1_000_000
"""The same limits of YAML: a model card's metadata, a config file of `train`; and its length in characters."""
MAX_YAML_NUMBER, MAX_METRIC = 2.0**63, 1e305
"""Largest numbers in YAML, and in files of metrics, where a perplexity may reach exp(700)."""
MAX_SCHEME_PARAMETERS = 2**28
"""Most parameters that the schemes of a model may have, unless its layers have more."""
MAX_MODEL_PARAMETERS = 2**40
MAX_LAYERS = 1024
MAX_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd"), 2**16),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 2**13),
    "head_dim": 2**16,
    **dict.fromkeys(("intermediate_size", "n_inner"), 2**19),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "posenc_stock_max_position_embeddings"), 2**24),
    "vocab_size": 2**26,
    **dict.fromkeys(("type_vocab_size", "num_labels"), 2**20),
}
"""The size fields of a stock config and the largest value accepted for each, beyond any known model."""
_MAX_REPR = 500
_ALLOCATING = ("empty", "zeros", "ones", "full", "rand", "randn")


def truncate_repr(value: object, to_text: Callable[[Any], str] = repr) -> str:
    """Format a value for an error message, cut to a readable length. Formatters may fail on hostile values."""
    try:
        text = to_text(value)
    except (TypeError, ValueError, RecursionError):  # an integer of thousands of digits; a list that contains itself
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}... ({len(text):,} characters)"


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """The end of an error message: the closest valid name, if any is close, and all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(truncate_repr(name).strip("'")[:80], names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{hint}; expected one of {names}"


def check_json_limits(
    value: object,
    name: str = "position_scheme",
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_VALUES,
    max_string: int = MAX_STRING,
    max_number: float | None = None,
) -> None:
    """Refuse JSON that is nested too deeply or too large. Iterative, so hostile nesting cannot overflow the stack.

    Without `max_number`, the limit of absolute values, numbers may also be NaN or infinite.
    """
    pending, num_values = [(value, 0)], 0
    while pending:
        item, depth = pending.pop()
        children: list[object] = []
        if isinstance(item, (list, tuple)):
            children = list(item)
        elif isinstance(item, dict):
            children = [*item, *item.values()]
        elif isinstance(item, str) and len(item) > max_string:
            raise PosEncError(
                f"{name} contains a string of {len(item):,} characters; at most {max_string:,} are accepted"
            )
        elif max_number is not None and isinstance(item, (int, float)) and not abs(item) <= max_number:
            raise PosEncError(
                f"{name} contains the number {truncate_repr(item)}; numbers must be finite and at most {max_number:g}"
            )
        num_values += len(children)
        if num_values > max_values:
            raise PosEncError(
                f"{name} has more than {max_values:,} values, which no model needs; check where it comes from"
            )
        if children and depth == max_depth:
            raise PosEncError(f"{name} is nested deeper than {max_depth} levels; check where it comes from")
        pending.extend((child, depth + 1) for child in children)


def load_yaml(text: str, name: str) -> object:
    """Parse YAML from an untrusted source, called `name` in errors.

    Aliases are refused: a few lines of them can stand for billions of values.
    """
    import yaml

    max_depth, max_values, _ = YAML_LIMITS
    if len(text) > MAX_YAML_LENGTH:
        raise PosEncError(f"{name} is longer than {MAX_YAML_LENGTH:,} characters; check where it comes from")
    depth = num_values = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # iterative, unlike the loader
            if isinstance(event, yaml.AliasEvent):
                raise PosEncError(f"{name} contains the alias *{truncate_repr(event.anchor, str)}: repeat the value")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            num_values += isinstance(event, yaml.NodeEvent)
            if depth > max_depth or num_values > max_values:
                limits = f"{max_depth} levels and {max_values:,} values"
                raise PosEncError(f"{name} is too deeply nested or too long; at most {limits} are accepted")
        values = yaml.safe_load(text)
    except PosEncError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that cannot exist
        raise PosEncError(f"{name} is not valid YAML: {truncate_repr(error, str)}") from None
    check_json_limits(values, name, *YAML_LIMITS, max_number=MAX_YAML_NUMBER)
    return values


def check_model_sizes(fields: Mapping[str, Any]) -> None:
    """Refuse fields of a config that are not the sizes of any real model, or imply an absurd parameter count."""
    for name, largest in MAX_SIZES.items():
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int:
            raise PosEncError(f"config.{name} must be an integer, got {truncate_repr(value)}")
        smallest = 0 if name in ("num_labels", "type_vocab_size") else 1
        if not smallest <= value <= largest:
            raise PosEncError(f"config.{name} must be between {smallest} and {largest:,}, got {truncate_repr(value)}")
    width = fields.get("hidden_size") or fields.get("n_embd") or 1
    num_layers = fields.get("num_hidden_layers") or fields.get("n_layer") or 1
    num_heads = fields.get("num_attention_heads") or fields.get("n_head") or 1
    intermediate = fields.get("intermediate_size") or fields.get("n_inner") or 4 * width
    attention = num_heads * fields["head_dim"] if fields.get("head_dim") else width
    total = num_layers * width * (4 * attention + 2 * intermediate) + width * (fields.get("vocab_size") or 1)
    if total > MAX_MODEL_PARAMETERS:
        raise PosEncError(
            f"The config describes a model with about {total:,} parameters; at most {MAX_MODEL_PARAMETERS:,} are "
            "accepted. Check where it comes from"
        )


class ParameterBudget(TorchFunctionMode):
    """Counts the tensors created inside the block and refuses the one that exceeds the budget."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.limit = max(MAX_SCHEME_PARAMETERS, 12 * num_layers * hidden_size**2)
        self.allocated = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ALLOCATING:
            size = (kwargs or {}).get("size") or (args[0] if args and isinstance(args[0], (tuple, list)) else args)
            self.allocated += math.prod(number for number in size if type(number) is int)
            if self.allocated > self.limit:
                raise PosEncError(
                    f"position_scheme would add more than {self.limit:,} parameters to this model; use smaller tables "
                    "(max_positions, max_distance, num_buckets, window_size)"
                )
        return func(*args, **(kwargs or {}))
