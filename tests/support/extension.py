"""Methods that extend rotary models without training: small settings, and distances by the formulas of their papers."""

from __future__ import annotations

from typing import Any

SELF_EXTEND = {"method": "self_extend", "window": 7, "group": 3}
REROPE = {"method": "rerope", "window": 6}
LEAKY = {"method": "leaky_rerope", "window": 5, "k": 2.5}
DCA = {"method": "dca", "chunk_size": 8, "local_window": 3}
METHODS = [SELF_EXTEND, REROPE, LEAKY, DCA]


def rope(extend: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "rope", "extend": extend, **options}


def near_length(extend: dict[str, Any]) -> int:
    return extend.get("window") or extend["chunk_size"]


def remapped_distance(extend: dict[str, Any], i: int, j: int) -> float:
    """The distance of query i and key j by the formulas of the papers."""
    if extend["method"] == "dca":
        size, window = extend["chunk_size"], extend["local_window"]
        query, key, last = i % size, j % size, size + window - 1
        chunks_between = i // size - j // size
        return [query, min(size + query, last), last][min(chunks_between, 2)] - key
    window = extend["window"]
    if i - j < window:
        return i - j
    if extend["method"] == "rerope":
        return window
    if extend["method"] == "leaky_rerope":
        return window + (i - j - window) / extend["k"]
    return i // extend["group"] - j // extend["group"] + window - window // extend["group"]
