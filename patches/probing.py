"""Watch a model run: which modules call the attention interface, and which rows of embeddings are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from hf_posenc.errors import PosEncError

from .compat import PROBE_NAME, ProbeConfig


class AttentionCall(NamedTuple):
    """One call of the attention interface."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kwargs: dict[str, Any]


class TableRead(NamedTuple):
    """One lookup in an embedding table."""

    weight: torch.Tensor
    rows: torch.Tensor


def probe_tokens(length: int = 14) -> torch.Tensor:
    """Token ids that cannot be mistaken for positions."""
    return (torch.arange(2 * length).view(2, length) * 23 + 7) % 50 + 8


@contextlib.contextmanager
def probing(model: nn.Module) -> Iterator[list[AttentionCall]]:
    """Record the calls of the attention interface by modules of a model."""
    modules = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "config", None), PreTrainedConfig) and not isinstance(module, PreTrainedModel)
    ]
    token = _calls.set([])
    for module in modules:
        module.config = ProbeConfig(module.config)  # type: ignore[assignment]
    try:
        yield _calls.get()
    finally:
        for module in modules:
            module.config = module.config.stock_config  # type: ignore[union-attr]
        _calls.reset(token)


def _probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that records its calls."""
    _calls.get().append(AttentionCall(module, query, key, value, dict(kwargs)))
    kwargs.pop("posenc", None)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probe)
_calls: ContextVar[list[AttentionCall]] = ContextVar("calls")


@torch.no_grad()
def record_calls(model: nn.Module, **inputs: Any) -> list[AttentionCall]:
    """Run a model, and return its calls of the attention interface."""
    with probing(model) as calls:
        try:
            model(input_ids=probe_tokens(), **inputs)
        except Exception as error:
            raise PosEncError(f"a tiny model does not run: {type(error).__name__}: {error}") from error
    return calls


class TableReads(TorchFunctionMode):
    """Records lookups in embedding tables."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[TableRead] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            self.reads.append(TableRead(rows=args[0], weight=args[1]))
        return func(*args, **(kwargs or {}))
