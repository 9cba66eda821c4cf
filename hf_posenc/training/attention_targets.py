"""What a stock model attends to, layer by layer: the target of a warm start.

The stock model runs on some text, and the hidden states that enter each attention layer are split into content and
position: a rotation acts after the projections, so the states are content already; a position table shows up as what
the states at one position have in common, so that mean is removed.

Shape legend: B batch, N tokens, E hidden size, H heads, G key heads, D head size.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention import apply_rotation, far_rotation, materialize, scale_content, score_terms, visible_pairs
from ..errors import PosEncError
from ..patches import PosEncAttention, PosEncBaseModel, architecture_of, base_models, check_undivided, retrofit
from ..patches.compat import attn_implementation
from ..schemes import Content, Positions


class LayerTarget(NamedTuple):
    """One call of a stock attention layer."""

    layer: int
    content_BNE: torch.Tensor
    """The hidden states that enter the layer, minus the contribution of a position table that the variant drops."""
    mask: torch.Tensor | None
    log_weights: torch.Tensor
    """The log attention weights, (B, H, N, N); architectures with sinks have one more key."""


class StockAttention:
    """The attention of a stock base model, next to the variant that is to reproduce it."""

    def __init__(self, stock_base: PreTrainedModel, base: PreTrainedModel) -> None:
        self.base, self.reference = base, _reference(stock_base, base)
        self.attentions = base.architecture.self_attentions(base)
        self.drops_table = drops_table(base)
        self._backend = attn_implementation(base.config)

    @torch.no_grad()
    def visit_layers(self, input_ids: torch.Tensor, visit: Callable[[LayerTarget], None]) -> None:
        """Run the stock model on some text, and call a function for each of its attention layers."""
        positions = self.reference_positions(input_ids)

        def record(attention: PosEncAttention, args: Any, kwargs: Any) -> None:
            inputs = {**dict(zip(attention.argument_names, args, strict=False)), **kwargs}
            states_BNE, mask = inputs["hidden_states"], inputs.get("attention_mask")
            log_weights = self.log_weights(attention, states_BNE, positions, mask)
            if self.drops_table:  # remove what the states at the same position have in common
                states_BNE = states_BNE - (states_BNE.mean(0, keepdim=True) - states_BNE.mean((0, 1), keepdim=True))
            visit(LayerTarget(attention.layer_idx, states_BNE, mask, log_weights))

        with contextlib.ExitStack() as hooks:
            for attention in self.reference.architecture.self_attentions(self.reference):
                hooks.enter_context(attention.register_forward_pre_hook(record, with_kwargs=True))
            self.reference(input_ids)

    @torch.no_grad()
    def rotations(self, layer: int, input_ids: torch.Tensor) -> torch.Tensor | None:
        """The rotation of a stock layer at each position of some text, as matrices (N, D, D); None if it has none."""
        attention = self.reference.architecture.self_attentions(self.reference)[layer]
        active = attention.layer_schemes(self.reference_positions(input_ids[:1]))
        rotations = [*active.rotate, *active.stock_rotation]
        if not rotations:
            return None
        size = self.reference.architecture.shape(self.reference.config).head_size
        basis = torch.eye(size, device=input_ids.device)[None, :, None].expand(1, -1, input_ids.shape[1], -1)
        return apply_rotation(basis, rotations, keys=False)[0].permute(1, 2, 0)

    def reference_positions(self, input_ids: torch.Tensor) -> Positions:
        """The positions of a forward pass of the stock model."""
        return self.reference.prepare_inputs({"input_ids": input_ids}).positions

    def variant_positions(self, input_ids: torch.Tensor) -> Positions:
        """The positions of a forward pass of the variant."""
        return self.base.prepare_inputs({"input_ids": input_ids}).positions

    def log_weights(
        self,
        attention: PosEncAttention,
        states_BNE: torch.Tensor,
        positions: Positions,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The log attention weights of a layer for given hidden states, (B, H, N, N).

        Architectures with sinks have one more key.

        Args:
            attention: The layer, of the stock model or the variant.
            states_BNE: The hidden states that enter it.
            positions: The positions of the model that the layer is part of.
            mask: The mask of the layer.
            bias: Added to the logits in place of what the layer's schemes add.
        """
        layer, projections = attention.layer_schemes(positions), attention.project(states_BNE)
        if far_rotation(layer.remap) is not None:
            raise PosEncError(
                "rope's extend needs no fit: it remaps far distances to those that the model was trained with. Convert "
                "the checkpoint without training, or train without extend and add it afterwards"
            )
        query_BHND, key_BGND, softcap = projections.query_BHND, projections.key_BGND, projections.softcap
        visible = visible_pairs(mask, positions.causal and mask is None, query_BHND, states_BNE.shape[1])
        rotations = [*layer.rotate, *layer.stock_rotation]
        content = Content(
            query_BHND,
            apply_rotation(query_BHND, rotations, keys=False),
            apply_rotation(key_BGND, rotations, keys=True),
            projections.scaling,
            lambda: visible,
            attention.project_rows,
        )
        query_BHND = scale_content(content.rotated_query_BHQD, layer.content_scale)
        logits = query_BHND.matmul(content.key_BHKD.transpose(-1, -2)) * content.scaling
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None and self._backend != "sdpa":  # SDPA does not cap
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias
        else:
            gates = attention.token_gates(layer, states_BNE, positions)
            for term in score_terms(layer.score, content, gates=gates):
                logits = logits + materialize(term, positions, content)
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
        if projections.sinks_H is not None:
            sinks_BHN1 = projections.sinks_H[:, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sinks_BHN1], dim=-1)
        return logits.log_softmax(-1)


