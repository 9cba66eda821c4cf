"""Attention temperature by position: Llama 4's steps, and Scalable-Softmax (Nakanishi 2025), learned per head."""

import functools
import math
from typing import Literal

import torch
from transformers import initialization as init

from ..errors import PosEncError
from . import Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option
from .base import ParameterSpec

FORM_OPTIONS = {"llama4": ("attn_scale", "floor_scale", "offset"), "ssmax": ("bias", "scale")}


class TemperatureOptions(Options):
    form: Literal["llama4", "ssmax"] = option(
        "llama4", "a fixed function of the position, or a learned one of the number of keys that a query sees"
    )
    attn_scale: float = option(0.1, "llama4: how fast the factor grows, as in Llama4TextConfig", minimum=0, maximum=100)
    floor_scale: int = option(8192, "llama4: positions per step; the factor of the first step is 1", minimum=1)
    offset: int = option(1, "llama4: added to the position: 1 in Llama 4, 0 in Ministral 3", minimum=0, maximum=1)
    bias: bool = option(True, "ssmax: also learn b, which starts at 1; false: s log n alone, as in the paper")
    scale: float | None = option(
        None,
        "ssmax: initial s; None: 0, or without a bias, such that the factor averages 1 over the trained length",
        minimum=-100,
        maximum=100,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {"attn_scale": 0.1, "floor_scale": 8192, "offset": 1, "bias": True, "scale": None}
        for form, names in FORM_OPTIONS.items():
            changed = [name for name in names if getattr(self, name) != defaults[name]]
            if form != self.form and changed:
                raise PosEncError(f'{changed[0]} belongs to another form: add "form": "{form}"')


class Temperature(Scheme[TemperatureOptions, torch.Tensor]):
    """The product of query and key is multiplied by a factor that grows along the sequence: attention stays sharp.

    It carries no order of its own, so add it to another scheme. What other schemes add to the logits is not multiplied.
    The number of keys, n, includes the query itself, and counts neither padding nor other documents of a packed row,
    nor keys outside a sliding window.
    """

    name = "temperature"
    paper = "Nakanishi 2025, https://arxiv.org/abs/2501.19399 (ssmax); transformers' Llama4TextAttention (llama4)"
    kind = Kind.TEMPERATURE
    formula = (
        "t_i q_i.k_j / sqrt(d); llama4: t_i = 1 + attn_scale log(1 + floor((i + offset) / floor_scale)); "
        "ssmax: t_i = s_h log n_i + b_h"
    )
    cost = "llama4: no parameters; ssmax: two scalars per head and layer; a product per query. Runs on flash attention"
    neutral = "ssmax: `slope` (s) and `content_change` (b - 1) are 0; llama4: positions before floor_scale - offset"
    tested_against = "Llama 4 and Ministral 3 of Transformers (llama4); a loop over the formula (ssmax)"
    needs_distances = False
    Options = TemperatureOptions

    def __init__(self, options: TemperatureOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.needs_key_counts = options.form == "ssmax"
        self.reads_positions = options.form == "llama4"

    def layer_module(self) -> LayerParameters | None:
        if self.options.form == "llama4":
            return None
        heads = (self.shape.num_heads,)
        scale = self._initial_scale() if self.options.scale is None else self.options.scale
        parameters: dict[str, ParameterSpec] = {"slope": (heads, functools.partial(init.constant_, val=scale))}
        if self.options.bias:  # as a difference from 1, so that weight decay pulls to neutral
            parameters["content_change"] = (heads, init.zeros_)
        return LayerParameters(**parameters)

    def _initial_scale(self) -> float:
        """Zero if a bias of one keeps the logits; else one over the mean of log n up to the trained length."""
        if self.options.bias:
            return 0.0
        length = max(self.shape.max_positions, 2)
        return length / math.lgamma(length + 1) if self.shape.causal else 1 / math.log(length)

    def prepare(self, positions: Positions) -> torch.Tensor:
        """The factors of llama4, or the log n of ssmax, (B or 1, H or 1, Q)."""
        if self.options.form == "ssmax":
            assert positions.key_counts_BHQ is not None
            return positions.key_counts_BHQ.to(positions.dtype).log()
        tokens = positions.queries_BQ[:, None].clamp(min=0).to(positions.dtype)
        steps = ((tokens + self.options.offset) / self.options.floor_scale).floor()
        return 1 + self.options.attn_scale * steps.log1p()

    def content_scale(self, prepared: torch.Tensor, layer_params: LayerParams) -> torch.Tensor:
        if self.options.form == "llama4":
            return prepared
        params = layer_params()
        factors = prepared * params["slope"].to(prepared.dtype)[:, None]
        if self.options.bias:
            factors = factors + 1 + params["content_change"].to(prepared.dtype)[:, None]
        return factors
