"""How position vectors get into word embeddings: added, concatenated and projected, or by attention over the two.

Shape legend: B batch, Q tokens, E width of the model, P width of a position vector, D width of a head.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import LayerModule, ModelShape, Scheme
from .inputs import Positions
from .options import Options, at_least, option

TABLE_INIT_STD = 0.02
"""Standard deviation of a position table at the start of training from scratch, as in BERT and GPT-2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOptions(Options):
    """The options that all schemes of the input embedding have."""

    mix: Literal["add", "concat", "attention"] = option(
        "add", "how words and positions are put together: their sum, W [word; position], or attention over the two"
    )
    position_size: int | None = option(
        None, "width of a position vector, for mix = 'concat'; None: the model's width", at_least(1)
    )
    query: Literal["token", "context"] = option(
        "token", "for mix = 'attention': what asks, the word itself or the mean of all words (so far, if causal)"
    )

    mix_init: Literal["add", "neutral"] = option(
        "add", "where the parameters of a mix start: as the sum, or with the position left out"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix_init != "add" and self.mix == "add":
            raise ValueError("mix_init is for mix='concat' and mix='attention': a sum has no parameters")
        if self.position_size is not None and self.mix != "concat":
            raise ValueError(f"position_size is for mix='concat' only, got mix={self.mix!r}")
        if self.query != "token" and self.mix != "attention":
            raise ValueError(f"query is for mix='attention' only, got mix={self.mix!r}")


class ConcatMixer(LayerModule):
    """W [word; position]. Starts at [I | I], which is the sum, or at [I | 0], which leaves the position out."""

    def __init__(self, width: int, position_size: int, silent: bool) -> None:
        super().__init__()
        self.silent = silent
        self.weight = nn.Parameter(torch.empty(width, width + position_size))

    def reset_parameters(self) -> None:
        width = self.weight.shape[0]
        both = torch.cat([torch.eye(width), torch.eye(width, self.weight.shape[1] - width)], dim=1)
        if self.silent:
            both[:, width:] = 0
        init.copy_(self.weight, both)

    def forward(
        self, inputs_embeds_BQE: torch.Tensor, vectors_BQP: torch.Tensor, asking_BQE: torch.Tensor
    ) -> torch.Tensor:
        vectors_BQP = vectors_BQP.expand(inputs_embeds_BQE.shape[0], -1, -1)
        return nn.functional.linear(torch.cat([inputs_embeds_BQE, vectors_BQP], dim=-1), self.weight)


class AttentionMixer(LayerModule):
    """Attention of each token over two things: its word and its position, each with a key and a value.

    Starts with a query of zero, so that both weigh one half, and values of twice the thing itself: the sum, exactly.
    Silent, the position's value is zero instead.
    """

    def __init__(self, width: int, key_size: int, silent: bool) -> None:
        super().__init__()
        self.silent = silent
        self.query, self.word_key, self.position_key = (nn.Parameter(torch.empty(key_size, width)) for _ in range(3))
        self.word_value, self.position_value = (nn.Parameter(torch.empty(width, width)) for _ in range(2))

    def reset_parameters(self) -> None:
        key_size, width = self.query.shape
        init.zeros_(self.query)
        for key in (self.word_key, self.position_key):
            init.copy_(key, torch.eye(key_size, width))
        init.copy_(self.word_value, 2 * torch.eye(width))
        init.copy_(self.position_value, 0 * torch.eye(width) if self.silent else 2 * torch.eye(width))

    def forward(
        self, inputs_embeds_BQE: torch.Tensor, vectors_BQE: torch.Tensor, asking_BQE: torch.Tensor
    ) -> torch.Tensor:
        linear = nn.functional.linear
        query = linear(asking_BQE, self.query)
        keys = linear(inputs_embeds_BQE, self.word_key), linear(vectors_BQE, self.position_key)
        logits = torch.stack([(query * key).sum(-1) for key in keys], dim=-1) * self.query.shape[0] ** -0.5
        word, position = logits.softmax(-1).unsqueeze(-2).unbind(-1)
        return word * linear(inputs_embeds_BQE, self.word_value) + position * linear(vectors_BQE, self.position_value)


class InputScheme(Scheme, abc.ABC):
    """Base of the schemes at the input embedding: a vector for each position, mixed into the word's."""

    at_input: ClassVar[bool] = True
    options: MixOptions

    def __init__(self, options: MixOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.position_size = options.position_size or shape.hidden_size
        silent = options.mix_init == "neutral"
        self.mixer: LayerModule | None = None
        if options.mix == "concat":
            self.mixer = ConcatMixer(shape.hidden_size, self.position_size, silent)
        elif options.mix == "attention":
            self.mixer = AttentionMixer(shape.hidden_size, shape.head_size, silent)
        self.rewrites_embeddings = self.mixer is not None
        self.needs_context = options.query == "context"

    @abc.abstractmethod
    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        """(B or 1, Q, P): the vector of each token's position."""

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        vectors = self.position_embeddings(positions).to(inputs_embeds_BQE.dtype)
        if self.mixer is None:
            return inputs_embeds_BQE + vectors
        asking = inputs_embeds_BQE
        if self.needs_context:
            assert positions.context_BQE is not None
            asking = positions.context_BQE.to(inputs_embeds_BQE.dtype)
        # Autocast narrows products: what goes on through the layers must not be.
        return self.mixer(inputs_embeds_BQE, vectors, asking).to(inputs_embeds_BQE.dtype)