def paired_bases(
    stock_model: PreTrainedModel, variant: PreTrainedModel
) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The base models of a stock model and its variant. Raises PosEncError if they do not belong together."""
    for model in (stock_model, variant):
        check_undivided(model, "A warm start")
    stock_class = architecture_of(stock_model).base
    stock_bases = [module for module in stock_model.modules() if isinstance(module, stock_class)]
    bases = base_models(variant)
    if not bases:
        raise PosEncError(
            f"{type(variant).__name__} has no position scheme to fit: load it with from_pretrained(..., "
            "position_scheme=...) or change it with hf_posenc.retrofit"
        )
    sizes = operator.attrgetter("config.hidden_size", "config.num_hidden_layers", "config.num_attention_heads")
    if list(map(sizes, stock_bases)) != list(map(sizes, bases)):
        raise PosEncError(
            f"{type(stock_model).__name__} and {type(variant).__name__} have different sizes: pass the stock model "
            "that the variant was made from"
        )
    yield from zip(stock_bases, bases, strict=True)


def check_input_ids(input_ids: torch.Tensor) -> None:
    """Raise PosEncError unless this is a batch of token ids."""
    if not isinstance(input_ids, torch.Tensor):
        raise PosEncError(f"input_ids must be a tensor of token ids, got {type(input_ids).__name__}")
    if input_ids.dtype not in (torch.long, torch.int) or input_ids.ndim != 2 or not input_ids.numel():
        tensor = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
        raise PosEncError(f"input_ids must be integers of shape (batch, length), got {tensor}")


def drops_table(base: PreTrainedModel) -> bool:
    """Whether a variant drops its architecture's position table."""
    return base.architecture.table is not None and not any(s.uses_stock_table() for s in base.position_scheme)


def place_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Move what a warm start runs of a variant: its attention, and what surrounds the layers, such as embeddings."""
    for base in base_models(model):
        _move_without_layers(base, device=device)
        for attention in base.architecture.self_attentions(base):
            attention.to(device)


def _reference(stock_base: PreTrainedModel, base: PreTrainedModel) -> PreTrainedModel:
    """The stock model with its own encoding as a scheme, which computes the same and exposes its attention layers.

    It shares the weights. If the variant is on another device or of another dtype, embeddings are copied, but each
    layer is moved only while it runs, so that there is never a second copy of the whole model.
    """
    is_same = (stock_base.device, stock_base.dtype) == (base.device, base.dtype)
    shared = stock_base if is_same else stock_base.get_submodule(architecture_of(stock_base).layers)
    tensors = (*shared.parameters(), *shared.buffers())
    reference = copy.deepcopy(stock_base, {id(tensor): tensor for tensor in tensors}).eval()
    if not is_same:
        _move_without_layers(reference, device=base.device, dtype=base.dtype)
    reference.set_attn_implementation("eager")  # every layer gets its mask, which differs where some have a window
    if not isinstance(reference, PosEncBaseModel):
        reference = retrofit(reference, base.architecture.stock_scheme)
    if not is_same:
        for layer in reference.get_submodule(reference.architecture.layers).children():
            _move_while_running(layer, base.device, base.dtype)
    return reference


def _move_without_layers(base: PreTrainedModel, **target: Any) -> None:
    """Move all but the layers of a base model; the target as for `nn.Module.to`."""
    path, _, name = architecture_of(base).layers.rpartition(".")
    parent = base.get_submodule(path)
    layers = getattr(parent, name)
    setattr(parent, name, nn.ModuleList())
    try:
        base.to(**target)
    finally:
        setattr(parent, name, layers)


def _move_while_running(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a layer's weights another device and dtype during its forward passes."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(module: nn.Module, args: Any) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            kept.append((tensor, tensor.data))
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        while kept:
            tensor, data = kept.pop()
            tensor.data = data

    layer.register_forward_pre_hook(move)
    layer.register_forward_hook(restore, always_call=True)
