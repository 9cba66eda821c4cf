"""Rotary embeddings: RoPE (Su et al. 2021), and xPos (Sun et al. 2023), whose logits decay with the distance."""

import dataclasses
import functools
import math
import types
from typing import Any, Literal, NamedTuple

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import PosEncError, SequenceLengthError
from ..validation import truncate_repr
from . import Kind, ModelShape, Options, Positions, Remap, Scheme, is_tracing, option
from .base import StockRotate
from .functional import BASE
from .options import describe_type, matches_type
from .remapping import parse_extension

LIST_KEYS = {"short_factor", "long_factor"}
NUMBER_KEYS = {
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", *LIST_KEYS),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
}
SCALING_KEYS = {"rope_type", "truncate", *NUMBER_KEYS}
NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
CHANGES_WITH_LENGTH = ("dynamic", "longrope")
MAX_FREQUENCY, MIN_ATTENTION_FACTOR, MAX_ATTENTION_FACTOR = 1e4, 0.01, 100.0
"""Beyond any useful rotation: angles and attention scores stay finite in every dtype."""
XPOS_GAMMA = 0.4
MAX_EXPONENT = {torch.float16: 10.0}
"""Beyond this exp() overflows the dtype; 80 for dtypes with the range of float32."""


class FarRotation(NamedTuple):
    """How much further queries and keys are rotated where they are far apart (see `remapping`)."""

    starts_BQ: tuple[torch.Tensor, ...]
    keys_BK: torch.Tensor
    """The positions of the keys."""
    query_offsets_BQ: tuple[torch.Tensor, ...]
    key_offsets_BK: torch.Tensor


class Rotation(NamedTuple):
    """Rotary angles of one forward pass, (B, 1, Q, D). Starts with cos and sin: see `Scheme.uses_rotate_half`."""

    cos: torch.Tensor
    sin: torch.Tensor
    signed_sin: torch.Tensor
    """The sines with the sign of the other feature of a pair, computed once instead of in every layer."""
    far: FarRotation | None = None
    further: tuple["Rotation", ...] = ()
    """The rotations by the offsets of `far`: those of the queries, then that of the keys."""


class StockRotation(NamedTuple):
    """A rotation that is left to the architecture's own code."""

    rotate: StockRotate
    far: FarRotation | None


def join_pairs(first: torch.Tensor, second: torch.Tensor, layout: str) -> torch.Tensor:
    """Put the two values of each pair of features where the layout has these features."""
    if layout == "interleaved":
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def rotation(angles: torch.Tensor, layout: str) -> Rotation:
    """Build the rotation by one angle per pair of features."""
    cos, sin = angles.cos(), angles.sin()
    return Rotation(join_pairs(cos, cos, layout), join_pairs(sin, sin, layout), join_pairs(-sin, sin, layout))


