"""Relative positions: which row of its table a scheme looks up for each pair, and its bias by distance and head."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..attention.dense import materialize
from ..attention.function import schemes_at, score_terms
from ..schemes.inputs import Content, Positions
from ..schemes.terms import DistanceBias, KeyTerm, QueryTerm, Term
from .subjects import names_of, positioned, positions_of, refuse_layer, schemes_with

ELSEWHERE = "it adds nothing to the scores; look at its encoding or its decay instead"
NO_ROWS = "it looks nothing up by distance; shaw, deberta, t5 and tupe do"


@dataclasses.dataclass(frozen=True)
class RelativeRows:
    """Which row of a scheme's table each pair of query and key looks up."""

    name: str
    index: torch.Tensor
    """(queries, keys)."""

    @property
    def used(self) -> int:
        return len(self.index.unique())

    @property
    def exact(self) -> int:
        """How far back, from the last query, every distance has a row of its own."""
        rows = self.index[-1].flip(0).tolist()
        return next((far - 2 for far in range(1, len(rows)) if rows[far] == rows[far - 1]), len(rows) - 1)

    def __str__(self) -> str:
        length = len(self.index)
        return (
            f"{self.name}: {length} x {length} pairs look up {self.used} rows; looking back, distances up to "
            f"{self.exact} have rows of their own"
        )


def relative_rows(model: nn.Module, length: int = 64) -> RelativeRows:
    """The matrix of rows, with what clipping or buckets make of far distances."""
    with positioned(model) as base:
        acting = schemes_with(base, "score", "rows by distance", ELSEWHERE)
        posenc = positions_of(base, length)
        for place, _ in acting:
            # What is looked up by distance is prepared as whole numbers: by themselves, or under this name.
            found = getattr(posenc.prepared[place], "buckets", posenc.prepared[place])
            if isinstance(found, torch.Tensor) and not found.is_floating_point():
                index = found = found.cpu()
                if found.dim() == 1:
                    slots = torch.arange(length)
                    index = found[slots - slots[:, None] + length - 1]
                return RelativeRows(names_of(base), index.reshape(length, length).clone())
        raise ValueError(f"{names_of(base)} has no rows by distance: {NO_ROWS}")


@dataclasses.dataclass(frozen=True)
class Bias:
    """What is added to the scaled logits of each head, whatever the words are."""

    name: str
    distances: torch.Tensor
    """(L,): key minus query, ascending."""
    values: torch.Tensor
    """(heads, L)."""
    query: int | None
    """The position that the bias is seen from, where it depends on that as well; None: on the distance alone."""

    def __str__(self) -> str:
        if not self.values.any():
            return (
                f"{self.name}: no bias at any distance. Schemes with parameters start neutral: "
                'say "init": "paper" for the start of their paper, or look at a trained checkpoint'
            )
        far = self.values[:, self.distances.abs().argmax()]
        seen = "" if self.query is None else f", seen from position {self.query}"
        return (
            f"{self.name}: biases from {self.values.min():.4g} to {self.values.max():.4g}{seen}; at distance "
            f"{int(self.distances[self.distances.abs().argmax()])}, by head: "
            + ", ".join(f"{value:.3g}" for value in far.tolist())
        )


def bias_by_distance(model: nn.Module, length: int = 128, layer: int = 0, query: int | None = None) -> Bias:
    """The part of a layer's score terms that does not depend on words, by distance and head.

    Terms of positions rather than distances (fire, tupe) are seen from one query: the last one, and in encoders the one
    in the middle, unless `query` says another.
    """
    with positioned(model) as base:
        refuse_layer(base, layer)
        posenc = positions_of(base, length)
        _, module = list(base.architecture.attentions(base))[layer]
        terms, content = _without_words(base, module, posenc)
        distances = torch.arange(1 - length, length)
        others = [term for term in terms if not isinstance(term, DistanceBias)]
        silent = all(isinstance(term, torch.Tensor) and not term.any() for term in others)
        if len(others) < len(terms) and silent and query is None:
            values = torch.stack([term.values for term in terms if isinstance(term, DistanceBias)]).sum(0)
            kept = distances <= 0 if posenc.causal else distances < length
            return Bias(names_of(base), distances[kept], values.cpu()[:, kept], None)
        query = (length - 1 if posenc.causal else length // 2) if query is None else query
        if not 0 <= query < length:
            raise ValueError(f"query must be a position from 0 to {length - 1}, got {query}")
        last = query + 1 if posenc.causal else length
        rows = [materialize(term, posenc, content)[0].expand(-1, length, -1)[:, query, :last] for term in terms]
        return Bias(names_of(base), torch.arange(last) - query, torch.stack(rows).sum(0).cpu(), query)


def _without_words(base: Any, module: Any, posenc: Positions) -> tuple[list[Term], Content]:
    """The score terms of a layer that say something where queries and keys are silent."""
    shape, length = base.position_scheme[0].shape, posenc.key_length
    like = base.get_input_embeddings().weight
    silent = like.new_zeros(1, shape.num_heads, length, shape.head_size)
    everything = torch.ones(1, 1, length, length, dtype=torch.bool, device=like.device)
    visible = everything.tril() if posenc.causal else everything
    scaling = shape.head_size**-0.5
    content = Content(silent, silent, silent, scaling, lambda: visible, lambda rows: module.project_rows(rows, silent))
    found: list[Term] = [
        term
        for acting in schemes_at("score", module, posenc)
        if acting[0].needs_distances  # cope counts by words: without any, it has nothing to say
        for term in score_terms([acting], content)
        if not isinstance(term, (QueryTerm, KeyTerm))
    ]
    if not found:
        raise ValueError(
            f"{names_of(base)} has no bias by distance alone in this layer: what it adds depends on the words, or is "
            "not in the scores; look at attention by distance on a text instead"
        )
    return found, content
