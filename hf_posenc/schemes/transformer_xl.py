"""Transformer-XL (Dai et al. 2019): queries attend to projected sinusoids of the distance."""

from typing import Literal

import torch
from torch import nn

from . import Content, Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option
from .functional import BASE, paper_or_neutral, sinusoids, timescales
from .terms import DistanceBias, DistanceTable, QueryTerm, Separable, Term

INIT_STD = 0.02
Prepared = tuple[torch.Tensor, ...]
"""The sinusoids of all distances, (L, E), if these are uniform; else the angles of queries and of keys, (B, Q, F)."""


class TransformerXLOptions(Options):
    shared_bias: bool = option(False, "one u and v for all layers; false: one per layer")
    init: Literal["neutral", "paper"] = option("neutral", "all parameters zero, or random as in the paper's code")


class TransformerXL(Scheme[TransformerXLOptions, Prepared]):
    """Queries attend to keys and to projected sinusoids of the distance, with a learned bias on the query for each."""

    name = "transformer_xl"
    paper = "Dai et al. 2019, https://arxiv.org/abs/1901.02860"
    kind = Kind.CONTENT
    formula = "[(q_i + u).k_j + (q_i + v).W R_(i-j)] / sqrt(d), R sinusoids, all sines first"
    cost = "per layer a projection, and two vectors per head; queries x distances"
    neutral = "`key_projection`, `u` and `v` are 0"
    tested_against = "XLNet of Transformers; a loop over the formula, pair by pair"
    needs_key_positions = True
    Options = TransformerXLOptions

    def __init__(self, options: TransformerXLOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.biases = self._new_parameters("u", "v") if options.shared_bias else None

    def _new_parameters(self, *names: str) -> LayerParameters:
        width = self.shape.num_heads * self.shape.head_size
        shapes = dict.fromkeys(("u", "v"), (self.shape.num_heads, self.shape.head_size))
        shapes["key_projection"] = (width, self.shape.hidden_size)
        initializer = paper_or_neutral(self.options.init, INIT_STD)
        return LayerParameters(**{name: (shapes[name], initializer) for name in names})

    def layer_module(self) -> LayerParameters:
        biases = () if self.options.shared_bias else ("u", "v")
        return self._new_parameters("key_projection", *biases)

    def prepare(self, positions: Positions) -> Prepared:
        width, dtype = self.shape.hidden_size, positions.dtype
        if positions.uniform:
            return (sinusoids(-positions.distances, width, BASE, "halves", dtype),)
        assert positions.keys_BK is not None
        scales = timescales(width, BASE, positions.distances.device, dtype)
        return tuple(tokens.to(dtype).unsqueeze(-1) / scales for tokens in (positions.queries_BQ, positions.keys_BK))

    def score(self, prepared: Prepared, layer_params: LayerParams, content: Content) -> list[Term]:
        params = layer_params()
        biases = params if self.biases is None else self.biases()
        projection_HDE = params["key_projection"].view(self.shape.num_heads, -1, self.shape.hidden_size)
        projection_HDE = content.select_heads(projection_HDE) * content.scaling
        u_HD, v_HD = content.select_heads(biases["u"]) * content.scaling, content.select_heads(biases["v"])
        u_term = torch.einsum("hd,bhkd->bhk", u_HD.to(content.key_BHKD), content.key_BHKD).unsqueeze(2)
        if len(prepared) == 2:
            query_BHQD = content.query_BHQD + v_HD[:, None].to(content.query_BHQD)
            return [u_term, _separable_term(query_BHQD, projection_HDE, *prepared)]
        (sinusoids_LE,) = prepared
        rows_HLD = torch.einsum("le,hde->hld", sinusoids_LE, projection_HDE.to(sinusoids_LE))
        index_L = torch.arange(rows_HLD.shape[1], device=rows_HLD.device)
        v_term_HL = torch.einsum("hd,hld->hl", v_HD.to(rows_HLD), rows_HLD)
        return [u_term, QueryTerm(DistanceTable(rows_HLD, index_L)), DistanceBias(v_term_HL)]


def _separable_term(
    query_BHQD: torch.Tensor, projection_HDE: torch.Tensor, query_angles_BQF: torch.Tensor, key_angles_BKF: torch.Tensor
) -> Separable:
    """Expand sin(a - b) and cos(a - b) into functions of a and of b, for distances that are not uniform."""
    angles, key_angles = query_angles_BQF[:, None], key_angles_BKF[:, None]
    features = torch.einsum("bhqd,hde->bhqe", query_BHQD.to(angles.dtype), projection_HDE.to(angles.dtype))
    of_sin, of_cos = features[..., : angles.shape[-1]], features[..., angles.shape[-1] :]
    of_cos = nn.functional.pad(of_cos, (0, of_sin.shape[-1] - of_cos.shape[-1]))
    sin, cos = angles.sin(), angles.cos()
    queries = torch.cat([of_sin * sin + of_cos * cos, of_cos * sin - of_sin * cos], dim=-1)
    return Separable(queries, torch.cat([key_angles.cos(), key_angles.sin()], dim=-1))
