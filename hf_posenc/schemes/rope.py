"""RoPE (Su et al. 2021): queries and keys rotated by angles proportional to their position."""

import math
import types
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import PosEncError
from . import Kind, ModelShape, Options, Positions, Scheme, option
from .functional import BASE, Layout, Rotation, rotate_pairs, rotation

SCALING_KEYS = {
    *("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
CHANGES_WITH_LENGTH = ("dynamic", "longrope")


class RopeOptions(Options):
    theta: float | None = option(
        None, "base of the wavelengths; None: the checkpoint's, or 10000 if it has none", above=0
    )
    layout: Layout = option("halves", "which features form a pair: d/2 apart (LLaMA) or neighbors (GPT-J, RoFormer)")
    partial_rotary_factor: float = option(1.0, "fraction of each head that is rotated", above=0, maximum=1)
    scaling: dict[str, Any] | None = option(None, "as transformers' rope_parameters; None: the checkpoint's, or none")


class Rope(Scheme[RopeOptions, Rotation]):
    """Queries and keys are rotated by angles proportional to their position, so that logits depend on distance."""

    name = "rope"
    paper = "Su et al. 2021, https://arxiv.org/abs/2104.09864"
    kind = Kind.ROTATION
    formula = "q_i, k_j rotated by i and j times theta^(-2k/d), pair by pair"
    cost = "no parameters; two products per query and key. Runs on flash attention"
    extends = True
    Options = RopeOptions

    def __init__(self, options: RopeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.rope_parameters = resolve_rope_parameters(options, shape)
        self.rope_type: str = self.rope_parameters["rope_type"]
        self.depends_on_length = self.rope_type in CHANGES_WITH_LENGTH
        self.rotary_size = int(shape.head_size * options.partial_rotary_factor)
        if self.rotary_size % 2 or not self.rotary_size or shape.head_size % 2:
            raise PosEncError(
                f"rope rotates pairs of features, but {self.rotary_size} of the head size {shape.head_size} do not "
                "pair up; choose partial_rotary_factor so that an even part of an even head size is rotated"
            )
        with torch.device("cpu"):  # the model may be under construction on the meta device
            frequencies, self.attention_factor = self._inverse_frequencies(None)
            long_frequencies, _ = self._inverse_frequencies(10 * shape.max_positions)
        finite = frequencies.isfinite().all() and long_frequencies.isfinite().all()
        if not finite or 2 * len(long_frequencies) > shape.head_size:
            raise PosEncError(f"rope: scaling {self.rope_parameters!r} gives unusable frequencies; check its factors")
        # Plain numbers, not a buffer: model.to(bfloat16) would round it and meta loading would lose it.
        self.frequencies: list[float] = frequencies.tolist()

    def _inverse_frequencies(
        self, length: int | None, device: torch.device | None = None
    ) -> tuple[torch.Tensor, float]:
        """The `inv_freq` and attention factor of transformers' rotary modules, for inputs of a length."""
        if self.rope_type == "default":
            steps = torch.arange(0, self.rotary_size, 2, dtype=torch.float, device=device) / self.rotary_size
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
            # A tensor, as transformers passes it, so that the arithmetic is bit-identical.
            seq_len = None if length is None else torch.tensor(length, device=device)
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[self.rope_type](config, device, seq_len=seq_len)
        except (KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, ValueError) as error:
            raise PosEncError(f"rope: scaling {self.rope_type!r} is incomplete or malformed: {error!r}") from error
        return inv_freq, attention_factor

    def prepare(self, positions: Positions) -> Rotation:
        device = positions.queries_BQ.device
        frequencies, factor = torch.tensor(self.frequencies, device=device), self.attention_factor
        if self.depends_on_length and (length := self._scaled_length(positions)) is not None:
            frequencies, factor = self._inverse_frequencies(length, device)
        prepared = rotation(positions.queries_BQ[:, None, :, None].float() * frequencies, self.options.layout)
        return Rotation(*(tensor * factor for tensor in prepared)) if factor != 1.0 else prepared

    def _scaled_length(self, positions: Positions) -> int | None:
        """The length, if it is long enough to change the frequencies. Cached keys keep their angles."""
        original = self.rope_parameters.get("original_max_position_embeddings", self.shape.max_positions)
        if positions.length_bound is not None and positions.length_bound <= original:
            return None
        length = positions.length()
        if length is None:
            raise PosEncError(
                f"rope: scaling {self.rope_type!r} depends on the input's length, which is unknown while tracing: "
                "leave position_ids out, or run without torch.compile / torch.export"
            )
        if length <= original:
            return None
        filled_at = positions.cache_filled_at
        same_as_cached = self.rope_type == "longrope" and filled_at is not None and filled_at > original
        if positions.cached and not same_as_cached:
            raise PosEncError(
                f"rope: scaling {self.rope_type!r} changes all angles at length {length} (past {original}), but cached "
                "keys keep the old ones: pass use_cache=False, or use a fixed scaling (linear, yarn, llama3)"
            )
        return length

    def uses_rotate_half(self) -> bool:
        return self.options.layout == "halves" and 2 * len(self.frequencies) == self.shape.head_size

    def rotate(self, states_BHQD: torch.Tensor, prepared: Rotation, keys: bool) -> torch.Tensor:
        return rotate_pairs(states_BHQD, prepared.cos, prepared.signed_sin, self.options.layout)


def resolve_rope_parameters(options: RopeOptions, shape: ModelShape) -> dict[str, Any]:
    """The `rope_parameters` that transformers would use for this rotation; options override the checkpoint's."""
    stock = shape.rope_parameters or {}
    if options.scaling is not None:
        _check_scaling(options.scaling)
        parameters = dict(options.scaling)
    else:
        parameters = dict(stock) if options.theta is None else {}
    parameters.setdefault("rope_type", "default")
    parameters["rope_theta"] = options.theta or parameters.get("rope_theta") or stock.get("rope_theta") or BASE
    rope_type, valid_types = parameters["rope_type"], sorted({"default", *ROPE_INIT_FUNCTIONS})
    if rope_type not in valid_types:
        raise PosEncError(f"rope: scaling: rope_type {rope_type!r} is unknown; expected one of {valid_types}")
    if rope_type in NEEDS_ORIGINAL_LENGTH:
        parameters.setdefault("original_max_position_embeddings", shape.max_positions)
    return parameters


def _check_scaling(scaling: dict[str, Any]) -> None:
    if unknown := sorted(set(scaling) - SCALING_KEYS):
        raise PosEncError(f"rope: scaling has no setting {unknown[0]!r}; expected some of {sorted(SCALING_KEYS)}")
    for key, value in scaling.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool) and not 0 < number < math.inf:
                raise PosEncError(f"rope: scaling: {key} must be above 0 and finite, got {number!r}")
    if "rope_type" not in scaling:
        raise PosEncError(f"rope: scaling needs a rope_type, one of {sorted(ROPE_INIT_FUNCTIONS)}")
