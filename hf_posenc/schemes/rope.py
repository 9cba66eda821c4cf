"""Rotary positions: queries and keys are turned by angles that grow with their position."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .base import Kind, ModelShape, Scheme
from .functional import Angles, Layout, rotate_pairs, rotation_angles
from .inputs import Positions
from .options import Options, fraction, option, positive

SCALING_KEYS = {
    *("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
CHANGES_WITH_LENGTH = ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeOptions(Options):
    theta: float | None = option(
        None, "base of the wavelengths; None: the checkpoint's own, or 10000 where it has none", positive
    )
    layout: Layout = option("halves", "which features turn together: d/2 apart (LLaMA) or neighbours (GPT-J, RoFormer)")
    partial_rotary_factor: float = option(1.0, "share of each head that is turned", fraction)
    scaling: dict[str, Any] | None = option(
        None,
        "as transformers' rope_parameters: rope_type and its settings; None: no scaling, or the checkpoint's own "
        "where theta is not given either",
    )


class Rope(Scheme):
    """Queries and keys are turned by angles proportional to their positions, so that logits see distances only."""

    name = "rope"
    paper = "Su et al. 2021, https://arxiv.org/abs/2104.09864"
    kind = Kind.ROTATION
    formula = "q_i, k_j turned by i and j times theta^(-2k/d), pair by pair"
    cost = "no parameters; two products a query and key. Runs on flash attention"
    neutral = "no parameters"
    extends = True
    Options = RopeOptions
    options: RopeOptions

    def __init__(self, options: RopeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.rope_parameters = resolved_parameters(options, shape)
        self.rope_type = self.rope_parameters["rope_type"]
        self.depends_on_length = self.rope_type in CHANGES_WITH_LENGTH
        turned = int(shape.head_size * options.partial_rotary_factor)
        if turned % 2 or not turned or shape.head_size % 2:
            raise ValueError(
                f"rope turns features in pairs: {turned} of the head size {shape.head_size} do not pair up; "
                "choose partial_rotary_factor so that an even number of an even head size is turned"
            )
        with torch.device("cpu"):  # the caller may be building the model on the meta device
            frequencies, self.attention_factor = self._frequencies_for(None)
            longest, _ = self._frequencies_for(10 * shape.max_positions)
        if not (frequencies.isfinite().all() and longest.isfinite().all() and 2 * len(longest) <= shape.head_size):
            raise ValueError(
                f"rope: scaling {self.rope_parameters!r} gives no usable frequencies: {frequencies.tolist()}"
            )
        # Plain numbers, not a buffer: a buffer would be narrowed by model.to(bfloat16) and lost by meta loading.
        self.frequencies = frequencies.tolist()

    def _frequencies_for(self, length: int | None, device: Any = None) -> tuple[torch.Tensor, float]:
        kind = self.rope_type
        if kind == "default":
            turned = int(self.shape.head_size * self.options.partial_rotary_factor)
            steps = torch.arange(0, turned, 2, dtype=torch.float, device=device) / turned
            return 1.0 / self.rope_parameters["rope_theta"] ** steps, 1.0
        config = types.SimpleNamespace(
            rope_parameters=dict(self.rope_parameters, partial_rotary_factor=self.options.partial_rotary_factor),
            head_dim=self.shape.head_size,
            hidden_size=self.shape.hidden_size,
            num_attention_heads=self.shape.num_heads,
            max_position_embeddings=self.shape.max_positions,
            standardize_rope_params=lambda: None,
        )
        try:
            # A tensor, as transformers' own rotary modules pass it: the arithmetic on it is then the same to the bit.
            tensor = None if length is None else torch.tensor(length, device=device)
            return ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=tensor)
        except (KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, ValueError) as error:
            raise ValueError(f"rope: scaling of rope_type {kind!r} is incomplete or malformed: {error!r}") from error

    def prepare(self, positions: Positions) -> Angles:
        device = positions.queries_BQ.device
        frequencies, factor = torch.tensor(self.frequencies, device=device), self.attention_factor
        if self.depends_on_length:
            length = self._length_in_question(positions)
            if length is not None:
                frequencies, factor = self._frequencies_for(length, device)
        angles = rotation_angles(positions.queries_BQ[:, None, :, None].float() * frequencies, self.options.layout)
        return Angles(*(found * factor for found in angles)) if factor != 1.0 else angles

    def _length_in_question(self, positions: Positions) -> int | None:
        """The length when it changes the frequencies, else None. Keys in a cache keep the angles they went in with."""
        kind, original = self.rope_type, self.shape.max_positions
        original = self.rope_parameters.get("original_max_position_embeddings", original)
        if positions.length_bound is not None and positions.length_bound <= original:
            return None
        length = positions.length()
        if length is None:
            raise ValueError(
                f"rope: scaling of rope_type {kind!r} depends on the input's length, which is not known while this "
                "forward is traced: leave position_ids out, or run it without torch.compile / torch.export"
            )
        if length <= original:
            return None
        filled_at = positions.cache_filled_at
        same_as_cached = kind == "longrope" and filled_at is not None and filled_at > original
        if positions.cached and not same_as_cached:
            raise ValueError(
                f"rope: scaling of rope_type {kind!r} changes all angles at length {length} (past "
                f"{original}), but cached keys keep the old ones: pass use_cache=False, or use a scaling with fixed "
                "angles (linear, yarn, llama3)"
            )
        return length

    def uses_rotate_half(self) -> bool:
        return self.options.layout == "halves" and 2 * len(self.frequencies) == self.shape.head_size

    def rotate(self, states_BHQD: torch.Tensor, prepared: Angles, keys: bool) -> torch.Tensor:
        return rotate_pairs(states_BHQD, prepared.cosines, prepared.turning, self.options.layout)


def resolved_parameters(options: RopeOptions, shape: ModelShape) -> dict[str, Any]:
    """What transformers would call this rotation's `rope_parameters`; options win over the checkpoint's own."""
    own = shape.rope_parameters or {}
    if options.scaling is None:
        found = dict(own) if options.theta is None else {}
    else:
        found = dict(options.scaling)
        if unknown := sorted(set(found) - SCALING_KEYS):
            raise ValueError(f"rope: scaling has no setting {unknown[0]!r}; it takes {sorted(SCALING_KEYS)}")
        for key, value in found.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, (int, float)) and not isinstance(number, bool) and not 0 < number < math.inf:
                    raise ValueError(f"rope: scaling: {key} must be above 0 and finite, got {number!r}")
        if "rope_type" not in found:
            raise ValueError(f"rope: scaling needs a rope_type, one of {sorted(ROPE_INIT_FUNCTIONS)}")
    found.setdefault("rope_type", "default")
    found["rope_theta"] = options.theta or found.get("rope_theta") or own.get("rope_theta") or 10000.0
    kinds = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if found["rope_type"] not in kinds:
        raise ValueError(f"rope: scaling: rope_type {found['rope_type']!r} is unknown; it is one of {kinds}")
    if found["rope_type"] in NEEDS_ORIGINAL_LENGTH:
        found.setdefault("original_max_position_embeddings", shape.max_positions)
    return found
