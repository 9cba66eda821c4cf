"""Schemes at the input embedding, and three ways to combine token and position embeddings.

Shape legend: B batch, Q tokens, E hidden size, P width of a position embedding.
"""

from __future__ import annotations

import abc
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init
from typing_extensions import TypeVar

from ..errors import PosEncError
from .base import Kind, LayerModule, ModelShape, Scheme
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


class ConcatMixer(LayerModule):
    """W [token; position]. Starts as [I | I], the sum, or neutral as [I | 0], which ignores the position."""

    def __init__(self, hidden_size: int, position_size: int, neutral: bool) -> None:
        super().__init__()
        self.neutral = neutral
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size + position_size))

    def reset_parameters(self) -> None:
        hidden_size, total = self.weight.shape
        position = torch.eye(hidden_size, total - hidden_size)
        init.copy_(self.weight, torch.cat([torch.eye(hidden_size), 0 * position if self.neutral else position], dim=1))

    def forward(self, inputs_embeds_BQE: torch.Tensor, positions_BQP: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        positions_BQP = positions_BQP.expand(inputs_embeds_BQE.shape[0], -1, -1)
        return nn.functional.linear(torch.cat([inputs_embeds_BQE, positions_BQP], dim=-1), self.weight)


class AttentionMixer(LayerModule):
    """Two-way attention per token, over its token embedding and its position embedding.

    Starts as the sum: a zero query weighs both one half, and both values are doubled. Neutral, the position's value is
    zero instead.
    """

    def __init__(self, hidden_size: int, key_size: int, neutral: bool) -> None:
        super().__init__()
        self.neutral = neutral
        key_shape, value_shape = (key_size, hidden_size), (hidden_size, hidden_size)
        self.query, self.token_key, self.position_key = (nn.Parameter(torch.empty(key_shape)) for _ in range(3))
        self.token_value, self.position_value = (nn.Parameter(torch.empty(value_shape)) for _ in range(2))

    def reset_parameters(self) -> None:
        key_size, hidden_size = self.query.shape
        init.zeros_(self.query)
        for key in (self.token_key, self.position_key):
            init.copy_(key, torch.eye(key_size, hidden_size))
        for value in (self.token_value, self.position_value):
            init.copy_(value, 2 * torch.eye(hidden_size))
        if self.neutral:
            init.zeros_(self.position_value)

    def forward(
        self, inputs_embeds_BQE: torch.Tensor, positions_BQE: torch.Tensor, query_input_BQE: torch.Tensor
    ) -> torch.Tensor:
        linear, scale = nn.functional.linear, float(self.query.shape[0] ** -0.5)
        query = linear(query_input_BQE, self.query)
        keys = linear(inputs_embeds_BQE, self.token_key), linear(positions_BQE, self.position_key)
        logits = torch.stack([(query * key).sum(-1) for key in keys], dim=-1) * scale
        token, position = logits.softmax(-1).unsqueeze(-2).unbind(-1)
        values = linear(inputs_embeds_BQE, self.token_value), linear(positions_BQE, self.position_value)
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
        self.position_size = options.position_size or shape.hidden_size
        neutral = options.mix_init == "neutral"
        self.mixer: LayerModule | None = None
        if options.mix == "concat":
            self.mixer = ConcatMixer(shape.hidden_size, self.position_size, neutral)
        elif options.mix == "attention":
            self.mixer = AttentionMixer(shape.hidden_size, shape.head_size, neutral)
        self.rewrites_embeddings = self.mixer is not None
        self.needs_context = options.query == "context"

    @abc.abstractmethod
    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        """Compute the embedding of each token's position: (B or 1, Q, P), with P = `self.position_size`."""

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        embeddings = self.position_embeddings(positions).to(inputs_embeds_BQE.dtype)
        if self.mixer is None:
            return inputs_embeds_BQE + embeddings
        query_input = inputs_embeds_BQE
        if self.needs_context:
            assert positions.context_BQE is not None
            query_input = positions.context_BQE.to(inputs_embeds_BQE.dtype)
        mixed: torch.Tensor = self.mixer(inputs_embeds_BQE, embeddings, query_input)
        return mixed.to(inputs_embeds_BQE.dtype)  # autocast narrows products, but the residual stream must stay wide