def rotate_pairs(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Rotate the first features of each head, as many as there are angles, and leave the rest."""
    size = cos.shape[-1]
    rotated, rest = (states, None) if size == states.shape[-1] else (states[..., :size], states[..., size:])
    if layout == "interleaved":
        partners = rotated.view(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partners = rotated.roll(size // 2, -1)
    rotated = rotated * cos.to(states.dtype) + partners * signed_sin.to(states.dtype)
    return rotated if rest is None else torch.cat([rotated, rest], dim=-1)


def rotate_further(states: torch.Tensor, rotation: Rotation, layout: str) -> torch.Tensor:
    """Rotate states, perhaps only the first ones, that are rotated already; in float32 or wider."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    cos, signed_sin = (angles[:, :, : states.shape[2]] for angles in (rotation.cos, rotation.signed_sin))
    return rotate_pairs(wide, cos, signed_sin, layout).to(states.dtype)


class RopeOptions(Options):
    theta: float | None = option(
        None, "base of the wavelengths; None: the checkpoint's, or 10000 if it has none", above=0
    )
    layout: Literal["halves", "interleaved"] | None = option(
        None, "which features form a pair: d/2 apart or neighbors; None: the checkpoint's, or halves if it has none"
    )
    partial_rotary_factor: float | None = option(
        None, "fraction of each head that is rotated; None: the checkpoint's, or 1 if it has none", above=0, maximum=1
    )
    scaling: dict[str, Any] | None = option(None, "as transformers' rope_parameters; None: the checkpoint's, or none")
    extend: dict[str, Any] | None = option(
        None, "remap far distances, so that longer inputs need no training: a method and its options, see below"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extend is not None:
            parse_extension(self.extend)


def resolve_rope_parameters(options: RopeOptions, shape: ModelShape) -> dict[str, Any]:
    """The `rope_parameters` that transformers would use for this rotation; options override the checkpoint's."""
    stock, scaling = shape.rope_parameters or {}, options.scaling or {}
    valid_types = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if unknown := sorted(set(scaling) - SCALING_KEYS):
        raise PosEncError(f"rope: scaling has no setting {unknown[0]!r}; expected some of {sorted(SCALING_KEYS)}")
    for key in NUMBER_KEYS & scaling.keys():
        for number in scaling[key] if isinstance(scaling[key], list) else [scaling[key]]:
            if matches_type(number, float) and number <= 0:
                raise PosEncError(f"rope: scaling: {key} must be above 0, got {number!r}")
    if options.scaling is not None and "rope_type" not in scaling:
        raise PosEncError(f"rope: scaling needs a rope_type, one of {valid_types}")
    inherits = options.scaling is None and options.theta is None
    parameters = {"rope_type": "default", **(stock if inherits else scaling)}
    parameters["rope_theta"] = options.theta or parameters.get("rope_theta") or stock.get("rope_theta") or BASE
    rope_type = parameters["rope_type"]
    if rope_type not in valid_types:
        raise PosEncError(f"rope: scaling: rope_type {rope_type!r} is unknown; expected one of {valid_types}")
    parameters = {key: value for key, value in parameters.items() if value is not None}
    for key in NUMBER_KEYS & parameters.keys():
        hint = list[float] if key in LIST_KEYS else float
        if not matches_type(parameters[key], hint):
            raise PosEncError(
                f"rope: scaling: {key} must be {describe_type(hint)}, got {truncate_repr(parameters[key])}"
            )
    if rope_type in NEEDS_ORIGINAL_LENGTH:
        parameters.setdefault("original_max_position_embeddings", shape.max_positions)
    return parameters


class Rope(Scheme[RopeOptions, Rotation | StockRotation]):
    """Queries and keys are rotated by angles proportional to their position, so that logits depend on distance."""

    name = "rope"
    paper = "Su et al. 2021, https://arxiv.org/abs/2104.09864"
    kind = Kind.ROTATION
    formula = "q_i, k_j rotated by i and j times theta^(-2k/d), pair by pair"
    cost = "no parameters; two products per query and key. Runs on flash attention"
    Options = RopeOptions

    def __init__(self, options: RopeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.rope_parameters = resolve_rope_parameters(options, shape)
        self.rope_type: str = self.rope_parameters["rope_type"]
        self.depends_on_length = self.rope_type in CHANGES_WITH_LENGTH
        self.has_stock_angles = shape.rope_parameters is not None and options == RopeOptions(extend=options.extend)
        self.layout = options.layout or shape.rotary_layout
        self.partial_rotary_factor: float = options.partial_rotary_factor or (shape.rope_parameters or {}).get(
            "partial_rotary_factor", 1.0
        )
        self.rotary_size = int(shape.head_size * self.partial_rotary_factor)
        if self.rotary_size % 2 or not self.rotary_size or shape.head_size % 2:
            raise PosEncError(
                f"rope rotates pairs of features, but {self.rotary_size} of the head size {shape.head_size} do not "
                "pair up; choose partial_rotary_factor so that an even part of an even head size is rotated"
            )
        with torch.device("cpu"):  # the model may be under construction on the meta device
            frequencies, self.attention_factor = self._inverse_frequencies(None)
            long_frequencies, long_factor = self._inverse_frequencies(10 * shape.max_positions)
        # Written so that NaN fails too.
        usable = all((values.abs() <= MAX_FREQUENCY).all() for values in (frequencies, long_frequencies))
        factors = (self.attention_factor, long_factor)
        usable = usable and all(MIN_ATTENTION_FACTOR <= factor <= MAX_ATTENTION_FACTOR for factor in factors)
        if not usable or 2 * len(long_frequencies) > shape.head_size:
            raise PosEncError(
                f"rope: {truncate_repr(self.rope_parameters)} gives unusable angles; expected frequencies of at most "
                f"{MAX_FREQUENCY:g} per token, and an attention factor between {MIN_ATTENTION_FACTOR:g} and "
                f"{MAX_ATTENTION_FACTOR:g}. Check theta and the scaling"
            )
        # Plain numbers, not a buffer: model.to(bfloat16) would round it and meta loading would lose it.
        self.frequencies: list[float] = frequencies.tolist()
        self.extension = None
        if options.extend is not None:
            self._check_extensible()
            self.extension = parse_extension(options.extend).with_defaults(shape.max_positions)
            self.needs_key_positions = True

    @classmethod
    def acts(cls, seam: str, options: RopeOptions) -> bool:
        return options.extend is not None if seam == "remap" else super().acts(seam, options)

    def _check_extensible(self) -> None:
        if not self.shape.causal:
            raise PosEncError(
                "rope: extend is defined for causal models, where all keys are at or before the query; on an encoder "
                'use a scaling, such as {"rope_type": "yarn", "factor": 4.0}'
            )
        if self.depends_on_length:
            raise PosEncError(
                f"rope: extend needs angles that do not change with the input, but scaling {self.rope_type!r} changes "
                'them: leave one of the two out, or choose a fixed scaling, such as {"rope_type": "default"}'
            )

    def _inverse_frequencies(
        self, length: int | None, device: torch.device | None = None
    ) -> tuple[torch.Tensor, float]:
        """The `inv_freq` and attention factor of transformers' rotary modules, for inputs of a length."""
        if self.rope_type == "default":
            steps = torch.arange(0, self.rotary_size, 2, dtype=torch.float, device=device) / self.rotary_size
            return 1.0 / self.rope_parameters["rope_theta"] ** steps, 1.0
        config = types.SimpleNamespace(
            rope_parameters=dict(self.rope_parameters, partial_rotary_factor=self.partial_rotary_factor),
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
        cos, sin, signed_sin, *_ = self._rotation(positions.queries_BQ, frequencies)
        if factor != 1.0:
            cos, sin, signed_sin = cos * factor, sin * factor, signed_sin * factor
        far, further = self._far_rotation(positions), ()
        if far is not None and not self.has_stock_angles:
            offsets = (*far.query_offsets_BQ, far.key_offsets_BK)
            further = tuple(self._rotation(offsets_BN, frequencies) for offsets_BN in offsets)
        return Rotation(cos, sin, signed_sin, far, further)

    def _rotation(self, positions_BN: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
        return rotation(positions_BN[:, None, :, None].float() * frequencies * self.shape.rotary_direction, self.layout)

    def _far_rotation(self, positions: Positions) -> FarRotation | None:
        """The offsets that remap far distances; None if the input is too short to have any."""
        if self.extension is None:
            return None
        if positions.rotary_positions is not None:
            raise PosEncError(
                "rope: extend remaps the distance between tokens in a text, but these position_ids have several axes "
                "(images or video): leave extend out, or pass text only"
            )
        length = positions.length_bound if positions.length_bound is not None else positions.length()
        if length is not None and length <= self.extension.near_length:
            return None
        queries_BQ, keys_BK = positions.queries_BQ, positions.keys_BK
        assert keys_BK is not None
        far = self.extension.far_positions(queries_BQ, keys_BK)
        query_offsets = tuple(far_BQ - queries_BQ for far_BQ in far.queries_BQ)
        return FarRotation(far.starts_BQ, keys_BK, query_offsets, far.keys_BK - keys_BK)

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
        return self.layout == "halves" and 2 * len(self.frequencies) == self.shape.head_size

    def keeps_stock_rotation(self) -> bool:
        return self.has_stock_angles

    def rotate(self, states_BHQD: torch.Tensor, prepared: Rotation | StockRotation, keys: bool) -> torch.Tensor:
        if isinstance(prepared, Rotation):
            return rotate_pairs(states_BHQD, prepared.cos, prepared.signed_sin, self.layout)
        return prepared.rotate(states_BHQD)

    def with_stock_rotation(self, prepared: Rotation | StockRotation, rotate: StockRotate) -> StockRotation:
        return StockRotation(rotate, prepared.far)

    def remap(self, prepared: Rotation | StockRotation) -> Remap | None:
        far, partial = prepared.far, functools.partial
        if far is None:
            return None
        if isinstance(prepared, Rotation):
            rotations = [partial(rotate_further, rotation=item, layout=self.layout) for item in prepared.further]
        else:
            offsets = (*far.query_offsets_BQ, far.key_offsets_BK)
            rotations = [partial(prepared.rotate, offsets=item) for item in enumerate(offsets)]
        return Remap(far.starts_BQ, far.keys_BK, tuple(rotations[:-1]), rotations[-1])

    def details(self, seam: str) -> str:
        if seam != "remap" or self.extension is None:
            return ""
        assert self.options.extend is not None
        settings = dataclasses.asdict(self.extension).items()
        reach = self.extension.reach(self.shape.max_positions)
        return (
            f"{self.options.extend['method']}, {', '.join(f'{name} {value}' for name, value in settings)}: no effect up "
            f"to {self.extension.near_length} tokens; distances stay below the trained {self.shape.max_positions} "
            + ("at any length" if reach is None else f"up to {reach} tokens")
        )


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
        cos, _, signed_sin = prepared.rotation
        return rotate_pairs(states_BHQD, cos * factors, signed_sin * factors, self.shape.rotary_layout)

    def _check_overflow(self, dtype: torch.dtype, max_offset: int) -> None:
        limit = MAX_EXPONENT.get(dtype, 80.0)
        steepest = -math.log(XPOS_GAMMA / (1 + XPOS_GAMMA))
        if max_offset * steepest / self.options.scale_base > limit:
            raise SequenceLengthError(
                f"xpos: at {max_offset} positions from the center the decay overflows {dtype}: raise scale_base above "
                f"{math.ceil(max_offset * steepest / limit)}, use bfloat16 instead of float16, or shorten the input"
            )
