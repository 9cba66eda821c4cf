"""What the package must know of an architecture: one record per model type, resolved when it is used."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.attention import Window
from hf_posenc.config import STOCK_LENGTH_KEY, stock_config_class
from hf_posenc.schemes import ModelShape

from .compat import base_model_class


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Maps generic names to the attributes of one architecture's base model. The defaults are those of LLaMA."""

    model_type: str
    base_name: str | None = None
    """The class of the model without a head, whose forward knows positions; None: what AutoModel builds."""
    layers: str = "layers"
    """Path from the base model to its list of layers."""
    self_attention: str = "self_attn"
    """Path from a layer to its self-attention."""
    cross_attention: str | None = None
    """Path from a layer to its cross-attention, if positions must be kept from it."""
    table: str | None = None
    """Path from the base model to its own position table."""
    first_row: Callable[[Any], int] = lambda config: 0
    """The row of the table that holds position 0."""
    first_position: Callable[[Any], int] = lambda config: 0
    """What `position_ids` call position 0: in some architectures, its row of the table."""
    extra_rows: int = 0
    """Rows of the table beyond `max_position_embeddings`."""
    constant: str | None = None
    """Path from the base model to an embedding that can absorb what a table adds at every position. Token embeddings
    cannot: they are tied to the head, whose logits would grow by as much."""
    interleaved: bool = False
    """Whether its own rotation pairs neighboring features, not features half a head apart."""
    reversed_rotation: bool = False
    """Whether its own rotation turns the other way than LLaMA's."""
    angle_per_pair: bool = False
    """Whether its attention expects one angle per pair of features, not one per feature."""
    num_layers: str = "num_hidden_layers"
    """The config field with the number of layers that have weights of their own."""
    scales_queries: bool = False
    """Whether its attention scales queries itself, and asks the attention function not to."""
    position_axes: int = 1
    """How many axes its rotary positions have: three where images give tokens a time, a row and a column."""
    has_sinks: bool = False
    """Whether its attention has sinks: learned logits of no key."""
    layers_drop_kwargs: bool = False
    """Whether layers do not pass their keyword arguments on to attention."""
    rotates: Callable[[Any], bool] | None = None
    """Whether an attention module rotates; None: all do."""
    is_causal: Callable[[Any], bool] = lambda config: getattr(config, "is_causal", True)
    fill_inputs: Callable[[dict[str, Any]], None] | None = None
    """Supplies what the stock forward would otherwise read from buffers of the trained length."""
    check_config: Callable[[Any], None] = lambda config: None
    """Raises PosEncError for settings that bypass the attention function."""
    own_config: type[PreTrainedConfig] | None = None
    """The config class, if `hf_posenc.support` found it; None: that of transformers for the model type."""
    own_base: type[PreTrainedModel] | None = None
    """The base class, if `hf_posenc.support` found it."""
    own_heads: tuple[tuple[str, type[PreTrainedModel]], ...] = ()
    """Model classes by Auto class, where the Auto classes do not know them."""

    @functools.cached_property
    def config_class(self) -> type[PreTrainedConfig]:
        return self.own_config or stock_config_class(self.model_type)

    @functools.cached_property
    def base(self) -> type[PreTrainedModel]:
        """The class of the model without a head."""
        if self.own_base is not None:
            return self.own_base
        base = base_model_class(self.config_class)
        return getattr(sys.modules[base.__module__], self.base_name) if self.base_name else base

    @functools.cached_property
    def family(self) -> type[PreTrainedModel]:
        """The class that all models of the architecture derive from."""
        return next(cls for cls in self.base.__mro__ if PreTrainedModel in cls.__bases__)

    @property
    def rotary(self) -> bool:
        """Whether the architecture rotates queries and keys itself."""
        return self.table is None

    @property
    def stock_scheme(self) -> str:
        """The scheme that computes exactly what the stock architecture does."""
        return "learned" if self.table else "rope"

    def shape(self, config: PreTrainedConfig, layer_type: str = "full_attention") -> ModelShape:
        """The sizes that schemes are built from, and the rotary settings of a type of layers, where types differ."""
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        first_row = self.first_row(config) if self.table else 0
        stock_length = getattr(config, STOCK_LENGTH_KEY, None) or config.max_position_embeddings
        max_positions = stock_length + self.extra_rows - first_row
        return ModelShape(
            hidden_size=config.hidden_size,
            num_layers=getattr(config, self.num_layers),
            num_heads=config.num_attention_heads,
            head_size=head_size,
            max_positions=max_positions,
            causal=self.is_causal(config),
            table_size=max_positions if self.table else None,
            table_first_row=first_row,
            embedding_size=getattr(config, "embedding_size", None),
            layer_types=tuple(layer_types) if (layer_types := getattr(config, "layer_types", None)) else None,
            rope_parameters=_flat_rope_parameters(config, layer_type) if self.rotary else None,
            rotary_layout="interleaved" if self.interleaved else "halves",
            rotary_direction=-1 if self.reversed_rotation else 1,
        )

    def table_shape(self, config: PreTrainedConfig) -> tuple[int, int]:
        """The shape of the architecture's own position table."""
        shape = self.shape(config)
        return shape.table_first_row + (shape.table_size or 0), shape.embedding_size or shape.hidden_size

    def angle_size(self, config: PreTrainedConfig) -> int:
        """The number of angles per position that the stock attention expects; 0 if it does not rotate."""
        if not self.rotary:
            return 0
        shape = self.shape(config)
        size = int(shape.head_size * (shape.rope_parameters or {}).get("partial_rotary_factor", 1.0))
        return size // 2 if self.angle_per_pair else size

    def window(self, config: PreTrainedConfig) -> Window | None:
        """The sliding window, if any layer has one."""
        size, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        if not size or (layer_types is not None and "sliding_attention" not in layer_types):
            return None
        return Window(size, has_full_layers=layer_types is not None)

    def has_window(self, config: PreTrainedConfig, layer: int) -> bool:
        """Whether a layer has the sliding window."""
        layer_types = getattr(config, "layer_types", None)
        in_window = layer_types is None or layer_types[layer] == "sliding_attention"
        return in_window and self.window(config) is not None

    def self_attentions(self, base: nn.Module) -> list[nn.Module]:
        """The self-attention modules of a base model, by layer."""
        return [layer.get_submodule(self.self_attention) for layer in base.get_submodule(self.layers).children()]

    def cross_attentions(self, base: nn.Module) -> Iterator[nn.Module]:
        """The cross-attention modules of a base model that was built with them."""
        if self.cross_attention is None:
            return
        for layer in base.get_submodule(self.layers).children():
            if hasattr(layer, self.cross_attention.split(".")[0]):
                yield layer.get_submodule(self.cross_attention)


def _flat_rope_parameters(config: PreTrainedConfig, layer_type: str) -> dict[str, Any]:
    """The rotary settings of a config; those of a type of layers where types differ."""
    parameters: dict[str, Any] = config.rope_parameters
    return parameters.get(layer_type, parameters.get("full_attention", parameters))


class NullEmbedding(nn.Module):
    """Replaces a position table: adds nothing, at any position."""

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros((), device=(args[0] if position_ids is None else position_ids).device)
