"""Whether an attention takes the Triton kernels: where they are switched on, and what they can compute.

Does not import Triton unless they are switched on.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import PosEncError
from ..schemes import DistanceBias, Term
from .key_spans import KeySpans, spans_from_mask

if TYPE_CHECKING:
    from .dispatch import AttentionCall

TRITON_SETTING = "HF_POSENC_TRITON"
"""The environment variable that switches the kernels on (1) or off (0, the default)."""
OLDEST_TRITON = (3, 7)
"""The kernels were not run by older releases."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 128
"""With larger heads, the kernels would spill registers."""


def triton_enabled() -> bool:
    """Whether the Triton kernels are switched on and can be imported.

    Raises:
        PosEncError: If the environment variable `HF_POSENC_TRITON` is neither 0 nor 1.
    """
    value = os.environ.get(TRITON_SETTING, "0").strip()
    if value not in ("", "0", "1"):
        raise PosEncError(f"{TRITON_SETTING} must be 0 or 1, got {value!r}")
    return value == "1" and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether a release of Triton is installed that the kernels were written for."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    version = triton.__version__.split(".")
    return tuple(int(number) for number in version[:2]) >= OLDEST_TRITON


def triton_supports(terms: Sequence[Term], dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernels are switched on, and know such score terms, dtypes and heads.

    Args:
        terms: The score terms of a layer; the kernels add a vector per head.
        dtype: The dtype of queries, keys and values.
        head_size: The size of their largest heads.

    Raises:
        PosEncError: If the environment variable `HF_POSENC_TRITON` is neither 0 nor 1.
    """
    is_vector = bool(terms) and all(isinstance(term, DistanceBias) for term in terms)
    return is_vector and dtype in DTYPES and head_size <= MAX_HEAD_SIZE and triton_enabled()


def triton_computes(call: AttentionCall) -> bool:
    """Whether the kernels are switched on and can compute an attention with uniform positions on a GPU.

    The answer does not depend on whether gradients are needed, because with dropout and checkpointing, both runs of a
    layer must take the same path.

    Raises:
        PosEncError: If the environment variable `HF_POSENC_TRITON` is neither 0 nor 1.
    """
    query, largest = call.query, max(call.query.shape[-1], call.value.shape[-1])
    if query.shape[2] < 2 or not triton_supports(call.terms, query.dtype, largest):
        return False
    return call.attention_mask is None or call_spans(call) is not None


def call_spans(call: AttentionCall) -> KeySpans | None:
    """The mask of an attention as spans of keys, made once for all layers; None if it has no such form."""
    mask, made = call.attention_mask, call.positions.block_masks
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        return None
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    key = ("spans", id(mask), num_queries, num_keys, call.query.device)
    if key not in made:
        visible = mask[..., :num_keys].expand(-1, -1, num_queries, -1)
        made[key] = mask, spans_from_mask(visible.to(call.query.device), call.query.shape[0])  # keeping it keeps its id
    spans: KeySpans | None = made[key][1]
    return spans
