"""flex_attention, compiled once for each kind of score terms.

torch counts recompilations per code object, and silently runs flex_attention unfused, with a number per score, once a
limit is reached. Layers with different terms would share that limit if they shared a compiled function, so each kind of
terms gets a copy of its own, and reaching the limit is an error.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..errors import PosEncError

COMPILER = "inductor"
RECOMPILE_LIMIT = 64
"""For each kind of terms: new lengths soon share a kernel, but dtypes, head sizes and training do not."""
_compiled: dict[Hashable, Callable[..., Any]] = {}


def compiles_flex(query: torch.Tensor) -> bool:
    """Whether flex_attention is compiled for some queries.

    Not on CPUs, where torch 2.13 fails to compile it if lengths change between calls.
    """
    return query.device.type != "cpu"


def compiled_flex_attention(kind: Hashable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call flex_attention, compiled for one kind of score terms.

    Args:
        kind: What the code of `score_mod` and `mask_mod` depends on, apart from the tensors that they read.
        *args: For flex_attention.
        **kwargs: For flex_attention.

    Returns:
        The output, (B, H, Q, D).

    Raises:
        PosEncError: If it would be compiled more often than `RECOMPILE_LIMIT`.
    """
    if kind not in _compiled:
        _compiled[kind] = torch.compile(_copy_function(_flex_attention), backend=COMPILER)
    settings = {"recompile_limit": RECOMPILE_LIMIT, "fail_on_recompile_limit_hit": True}
    try:
        with torch._dynamo.config.patch(settings):
            output: torch.Tensor = _compiled[kind](*args, **kwargs)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise PosEncError(
            f"flex_attention was compiled {RECOMPILE_LIMIT} times for the same score terms, and would now run unfused: "
            'pad inputs to a few lengths, or use attn_implementation="sdpa" with HF_POSENC_FLEX_MIN_SCORES=off'
        ) from error
    return output


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*args, **kwargs)


def _copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a code object of its own."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
