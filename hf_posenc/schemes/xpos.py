"""xPos (Sun et al. 2023): rotary embeddings whose logits decay with the distance."""

import math
from typing import NamedTuple

import torch

from ..errors import PosEncError
from . import Kind, ModelShape, Options, Positions, Scheme, is_tracing, option
from .functional import BASE, Rotation, expand_pairs, rotate_pairs, rotation

GAMMA, LAYOUT = 0.4, "halves"
MAX_EXPONENT = {torch.float16: 10.0}
"""Beyond this exp() overflows the dtype; 80 for dtypes with the range of float32."""


class XposOptions(Options):
    scale_base: float = option(512.0, "distance over which the shortest wavelength decays to 0.29", above=0)


class Prepared(NamedTuple):
    rotation: Rotation
    exponents: torch.Tensor
    max_offset: int | None
    """The largest distance of a position from the center; None if unknown."""


class Xpos(Scheme[XposOptions, Prepared]):
    """Rotary embeddings with decay: queries shrink and keys grow with their position, so that far logits fade."""

    name = "xpos"
    paper = "Sun et al. 2023, https://arxiv.org/abs/2212.10554"
    kind = Kind.ROTATION
    formula = (
        "rope, with q_i times zeta^((i - c) / scale_base) and k_j divided by the same at j, zeta = (2k + 0.4 d) / 1.4 d"
    )
    cost = "no parameters; as rope"
    extends = True
    Options = XposOptions

    def __init__(self, options: XposOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if shape.head_size % 2:
            raise PosEncError(
                f"xpos rotates pairs of features, but the head size {shape.head_size} is odd; use alibi or t5"
            )
        # Fixed, so that cached keys stay valid; in the middle, so that factors stay near one.
        self.center = shape.max_positions // 2

    def prepare(self, positions: Positions) -> Prepared:
        size, device = self.shape.head_size, positions.queries_BQ.device
        features = torch.arange(0, size, 2, device=device, dtype=torch.float)
        angles = positions.queries_BQ.unsqueeze(-1).float() / BASE ** (features / size)
        zeta = (features + GAMMA * size) / ((1 + GAMMA) * size)
        decay = (positions.queries_BQ - self.center).unsqueeze(-1).float() / self.options.scale_base * zeta.log()
        exponents = expand_pairs(decay, LAYOUT).unsqueeze(1)
        length = positions.length_bound if positions.length_bound is not None or is_tracing() else positions.length()
        max_offset = None if length is None else max(length - self.center, self.center)
        return Prepared(rotation(angles.unsqueeze(1), LAYOUT), exponents, max_offset)

    def rotate(self, states_BHQD: torch.Tensor, prepared: Prepared, keys: bool) -> torch.Tensor:
        self._check_overflow(states_BHQD.dtype, prepared.max_offset)
        factors = (-prepared.exponents if keys else prepared.exponents).exp()
        cos, _, signed_sin = prepared.rotation
        return rotate_pairs(states_BHQD, cos * factors, signed_sin * factors, LAYOUT)

    def _check_overflow(self, dtype: torch.dtype, max_offset: int | None) -> None:
        limit = MAX_EXPONENT.get(dtype, 80.0)
        steepest = -math.log(GAMMA / (1 + GAMMA)) / self.options.scale_base
        if max_offset is not None and max_offset * steepest > limit:
            raise PosEncError(
                f"xpos: at {max_offset} positions from the center the decay overflows {dtype}: raise scale_base above "
                f"{math.ceil(max_offset * steepest * self.options.scale_base / limit)}, use bfloat16 instead of "
                "float16, or shorten the input"
            )
