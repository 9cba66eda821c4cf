"""Contextual positions: a query counts, by a gate on each key, and its count back to a key is the key's position."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerParameters, LayerParams, ModelShape, Scheme
from .inputs import Content, Positions
from .options import Options, at_least, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopeOptions(Options):
    max_positions: int = option(64, "counts that have a vector of their own; higher ones share the last", at_least(2))


class CountTable(LayerParameters):
    """A vector for each whole count, shared by the heads of a layer. Starts at zero, in the paper too."""

    def __init__(self, max_positions: int, head_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_positions, head_size))

    def reset_parameters(self) -> None:
        init.zeros_(self.table)


class Cope(Scheme):
    """A key's position is how many keys since then the query's gates let through; the query meets that count's vector.

    The gates are sigmoids of the scaled logits, counts are taken from the query back to the key, clamped, and the
    product with a count between two whole ones is interpolated.
    """

    name = "cope"
    paper = "Golovneva et al. 2024, https://arxiv.org/abs/2405.18719"
    kind = Kind.CONTENT
    formula = "q_i.k_j / sqrt(d) + q_i.e[p_ij], p_ij = sum over t = j..i of sigmoid(q_i.k_t / sqrt(d)), clamped"
    cost = "a table a layer; gates and counts of queries x keys a head"
    neutral = "`table` is 0, in the paper too"
    extends = True
    needs_distances = False
    Options = CopeOptions
    options: CopeOptions

    def __init__(self, options: CopeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if not shape.causal:
            raise ValueError(
                "cope counts from the query back, which has no meaning where queries see ahead: it is for "
                "causal models only (GPT-2, LLaMA, BERT with is_decoder=True); on an encoder use deberta, shaw or t5"
            )

    def layer_module(self) -> CountTable:
        return CountTable(self.options.max_positions, self.shape.head_size)

    def prepare(self, positions: Positions) -> torch.dtype:
        return positions.dtype

    def score(self, prepared: torch.dtype, part: LayerParams | None, content: Content) -> torch.Tensor:
        assert part is not None
        query = content.query_BHQD
        logits = content.rotated_query_BHQD.matmul(content.key_BHKD.transpose(-1, -2)).to(prepared) * content.scaling
        gates = logits.sigmoid().masked_fill(~content.visible(), 0.0)
        counts = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.options.max_positions - 1)
        below = counts.floor()
        by_count_BHQP = query.matmul(part()["table"].to(query).transpose(0, 1)).to(prepared)
        last = self.options.max_positions - 1  # NaN, as a number, is no row
        low, high = (by_count_BHQP.gather(-1, whole.long().clamp(0, last)) for whole in (below, counts.ceil()))
        share = counts - below
        return high * share + low * (1 - share)
