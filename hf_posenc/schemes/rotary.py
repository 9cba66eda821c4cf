"""Rotary embeddings: RoPE (Su et al. 2021)."""

import dataclasses
import functools
import types
from typing import Any, Literal

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import PosEncError
from ..validation import truncate_repr
from . import Kind, ModelShape, Options, Positions, Remap, Scheme, is_tracing, option
from .base import StockRotate
from .constants import device_constant
from .frequencies import drop_incomplete, keep_highest, mix_frequencies, round_wavelengths
from .remapping import parse_extension
from .rope_parameters import CHANGES_WITH_LENGTH, resolve_rope_parameters
from .rotations import FarRotation, Rotation, StockRotation, join_rotation, rotate_further, rotate_pairs, rotation

MAX_FREQUENCY, MIN_ATTENTION_FACTOR, MAX_ATTENTION_FACTOR = 1e4, 0.01, 100.0
"""Beyond any useful rotation: angles and attention scores stay finite in every dtype."""


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
    frequency_fraction: float = option(
        1.0,
        "p-RoPE: fraction of the frequencies to keep, from the highest; the others do not rotate",
        above=0,
        maximum=1,
    )
    resonance: bool = option(False, "Resonance RoPE: round wavelengths to whole numbers of tokens")
    fourier: float | None = option(
        None,
        "FoPE: each pair of features mixes all frequencies, by fixed random coefficients of this gain (0.3 to 0.6 in "
        "the paper), and those that complete no turn within the trained length do not rotate",
        minimum=0,
        maximum=10,
    )
    scaling: dict[str, Any] | None = option(None, "as transformers' rope_parameters; None: the checkpoint's, or none")
    extend: dict[str, Any] | None = option(
        None,
        "remap far distances, so that longer inputs need no training: a `method` (self_extend, rerope, leaky_rerope or "
        "dca) and its options",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extend is not None:
            parse_extension(self.extend)


class Rope(Scheme[RopeOptions, Rotation | StockRotation]):
    """Queries and keys are rotated by angles proportional to their position, so that logits depend on distance."""

    name = "rope"
    paper = "Su et al. 2021, https://arxiv.org/abs/2104.09864"
    kind = Kind.ROTATION
    formula = "q_i, k_j rotated by i and j times theta^(-2k/d), pair by pair"
    cost = "no parameters; two products per query and key. Runs on flash attention, but not with `extend`"
    tested_against = (
        "LLaMA (bit-identical), RoFormer, GPT-NeoX, GPT-J, Phi-3 and GLM of Transformers; loops over pairs of "
        "features and distances for the other frequencies and `extend`"
    )
    inherits_rotation = True
    Options = RopeOptions

    def __init__(self, options: RopeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.rope_parameters = resolve_rope_parameters(
            shape.rope_parameters, options.theta, options.scaling, shape.max_positions
        )
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
        if not any(self.frequencies):
            raise PosEncError(
                f"rope: no frequency completes a turn within {shape.max_positions} tokens, so that fourier leaves none"
            )
        self.extension = None
        if options.extend is not None:
            self._check_extensible()
            self.extension = parse_extension(options.extend).with_defaults(shape.max_positions)
            self.needs_key_positions = True

    @classmethod
    def acts(cls, seam: str, options: RopeOptions) -> bool:
        return options.extend is not None if seam == "remap" else super().acts(seam, options)

    def _check_extensible(self) -> None:
        if self.options.fourier is not None:
            raise PosEncError(
                "rope: extend rotates far keys further, which mixed frequencies do not allow: leave out extend or "
                "fourier"
            )
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
        """The `inv_freq` and attention factor for inputs of a length, with zeros for frequencies that are left out."""
        options, (frequencies, attention_factor) = self.options, self._all_inverse_frequencies(length, device)
        frequencies = keep_highest(frequencies, options.frequency_fraction)
        if options.resonance:
            frequencies = round_wavelengths(frequencies)
        if options.fourier is not None:
            frequencies = drop_incomplete(frequencies, self.shape.max_positions)
        return frequencies, attention_factor

    def _all_inverse_frequencies(
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
        frequencies, factor = device_constant(self.frequencies, device, torch.float32), self.attention_factor
        if self.depends_on_length and (length := self._scaled_length(positions)) is not None:
            frequencies, factor = self._inverse_frequencies(length, device)
        prepared, far = self._rotation(positions.queries_BQ, frequencies), self._far_rotation(positions)
        if factor != 1.0:
            cos, sin, signed_sin = (tensor * factor for tensor in prepared[:3])
            prepared = Rotation(cos, sin, signed_sin)
        if far is None:
            return prepared
        offsets = () if self.has_stock_angles else (*far.query_offsets_BQ, far.key_offsets_BK)
        further = tuple(self._rotation(offsets_BN, frequencies) for offsets_BN in offsets)
        return prepared._replace(far=far, further=further)

    def _rotation(self, positions_BN: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
        angles = positions_BN[:, None, :, None].float() * frequencies * self.shape.rotary_direction
        if not self.options.fourier:
            return rotation(angles, self.layout)
        mixed = mix_frequencies(angles.cos(), angles.sin(), frequencies, self.options.fourier)
        return join_rotation(*mixed, self.layout)

    def _far_rotation(self, positions: Positions) -> FarRotation | None:
        """The offsets that remap far distances; None if the input is too short to have any."""
        if self.extension is None:
            return None
        if positions.rotary_positions is not None:
            raise PosEncError(
                "rope: extend remaps the distance between tokens in a text, but these position_ids have several axes "
                "(images or video): leave extend out, or pass text only"
            )
        if not is_tracing():  # compiled code must fit longer inputs too
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
        settings = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(self.extension).items())
        reach = self.extension.reach(self.shape.max_positions)
        return (
            f"{self.options.extend['method']}, {settings}: no effect up to {self.extension.near_length} tokens; "
            f"distances stay below the trained {self.shape.max_positions} "
            + ("at any length" if reach is None else f"up to {reach} tokens")
        )
