"""CoPE (Golovneva et al. 2024): positions counted by gates that depend on the content."""

import torch
from transformers import initialization as init

from ..errors import PosEncError
from . import Content, Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option


class CopeOptions(Options):
    max_positions: int = option(64, "number of counts with an embedding; higher counts use the last", minimum=2)


class Cope(Scheme[CopeOptions, torch.dtype]):
    """A key's position is the number of gates that open between it and the query; the query attends to that count.

    The gates are sigmoids of the scaled logits. Counts run from the query back to the key and are clamped; the logit of
    a fractional count is interpolated between its two neighbors.
    """

    name = "cope"
    paper = "Golovneva et al. 2024, https://arxiv.org/abs/2405.18719"
    kind = Kind.CONTENT
    formula = "q_i.k_j / sqrt(d) + q_i.e[p_ij], p_ij = sum over t = j..i of sigmoid(q_i.k_t / sqrt(d)), clamped"
    cost = "one table per layer; gates and counts of queries x keys per head"
    neutral = "`table` is 0, as in the paper"
    tested_against = "a loop over the formula, pair by pair"
    needs_distances = False
    reads_positions = False
    Options = CopeOptions

    def __init__(self, options: CopeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if not shape.causal:
            raise PosEncError(
                "cope counts from the query back to the key, so it is for causal models only (GPT-2, LLaMA, BERT with "
                "is_decoder=True); on an encoder use deberta, shaw or t5"
            )

    def layer_module(self) -> LayerParameters:
        return LayerParameters(table=((self.options.max_positions, self.shape.head_size), init.zeros_))

    def prepare(self, positions: Positions) -> torch.dtype:
        return positions.dtype

    def score(self, prepared: torch.dtype, layer_params: LayerParams, content: Content) -> torch.Tensor:
        query, last = content.query_BHQD, self.options.max_positions - 1
        logits = content.rotated_query_BHQD.matmul(content.key_BHKD.transpose(-1, -2)).to(prepared) * content.scaling
        gates = logits.sigmoid().masked_fill(~content.visible(), 0.0)
        counts = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)
        by_count_BHQP = query.matmul(layer_params()["table"].to(query).transpose(0, 1)).to(prepared)
        floor = counts.floor()
        # The clamp keeps a NaN from becoming an index out of range.
        low, high = (by_count_BHQP.gather(-1, count.long().clamp(0, last)) for count in (floor, counts.ceil()))
        fraction = counts - floor
        return high * fraction + low * (1 - fraction)
