"""Schemes at the input embedding, and three ways to combine token and position embeddings.

Shape legend: B batch, Q tokens, E hidden size, P width of a position embedding.
"""

from __future__ import annotations

import abc
import functools
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init
from typing_extensions import TypeVar

from ..errors import PosEncError
from .base import Kind, LayerParameters, ModelShape, Scheme
from .inputs import Positions
from .options import Options, option


class MixOptions(Options):
    """Options of every input scheme."""

    mix: Literal["add", "concat", "attention"] = option("add", "token + position, W [token; position], or attention")
    position_size: int | None = option(None, "width of the position in mix='concat'; None: the hidden size", minimum=1)
    query: Literal["token", "context"] = option("token", "in mix='attention': the token, or the mean of visible tokens")
    mix_init: Literal["add", "neutral"] = option("add", "how a mix starts: as the sum, or ignoring the position")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix_init != "add" and self.mix == "add":
            raise PosEncError("mix_init is for mix='concat' and mix='attention': mix='add' has no parameters")
        if self.position_size is not None and self.mix != "concat":
            raise PosEncError(f"position_size is for mix='concat' only, got mix={self.mix!r}")
        if self.query != "token" and self.mix != "attention":
            raise PosEncError(f"query is for mix='attention' only, got mix={self.mix!r}")


MixOptionsT = TypeVar("MixOptionsT", bound=MixOptions, default=MixOptions)


def _init_identity(weight: torch.Tensor, scale: float = 1.0) -> None:
    init.copy_(weight, scale * torch.eye(*weight.shape))


def _init_concat(weight: torch.Tensor, position_scale: float) -> None:
    """[I | I], the sum of token and position, or [I | 0], the token alone."""
    hidden_size, total = weight.shape
    position = position_scale * torch.eye(hidden_size, total - hidden_size)
    init.copy_(weight, torch.cat([torch.eye(hidden_size), position], dim=1))


def _mix_by_attention(
    params: dict[str, torch.Tensor],
    tokens_BQE: torch.Tensor,
    positions_BQE: torch.Tensor,
    query_input_BQE: torch.Tensor,
) -> torch.Tensor:
    """Two-way attention per token, over its token embedding and its position embedding."""
    linear, scale = nn.functional.linear, float(params["query"].shape[0] ** -0.5)
    query = linear(query_input_BQE, params["query"])
    keys = linear(tokens_BQE, params["token_key"]), linear(positions_BQE, params["position_key"])
    logits = torch.stack([(query * key).sum(-1) for key in keys], dim=-1) * scale
    token, position = logits.softmax(-1).unsqueeze(-2).unbind(-1)
    values = linear(tokens_BQE, params["token_value"]), linear(positions_BQE, params["position_value"])
    return token * values[0] + position * values[1]


class InputScheme(Scheme[MixOptionsT, None], abc.ABC):
    """Base class of schemes at the input embedding. A subclass says which embedding each position has.

    Example:
        >>> class Parity(InputScheme):
        ...     name, paper = "parity", "none"
        ...     def position_embeddings(self, positions):
        ...         return (positions.queries_BQ % 2)[..., None].expand(-1, -1, self.position_size)
    """

    at_input = True
    kind = Kind.INPUT
    neutral = 'only a mix has parameters; `mix_init` = "neutral" ignores the position'
    Options = MixOptions

    def __init__(self, options: MixOptionsT, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.embedding_size = shape.embedding_size or shape.hidden_size
        self.position_size = options.position_size or self.embedding_size
        self.mixer = self._new_mixer()
        self.rewrites_embeddings = self.mixer is not None
        self.needs_context = options.query == "context"

    def _new_mixer(self) -> LayerParameters | None:
        """Parameters with which a mix starts as the sum or, neutral, ignores the position."""
        size, position_scale = self.embedding_size, float(self.options.mix_init == "add")
        if self.options.mix == "concat":
            initializer = functools.partial(_init_concat, position_scale=position_scale)
            return LayerParameters(weight=((size, size + self.position_size), initializer))
        if self.options.mix == "attention":
            key, value = (self.shape.head_size, size), (size, size)
            return LayerParameters(
                query=(key, init.zeros_),  # weighs token and position one half each, so values are doubled
                token_key=(key, _init_identity),
                position_key=(key, _init_identity),
                token_value=(value, functools.partial(_init_identity, scale=2.0)),
                position_value=(value, functools.partial(_init_identity, scale=2 * position_scale)),
            )
        return None

    def details(self, seam: str) -> str:
        keeps_tokens = self.needs_context and self.shape.causal and seam == "embed"
        return "keeps token embeddings in one more layer of the KV cache" if keeps_tokens else ""

    @abc.abstractmethod
    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        """Compute the embedding of each token's position: (B or 1, Q, P), with P = `self.position_size`."""

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        embeddings = self.position_embeddings(positions).to(inputs_embeds_BQE.dtype)
        if self.mixer is None:
            return inputs_embeds_BQE + embeddings
        # Parameters that are trained may be wider than the model.
        params = {name: parameter.to(inputs_embeds_BQE.dtype) for name, parameter in self.mixer().items()}
        if self.options.mix == "concat":
            embeddings = embeddings.expand(inputs_embeds_BQE.shape[0], -1, -1)
            mixed = nn.functional.linear(torch.cat([inputs_embeds_BQE, embeddings], dim=-1), params["weight"])
        else:
            context = positions.context_BQE if self.needs_context else inputs_embeds_BQE
            assert context is not None
            mixed = _mix_by_attention(params, inputs_embeds_BQE, embeddings, context.to(inputs_embeds_BQE.dtype))
        return mixed.to(inputs_embeds_BQE.dtype)  # autocast narrows products, but the residual stream must stay wide
