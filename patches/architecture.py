"""What the package must know of an architecture: one record per model type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.schemes import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Maps generic names to the attributes of one architecture's base model."""

    model_type: str
    family: type[PreTrainedModel]
    """The class that all models of the architecture derive from."""
    base: type[PreTrainedModel]
    """The model without a head, whose forward knows positions."""
    attention: dict[type[nn.Module], type[nn.Module]]
    """The patched subclass of each attention class."""
    layers: str
    """Path from the base model to its list of layers."""
    self_attention: str
    """Path from a layer to its self-attention."""
    cross_attention: str | None = None
    """Path from a layer to its cross-attention, if positions must be kept from it."""
    table: str | None = None
    """Path from the base model to its own position table."""
    constant: str | None = None
    """Path from the base model to an embedding that can absorb what a table adds at every position. Token embeddings
    cannot: they are tied to the head, whose logits would grow by as much."""
    rotary: str | None = None
    """Path from the base model to its own rotary embedding."""
    is_causal: Callable[[Any], bool]
    fill_inputs: Callable[[dict[str, Any]], None] | None = None
    """Supplies what the stock forward would otherwise read from buffers of the trained length."""
    check_config: Callable[[Any], None] = lambda config: None
    """Raises PosEncError for settings that bypass the attention function."""

    @property
    def stock_scheme(self) -> str:
        """The scheme that computes exactly what the stock architecture does."""
        return "learned" if self.table else "rope"

    def shape(self, config: PreTrainedConfig) -> ModelShape:
        """The sizes that schemes are built from."""
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelShape(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            head_size=head_size,
            max_positions=config.max_position_embeddings,
            causal=self.is_causal(config),
            table_size=config.max_position_embeddings if self.table else None,
            rope_parameters=config.rope_parameters if self.rotary else None,
        )

    def self_attentions(self, base: nn.Module) -> list[nn.Module]:
        """The self-attention modules of a base model, by layer."""
        return [layer.get_submodule(self.self_attention) for layer in base.get_submodule(self.layers).children()]

    def patched_modules(self, base: nn.Module) -> Iterator[nn.Module]:
        """All attention modules whose class is swapped, including cross-attention."""
        for layer in base.get_submodule(self.layers).children():
            yield layer.get_submodule(self.self_attention)
            if self.cross_attention and hasattr(layer, self.cross_attention.split(".")[0]):
                yield layer.get_submodule(self.cross_attention)


class NullEmbedding(nn.Module):
    """Replaces a position table: adds nothing, at any position."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)


class IdentityRotary(nn.Module):
    """Replaces a rotary embedding: rotates by nothing."""

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states.new_ones(1, 1, 1), states.new_zeros(1, 1, 1)
