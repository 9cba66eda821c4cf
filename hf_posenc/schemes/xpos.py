"""xPos (Sun et al. 2023): rotary embeddings whose logits decay with the distance."""

import math
from typing import NamedTuple

import torch

from ..errors import PosEncError, SequenceLengthError
from . import Kind, ModelShape, Options, Positions, Scheme, is_tracing, option
from .functional import BASE
from .rotations import Rotation, join_pairs, rotate_pairs, rotation

XPOS_GAMMA = 0.4
MAX_EXPONENT = {torch.float16: 10.0}
"""Beyond this exp() overflows the dtype; 80 for dtypes with the range of float32."""


class XposOptions(Options):
    scale_base: float = option(512.0, "distance over which the shortest wavelength decays to 0.29", above=0)


class Decay(NamedTuple):
    """The rotation, and the logarithm of the factor of each feature."""

    rotation: Rotation
    exponents: torch.Tensor
    max_offset: int | None
    """The largest distance of a position from the center; None if unknown."""


class Xpos(Scheme[XposOptions, Decay]):
    """Rotary embeddings with decay: queries shrink and keys grow with their position, so that far logits fade."""

    name = "xpos"
    paper = "Sun et al. 2023, https://arxiv.org/abs/2212.10554"
    kind = Kind.ROTATION
    formula = (
        "rope, with q_i times zeta^((i - c) / scale_base) and k_j divided by the same at j, zeta = (2k + 0.4 d) / 1.4 d"
    )
    cost = "no parameters; as rope"
    tested_against = "a loop over the formula"
    Options = XposOptions

    def __init__(self, options: XposOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if shape.head_size % 2:
            raise PosEncError(
                f"xpos rotates pairs of features, but the head size {shape.head_size} is odd; use alibi or t5"
            )
        # Fixed, so that cached keys stay valid; in the middle, so that factors stay near one.
        self.center = shape.max_positions // 2

    def prepare(self, positions: Positions) -> Decay:
        size, tokens = self.shape.head_size, positions.queries_BQ[:, None, :, None]
        features = torch.arange(0, size, 2, device=tokens.device, dtype=torch.float)
        zeta = (features + XPOS_GAMMA * size) / ((1 + XPOS_GAMMA) * size)
        exponents = (tokens - self.center).float() / self.options.scale_base * zeta.log()
        length = positions.length_bound if positions.length_bound is not None or is_tracing() else positions.length()
        return Decay(
            rotation(tokens * self.shape.rotary_direction / BASE ** (features / size), self.shape.rotary_layout),
            join_pairs(exponents, exponents, self.shape.rotary_layout),
            max_offset=None if length is None else max(length - self.center, self.center),
        )

    def rotate(self, states_BHQD: torch.Tensor, prepared: Decay, keys: bool) -> torch.Tensor:
        if prepared.max_offset is not None:
            self._check_overflow(states_BHQD.dtype, prepared.max_offset)
        factors = (-prepared.exponents if keys else prepared.exponents).exp()
        cos, signed_sin = prepared.rotation.cos, prepared.rotation.signed_sin
        return rotate_pairs(states_BHQD, cos * factors, signed_sin * factors, self.shape.rotary_layout)

    def _check_overflow(self, dtype: torch.dtype, max_offset: int) -> None:
        limit = MAX_EXPONENT.get(dtype, 80.0)
        steepest = -math.log(XPOS_GAMMA / (1 + XPOS_GAMMA))
        if max_offset * steepest / self.options.scale_base > limit:
            raise SequenceLengthError(
                f"xpos: at {max_offset} positions from the center the decay overflows {dtype}: raise scale_base above "
                f"{math.ceil(max_offset * steepest / limit)}, use bfloat16 instead of float16, or shorten the input"
            )
