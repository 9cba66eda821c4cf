"""The attention subclass that reaches the schemes without copying any stock forward.

The subclass runs the stock forward unchanged with two stand-ins: a cache whose `update` rotates the keys before they
are stored, and a config that names our attention function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.attention import ActiveScheme, LayerSchemes, apply_rotation, self_attention_cache
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import Positions
from hf_posenc.schemes.base import STOCK_ROTATION
from hf_posenc.schemes.inputs import repeat_key_heads

from .compat import AttentionConfig

SEAMS = ("rotate", "score", "content_scale", "value", STOCK_ROTATION)
"""In the order of `LayerSchemes`."""


class RotatingCache:
    """Stands in for the cache during one attention call: rotates the new keys, then updates the real cache."""

    def __init__(self, cache: Cache | None, posenc: LayerSchemes) -> None:
        self._cache = cache
        self._posenc = posenc

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = apply_rotation(keys, self._posenc.rotate, keys=True)
        return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class PosEncAttention(nn.Module):
    """Mixed in before a stock self-attention class. Its only state is the scheme parameters of its layer."""

    stock_eager: Callable[..., Any]
    """The architecture's own eager attention function."""
    layer_idx: int
    is_causal: bool
    config: AttentionConfig

    @property
    def stock_config(self) -> PreTrainedConfig:
        return self.config.stock_config

    def project_qk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project hidden states with the layer's own query and key projections. Every architecture overrides it."""
        raise AssertionError("overridden by every architecture")

    def project_rows(self, states: torch.Tensor, query_BHQD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project hidden states (R, E) to queries and keys by head, two of (H, R, D)."""
        head_size = query_BHQD.shape[-1]
        query, key = (states.unflatten(-1, (-1, head_size)).transpose(0, 1) for states in self.project_qk(states))
        return query, repeat_key_heads(key[None], query_BHQD.shape[1])[0]

    def layer_schemes(self, positions: Positions) -> LayerSchemes:
        """The schemes that act in this layer, by seam."""
        modules, seams = getattr(self, "position_scheme", {}), positions.active[self.layer_idx]
        # The call of a layer's module, not the module: hooks of models on several devices would move a module along.
        layer_params = {int(index): module.__call__ for index, module in modules.items()}
        active = [
            [ActiveScheme(positions.schemes[i], positions.prepared[i], layer_params.get(i)) for i in seams[seam]]
            for seam in SEAMS
        ]
        return LayerSchemes(positions, *active)

    def forward(self, *args: Any, posenc: Positions | None = None, **kwargs: Any) -> Any:
        if posenc is None:
            raise PosEncError(f"{type(self).__name__} was called without positions; call the model, not the layer")
        layer = self.layer_schemes(posenc)
        if layer.rotate:
            cache = self_attention_cache(kwargs.get("past_key_values"))
            kwargs["past_key_values"] = RotatingCache(cache, layer)
        return super().forward(*args, posenc=layer, **kwargs)
