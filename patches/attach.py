"""Put the schemes of a config into a base model, and take them out again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from hf_posenc.attention import refuse_backend
from hf_posenc.scheme import LAYER_SEAMS, STOCK_ROTATION, LayerPart, Scheme

from .architecture import Architecture, NoRotation, NoTable


@dataclasses.dataclass(frozen=True)
class Plan:
    """The schemes of a model, built and checked against it; nothing of the model has been touched yet."""

    schemes: list[Scheme]
    parts: dict[int, nn.ModuleDict]
    """For each layer with parameters of its own, those of each scheme by its place."""
    active: tuple[dict[str, tuple[int, ...]], ...]
    """For each layer and seam, the places of the schemes that act there."""
    keeps_table: bool
    holds_table: bool
    """Whether the table that is kept is put in by its scheme: another one makes the order of them matter."""
    position_scheme: Any


def plan(architecture: Architecture, config: Any) -> Plan:
    """Build the schemes that a config names for a model of it; whatever does not fit is a ValueError."""
    architecture.refuse_config(config)
    items = config.position_items()
    refuse_backend(config._attn_implementation, list(items))
    shape = architecture.shape(config)
    layers = [item.active_layers(shape.num_layers) for item in items]
    schemes = [item.build(shape) for item in items]
    parts: dict[int, nn.ModuleDict] = {}
    for place, (scheme, own_layers) in enumerate(zip(schemes, layers, strict=True)):
        for layer in own_layers:
            part = scheme.layer_part()
            if part is not None:
                parts.setdefault(layer, nn.ModuleDict())[str(place)] = part
    active = tuple(_acting(architecture, schemes, layers, layer) for layer in range(shape.num_layers))
    keeps_table = any(scheme.keeps_table() for scheme in schemes)
    if sum(scheme.keeps_table() for scheme in schemes) > 1:
        raise ValueError(
            "position_scheme names the type 'learned' twice, but the architecture has one table: once will do"
        )
    holds_table = keeps_table and any(scheme.rewrites_words for scheme in schemes)
    return Plan(schemes, parts, active, keeps_table, holds_table, copy.deepcopy(config.position_scheme))


def _acting(
    architecture: Architecture, schemes: list[Scheme], layers: list[Any], layer: int
) -> dict[str, tuple[int, ...]]:
    """For each seam of a layer, the places of the schemes that act there."""
    acting = {
        seam: tuple(n for n, own in enumerate(layers) if layer in own and schemes[n].acts_at(seam))
        for seam in LAYER_SEAMS
    }
    turning = acting["rotate"]
    alone = len(turning) == 1 and not acting["score"] and not acting["value"]
    by_stock = alone and architecture.rotary is not None and schemes[turning[0]].turns_by_halves()
    return {**acting, "rotate": (), STOCK_ROTATION: turning} if by_stock else {**acting, STOCK_ROTATION: ()}


def attach(base: nn.Module, architecture: Architecture, plan: Plan) -> dict[str, nn.Module]:
    """Carry a plan out on a base model. Returns the modules that were taken out, by their path."""
    removed = {}
    if architecture.table and plan.keeps_table:
        table = base.get_submodule(architecture.table)
        assert isinstance(table, nn.Embedding)
        for scheme in plan.schemes:
            scheme.dress_table(table, plan.holds_table)
    elif architecture.table:
        removed[architecture.table] = _replace(base, architecture.table, NoTable())
    if architecture.rotary:
        removed[architecture.rotary] = _replace(base, architecture.rotary, NoRotation())
    for module in architecture.patched_modules(base):
        module.__class__ = architecture.attention[type(module)]
    for layer, module in architecture.attentions(base):
        if layer in plan.parts:
            module.position_scheme = plan.parts[layer]
    base.position_scheme = nn.ModuleList(plan.schemes)
    base.__dict__["active_schemes"] = plan.active
    base.__dict__["built_scheme"] = plan.position_scheme
    base.__dict__["holds_table"] = plan.holds_table
    return removed


def detach(base: nn.Module, architecture: Architecture, removed: dict[str, nn.Module]) -> None:
    """Undo `attach`: the modules that were taken out go back in, to where and what the model is now."""
    stock_class = {ours: stock for stock, ours in architecture.attention.items()}
    for module in architecture.patched_modules(base):
        module.__class__ = stock_class[type(module)]
        if hasattr(module, "position_scheme"):
            del module.position_scheme
    if architecture.table and architecture.table not in removed:
        for scheme in base.position_scheme:  # type: ignore[union-attr]
            scheme.undress_table(base.get_submodule(architecture.table))
    del base.position_scheme, base.active_schemes, base.built_scheme, base.holds_table
    like = base.get_input_embeddings().weight  # type: ignore[operator]
    for path, module in removed.items():
        is_table = path == architecture.table
        _replace(base, path, module.to(device=like.device, dtype=like.dtype if is_table else None))
        module.train(base.training)


def initialise(module: nn.Module) -> bool:
    """Initialise a scheme or a layer's part of one; False if the module is neither."""
    if isinstance(module, (Scheme, LayerPart)):
        module.reset_parameters()
        return True
    return False


@torch.no_grad()
def initialise_live(plan: Plan, like: torch.Tensor, training: bool) -> None:
    """Initialise the parameters of a plan for a model that is there already: its dtype, device and mode."""
    for container in (*plan.schemes, *plan.parts.values()):
        container.to(device=like.device, dtype=like.dtype).train(training)
        for module in container.modules():
            initialise(module)


def ignored_keys(base: nn.Module, architecture: Architecture) -> tuple[set[str], set[str]]:
    """Patterns of keys that a checkpoint lacks, and of those it has too many, when the scheme is new to it."""
    missing, unexpected = {r"(^|\.)position_scheme\."}, {r"(^|\.)position_scheme\."}
    if architecture.table and isinstance(base.get_submodule(architecture.table), NoTable):
        unexpected.add(rf"(^|\.){architecture.table.replace('.', '[.]')}[.]weight$")
    return missing, unexpected


def _replace(base: nn.Module, path: str, module: nn.Module) -> nn.Module:
    parent_path, _, name = path.rpartition(".")
    parent = base.get_submodule(parent_path)
    old = getattr(parent, name)
    setattr(parent, name, module)
    return old


def with_scheme(config: Any, scheme: Any) -> Any:
    """A copy of a config that carries the scheme."""
    config = copy.deepcopy(config)
    config.position_scheme = scheme
    return config
