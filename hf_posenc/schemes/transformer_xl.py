"""Sinusoids of the distance, projected by each layer and met by the query; two trained vectors a head beside it."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerModule, LayerParameters, LayerParams, ModelShape, Scheme
from .functional import BASE, frequencies, sinusoids
from .inputs import Content, Positions
from .options import Options, option
from .terms import DistanceBias, DistanceTable, QueryTerm, Separable, Term

SPREAD = 0.02
"""Standard deviation of all parameters under init = "paper", as in its code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLOptions(Options):
    shared_bias: bool = option(False, "one u and v for all layers; false: one each")
    init: Literal["neutral", "paper"] = option("neutral", "all parameters zero, or at random")


class Parameters(LayerParameters):
    """Some of the scheme's parameters, all of which start in the same way."""

    def __init__(self, start: str, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.start = start
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            if self.start == "paper":
                init.normal_(parameter, std=SPREAD)
            else:
                init.zeros_(parameter)


class Prepared(NamedTuple):
    """Sinusoids of all distances, or where these are not uniform, angles of queries and keys."""

    sinusoids_LE: torch.Tensor | None
    query_angles_BQF: torch.Tensor | None
    key_angles_BKF: torch.Tensor | None


class TransformerXL(Scheme):
    """The query meets a projected sinusoid of the distance; u and v of each head stand in for a query of their own.

    [(q + u) . k + (q + v) . W R] / sqrt(d), with R the sinusoids of i - j, all sines first.
    """

    name = "transformer_xl"
    paper = "Dai et al. 2019, https://arxiv.org/abs/1901.02860"
    kind = Kind.CONTENT
    formula = "[(q_i + u).k_j + (q_i + v).W R_(i-j)] / sqrt(d), R sinusoids, all sines first"
    cost = "a projection and two vectors a head a layer; queries x distances"
    neutral = "`key_projection`, `u` and `v` are 0"
    extends = True
    needs_key_positions = True
    Options = TransformerXLOptions
    options: TransformerXLOptions

    def __init__(self, options: TransformerXLOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.biases = Parameters(options.init, **self._bias_shapes()) if options.shared_bias else None

    def _bias_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("u", "v"), (self.shape.num_heads, self.shape.head_size))

    def layer_module(self) -> LayerModule:
        shape = self.shape
        projection = (shape.num_heads * shape.head_size, shape.hidden_size)
        own = {} if self.options.shared_bias else self._bias_shapes()
        return Parameters(self.options.init, key_projection=projection, **own)

    def prepare(self, positions: Positions) -> Prepared:
        width, dtype = self.shape.hidden_size, positions.dtype
        if positions.uniform:
            return Prepared(sinusoids(-positions.distances, width, BASE, "halves", dtype), None, None)
        assert positions.keys_BK is not None
        rates = frequencies(width, BASE, positions.distances.device, dtype)
        queries, keys = (places.to(dtype).unsqueeze(-1) / rates for places in (positions.queries_BQ, positions.keys_BK))
        return Prepared(None, queries, keys)

    def score(self, prepared: Prepared, part: LayerParams | None, content: Content) -> list[Term]:
        assert part is not None
        own = part()
        biases = self.biases() if self.biases is not None else own
        heads, scaling = self.shape.num_heads, content.scaling
        projection_HDE = own["key_projection"].unflatten(0, (heads, -1)) * scaling
        u_HD, v_HD = biases["u"] * scaling, biases["v"]
        terms: list[Term] = [torch.einsum("hd,bhkd->bhk", u_HD.to(content.key_BHKD), content.key_BHKD).unsqueeze(2)]
        if prepared.sinusoids_LE is not None:
            rows_HLD = torch.einsum("le,hde->hld", prepared.sinusoids_LE, projection_HDE.to(prepared.sinusoids_LE))
            places = torch.arange(rows_HLD.shape[1], device=rows_HLD.device)
            by_distance_HL = torch.einsum("hd,hld->hl", v_HD.to(rows_HLD), rows_HLD)
            return [*terms, QueryTerm(DistanceTable(rows_HLD, places)), DistanceBias(by_distance_HL)]
        return [
            *terms,
            self._by_angle_sums(content.query_BHQD + v_HD[:, None].to(content.query_BHQD), projection_HDE, prepared),
        ]

    def _by_angle_sums(self, query_BHQD: torch.Tensor, projection_HDE: torch.Tensor, prepared: Prepared) -> Separable:
        """The same where distances form no row: sin(a - b) and cos(a - b) taken apart into functions of a and of b."""
        assert prepared.query_angles_BQF is not None
        assert prepared.key_angles_BKF is not None
        angles, key_angles = prepared.query_angles_BQF[:, None], prepared.key_angles_BKF[:, None]
        by_feature = torch.einsum("bhqd,hde->bhqe", query_BHQD.to(angles.dtype), projection_HDE.to(angles.dtype))
        of_sines = by_feature[..., : angles.shape[-1]]
        of_cosines = by_feature[..., angles.shape[-1] :]
        of_cosines = nn.functional.pad(of_cosines, (0, of_sines.shape[-1] - of_cosines.shape[-1]))
        sines, cosines = angles.sin(), angles.cos()
        with_cosine = of_sines * sines + of_cosines * cosines
        with_sine = of_cosines * sines - of_sines * cosines
        return Separable(
            torch.cat([with_cosine, with_sine], dim=-1), torch.cat([key_angles.cos(), key_angles.sin()], dim=-1)
        )
