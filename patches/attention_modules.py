"""The attention subclasses that reach the schemes without copying any stock forward.

A subclass runs the stock forward unchanged with three stand-ins: a cache whose `update` rotates the keys before they
are stored, a config that names our attention function, and angles of zero where no scheme keeps the own rotation.

Shape legend: B batch, H heads, G key heads, N tokens, R rows, D head size, E hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.attention import (
    ActiveScheme,
    LayerSchemes,
    ProcessRank,
    Projections,
    ProjectionsDone,
    TokenGates,
    apply_rotation,
    cache_layer,
    keep_length_for_masks,
    self_attention_cache,
)
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import Positions, repeat_key_heads
from hf_posenc.schemes.base import STOCK_ROTATION

from .architecture import Architecture
from .compat import AttentionConfig, find_process_rank
from .pickling import PickledByStockClass

CLASS_MODULE = "hf_posenc.models"
"""Where the classes are found by name."""
SEAMS = ("rotate", "score", "content_scale", "value", STOCK_ROTATION, "remap")
"""In the order of `LayerSchemes`."""
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


class RotatingCache:
    """Stands in for the cache during one attention call: rotates the new keys, then updates the real cache.

    If a scheme has gates, they are stored with the keys.
    """

    def __init__(self, cache: Cache | None, posenc: LayerSchemes) -> None:
        self._cache = cache
        self._posenc = posenc

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = apply_rotation(keys, self._posenc.rotate, keys=True)
        if self._cache is None:
            return keys, values
        if self._posenc.gates is None:
            return self._cache.update(keys, values, *args, **kwargs)
        layer = cache_layer(self._cache, kwargs.get("layer_idx", args[0] if args else None))
        cache = self._cache
        return self._posenc.gates.update_cache(keys, values, layer, lambda k, v: cache.update(k, v, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class CacheWithPositions(NamedTuple):
    """Carries positions through layers that do not pass their keyword arguments on."""

    cache: Cache | None
    positions: Positions | None


class PosEncAttention(PickledByStockClass, nn.Module):
    """Mixed in before a stock self-attention class. Its only state is the scheme parameters of its layer."""

    kind = "attention"

    architecture: ClassVar[Architecture]
    stock_class: ClassVar[type[nn.Module]]
    stock_eager: Callable[..., Any]
    """The architecture's own eager attention function."""
    scales_queries: ClassVar[bool]
    """Whether the stock forward scales queries itself."""
    argument_names: ClassVar[tuple[str, ...]]
    """The arguments of the stock forward."""
    cache_argument: ClassVar[str | None]
    """The argument that takes the cache; None if keys are never cached."""
    layer_idx: int
    is_causal: bool
    config: AttentionConfig
    angle_size: int
    """The number of rotary angles that the stock forward expects; 0 if it does not rotate."""
    has_window: bool
    """Whether the layer has a sliding window."""

    @property
    def stock_config(self) -> PreTrainedConfig:
        return self.config.stock_config

    def project(self, states_BNE: torch.Tensor) -> Projections:
        """Project hidden states to unrotated queries, (B, H, N, D), and keys, (B, G, N, D), as the stock forward does.

        The stock forward runs up to its call of the attention function, so that norms and fused weights are included.
        """
        inputs: dict[str, Any] = {"hidden_states": states_BNE, "attention_mask": None}
        if self.angle_size:
            angles = states_BNE.new_zeros(1, states_BNE.shape[1], self.angle_size)
            inputs["position_embeddings"] = (angles + 1, angles)
        projections = Projections()
        with contextlib.suppress(ProjectionsDone):
            super().forward(**inputs, posenc=projections)
        return projections

    def project_rows(self, states_RE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project hidden states to queries and keys by head, two of (H, R, D)."""
        projections = self.project(states_RE[None])
        query_BHRD = projections.query_BHND
        return query_BHRD[0], repeat_key_heads(projections.key_BGND, query_BHRD.shape[1])[0]

    def process_rank(self) -> ProcessRank | None:
        """This process among those that the layer's weights are divided among; None if they are not divided."""
        return find_process_rank(self)

    def layer_schemes(self, positions: Positions) -> LayerSchemes:
        """The schemes that act in this layer, by seam."""
        if self.has_window:
            positions = positions.in_window()
        modules, seams = getattr(self, "position_scheme", {}), positions.active[self.layer_idx]
        # The call of a layer's module, not the module: hooks of models on several devices would move a module along.
        layer_params = {int(index): module.__call__ for index, module in modules.items()}
        prepared = list(positions.prepared)
        for index, scheme in enumerate(positions.schemes if self.angle_size else ()):
            if scheme.keeps_stock_rotation():
                rotate_as_stock = functools.partial(self._rotate_as_stock, positions)
                prepared[index] = scheme.with_stock_rotation(prepared[index], rotate_as_stock)
        rotate, score, content_scale, value, stock_rotation, remap = (
            [ActiveScheme(positions.schemes[i], prepared[i], layer_params.get(i)) for i in seams[seam]]
            for seam in SEAMS
        )
        return LayerSchemes(positions, rotate, score, content_scale, value, stock_rotation, remap)

    def token_gates(
        self, layer: LayerSchemes, states_BNE: torch.Tensor | None, positions: Positions
    ) -> TokenGates | None:
        """What the tokens of a call add to running sums; None if no scheme of the layer acts at `gate`."""
        gated = [active for active in layer.score if active.scheme.acts_at("gate")]
        if not gated:
            return None
        if states_BNE is None:
            raise PosEncError(
                f"position scheme {gated[0].scheme.name!r} reads the hidden states that enter a layer, but "
                f"{self.stock_class.__name__} takes no hidden_states"
            )
        return TokenGates(self, gated, states_BNE, positions)

    def _rotate_as_stock(
        self, positions: Positions, states_BHND: torch.Tensor, offsets: tuple[object, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Rotate as the architecture's own code does in this layer: to the positions, or by named offsets.

        By offsets in float32 or wider, because the states are rotated, and so rounded, already.
        """
        if self.architecture.rotates is not None and not self.architecture.rotates(self):
            return states_BHND
        layer_types = getattr(self.stock_config, "layer_types", None)
        layer_type, dtype = layer_types[self.layer_idx] if layer_types else None, states_BHND.dtype
        if offsets is None:
            cos, sin = positions.stock_angles(layer_type, states_BHND)
        else:
            states_BHND = states_BHND.to(torch.promote_types(dtype, torch.float32))
            angles = positions.stock_offset_angles(layer_type, states_BHND, *offsets)
            cos, sin = (angle[:, : states_BHND.shape[2]] for angle in angles)
        rotate = sys.modules[self.stock_class.__module__].apply_rotary_pos_emb
        size = 2 * self.angle_size if self.architecture.angle_per_pair else self.angle_size
        rotated, _ = rotate(states_BHND[..., :size], states_BHND[:, :0, :, :size], cos, sin)
        if size < states_BHND.shape[-1]:
            rotated = torch.cat([rotated, states_BHND[..., size:]], dim=-1)
        return rotated.to(dtype)

    def forward(self, *args: Any, posenc: Positions | None = None, **kwargs: Any) -> Any:
        kwargs.update(zip(self.argument_names, args, strict=False))
        cache = kwargs.get(self.cache_argument) if self.cache_argument else None
        if isinstance(cache, CacheWithPositions):
            posenc, kwargs[self.cache_argument] = cache.positions, cache.cache  # type: ignore[index]
        if posenc is None:
            raise PosEncError(f"{type(self).__name__} was called without positions; call the model, not the layer")
        layer = self.layer_schemes(posenc)
        gates = self.token_gates(layer, kwargs.get("hidden_states"), posenc)
        if gates is not None:
            layer = layer._replace(gates=gates)
        if self.cache_argument is not None:
            cache = self_attention_cache(kwargs.get(self.cache_argument))
            if posenc.backend == "flex_attention":
                keep_length_for_masks(cache, self.layer_idx)
            if layer.rotate or (gates is not None and cache is not None):
                kwargs[self.cache_argument] = RotatingCache(cache, layer)
        angles = kwargs.get("position_embeddings")
        if angles is not None:
            kwargs["position_embeddings"] = self._angles(angles, layer)
        return super().forward(**kwargs, posenc=layer)

    def _angles(self, stock_angles: Sequence[torch.Tensor], layer: LayerSchemes) -> Sequence[torch.Tensor]:
        """The cos and sin for the stock forward: its own, those of a scheme, or those of no rotation."""
        cos, sin = stock_angles
        for scheme, prepared, _ in layer.stock_rotation:
            if scheme.keeps_stock_rotation():
                return stock_angles
            return [angle.squeeze(1).to(cos.dtype) for angle in prepared[:2]]
        return torch.ones_like(cos), torch.zeros_like(sin)


class PosEncCrossAttention(PickledByStockClass, nn.Module):
    """Mixed in before a stock cross-attention class: layers pass positions to it, which act in self-attention only."""

    kind = "cross_attention"

    def forward(self, *args: Any, posenc: object = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class PosEncLayer(PickledByStockClass, nn.Module):
    """Mixed in before a stock layer that does not pass its keyword arguments on to attention."""

    kind = "layer"

    def forward(
        self, *args: Any, posenc: Positions | None = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Any:
        return super().forward(*args, past_key_values=CacheWithPositions(past_key_values, posenc), **kwargs)


@functools.cache
def attention_class(stock_class: type[nn.Module], architecture: Architecture) -> type[nn.Module]:
    """The subclass of a stock self-attention class, created on first use."""
    names = tuple(inspect.signature(stock_class.forward).parameters)[1:]
    module = sys.modules[stock_class.__module__]
    eager = getattr(module, "eager_attention_forward", None)
    if eager is None or hasattr(module, "apply_multimodal_rotary_pos_emb"):
        raise PosEncError(
            f"{stock_class.__name__} of this release of transformers does not go through its attention interface as "
            "others do, so that position schemes cannot act there; install a newer release"
        )
    body = {
        "__module__": CLASS_MODULE,
        "architecture": architecture,
        "stock_class": stock_class,
        "stock_eager": staticmethod(eager),
        "scales_queries": architecture.scales_queries,
        "argument_names": names,
        "cache_argument": next((name for name in CACHE_ARGUMENTS if name in names), None),
    }
    return type(f"PosEnc{stock_class.__name__}", (PosEncAttention, stock_class), body)


@functools.cache
def cross_attention_class(stock_class: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a stock cross-attention class, created on first use."""
    body = {"__module__": CLASS_MODULE, "stock_class": stock_class}
    return type(f"PosEnc{stock_class.__name__}", (PosEncCrossAttention, stock_class), body)


@functools.cache
def layer_class(stock_class: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a stock layer class that drops keyword arguments, created on first use."""
    body = {"__module__": CLASS_MODULE, "stock_class": stock_class}
    return type(f"PosEnc{stock_class.__name__}", (PosEncLayer, stock_class), body)
