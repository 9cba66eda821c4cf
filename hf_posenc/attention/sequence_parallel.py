"""Context and sequence parallelism: the tokens of a sequence are divided among processes.

Torch's context parallelism replaces `scaled_dot_product_attention`, and DeepSpeed's Ulysses the attention functions of
transformers, by one that brings queries and keys of all processes together. Neither knows terms that are added to the
scores. Schemes that act on single tokens are right if they are told the positions of these tokens.
"""

from __future__ import annotations

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import PosEncError
from ..schemes import Positions, Scheme
from .function import ATTENTION_NAME

CONTEXT_PARALLEL = "context parallelism"
ULYSSES = "DeepSpeed's sequence parallelism"
LOCAL_SEAMS = {"rotate", "stock rotation", "embed"}
"""The seams that act on single tokens."""
WAY_OUT = "divide the model instead of the sequence (FSDP, ZeRO or tensor parallelism)"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def find_sequence_parallel(backend: str) -> str | None:
    """What divides sequences among processes at present, for models with an attention backend; None if nothing does."""
    if _defined_in(torch.nn.functional.scaled_dot_product_attention, "torch.distributed"):
        return CONTEXT_PARALLEL
    functions = (ALL_ATTENTION_FUNCTIONS.get(name) for name in (backend, ATTENTION_NAME))
    return ULYSSES if any(_defined_in(function, "deepspeed") for function in functions) else None


def _defined_in(function: object, package: str) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(package)


def check_sequence_parallel(positions: Positions, has_position_ids: bool) -> None:
    """Refuse a forward pass on a part of a sequence that would be wrong.

    Args:
        positions: The resolved positions.
        has_position_ids: Whether the caller passed `position_ids`.

    Raises:
        PosEncError: If a scheme would need the tokens of other processes, or cannot know the positions of its own.
    """
    kind = find_sequence_parallel(positions.backend)
    if kind is None:
        return
    for index, scheme in enumerate(positions.schemes):
        reason = _refusal(kind, scheme, {seam for layer in positions.active for seam in layer if index in layer[seam]})
        if reason:
            raise PosEncError(f"{kind} divides sequences among processes, but position scheme {scheme.name!r} {reason}")
    if kind == CONTEXT_PARALLEL and positions.backend != "sdpa":
        raise PosEncError(f'{kind} needs attn_implementation="sdpa", got {positions.backend!r}')
    reads_positions = any(scheme.acts_at(seam) for scheme in positions.schemes for seam in ("embed", "rotate"))
    if reads_positions and not has_position_ids:
        raise PosEncError(
            f"{kind} divides sequences among processes, so that a process cannot count the positions of its tokens: "
            "pass position_ids, divided like input_ids"
        )
    if positions.packed:
        raise PosEncError(
            f"{kind} does not keep the documents of packed rows apart: put one document into each row, or {WAY_OUT}"
        )


def _refusal(kind: str, scheme: Scheme, seams: set[str]) -> str:
    """Why a scheme that acts at some seams cannot run on a part of a sequence, and the way out; empty if it can."""
    if seams - LOCAL_SEAMS:
        return f"adds to attention between tokens of all of them: use rope, xpos, learned or sinusoidal, or {WAY_OUT}"
    if "rotate" in seams and _defined_in(ALL_ATTENTION_FUNCTIONS.get(ATTENTION_NAME), "deepspeed"):
        return f"rotates in a function that this release of DeepSpeed replaces: update DeepSpeed, or {WAY_OUT}"
    if scheme.depends_on_length:
        return f"depends on the length of the whole sequence: use a fixed scaling (linear, yarn, llama3), or {WAY_OUT}"
    if scheme.needs_context:
        return f'needs the mean of all earlier tokens: leave out "query": "context", or {WAY_OUT}'
    return ""
