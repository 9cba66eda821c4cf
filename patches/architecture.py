"""What the package must know of an architecture, in words that are the same for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.schemes.base import ModelShape
from hf_posenc.validation import check_model_sizes


def leave_inputs(base: nn.Module, inputs: dict[str, Any]) -> None:
    """An architecture whose forward takes inputs of any length needs nothing done to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Maps generic part names to the attributes of one architecture's base model."""

    model_type: str
    family: type[PreTrainedModel]
    """The class that all models of the architecture derive from."""
    base: type[PreTrainedModel]
    """The model without a head: the one whose forward knows positions."""
    attention: dict[type[nn.Module], type[nn.Module]]
    """The positioned subclass of each attention class."""
    layers: str
    """Path from the base model to its list of layers."""
    self_attention: str
    """Path from a layer to its self-attention."""
    cross_attention: str | None = None
    """Path from a layer to its cross-attention, where it needs to be kept from seeing positions."""
    table: str | None = None
    """Path from the base model to its own position table."""
    constant: str | None = None
    """Path from the base model to an embedding that can hold what a table adds at all positions alike. Words will not
    do: they are tied to a head, whose logits would grow by as much, and half precision would suffer."""
    rotary: str | None = None
    """Path from the base model to its own rotation."""
    is_causal: Callable[[Any], bool]
    fill_inputs: Callable[[nn.Module, dict[str, Any]], None] = leave_inputs
    """Supply what the stock forward would otherwise take from buffers of the trained length."""
    check_config: Callable[[Any], None] = lambda config: None
    """Raise ValueError for settings under which the attention function is not asked for."""

    def shape(self, config: Any) -> ModelShape:
        check_model_sizes(vars(config))
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

    def attentions(self, base: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """The self-attention modules of a base model, by layer."""
        for index, layer in enumerate(base.get_submodule(self.layers).children()):
            yield index, layer.get_submodule(self.self_attention)

    def patched_modules(self, base: nn.Module) -> Iterator[nn.Module]:
        """All attention modules whose class is swapped, cross-attention included."""
        for layer in base.get_submodule(self.layers).children():
            yield layer.get_submodule(self.self_attention)
            if self.cross_attention and hasattr(layer, self.cross_attention.split(".")[0]):
                yield layer.get_submodule(self.cross_attention)


class NullEmbedding(nn.Module):
    """In the place of a position table: adds nothing, at any position."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)


class IdentityRotary(nn.Module):
    """In the place of a rotary embedding: turns by nothing."""

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states.new_ones(1, 1, 1), states.new_zeros(1, 1, 1)
