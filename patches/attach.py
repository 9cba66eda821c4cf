"""Put the schemes of a config into a base model, and take them out again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from hf_posenc.attention.function import check_backend
from hf_posenc.schemes.base import LAYER_SEAMS, STOCK_ROTATION, LayerModule, ModelShape, Scheme
from hf_posenc.spec import SchemeSpec
from hf_posenc.validation import ParameterBudget

from .architecture import Architecture, IdentityRotary, NullEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemePlan:
    """The schemes of a model, built and checked against it; nothing of the model has been touched yet."""

    schemes: list[Scheme]
    parts: dict[int, nn.ModuleDict]
    """For each layer with parameters of its own, those of each scheme by its place."""
    active: tuple[dict[str, tuple[int, ...]], ...]
    """For each layer and seam, the places of the schemes that act there."""
    uses_stock_table: bool
    scheme_owns_table: bool
    """Whether the table that is kept is put in by its scheme: another one makes the order of them matter."""
    position_scheme: Any


def plan_schemes(architecture: Architecture, config: Any) -> SchemePlan:
    """Build the schemes that a config names for a model of it; whatever does not fit is a ValueError."""
    architecture.check_config(config)
    new = config.position_specs()
    shape = architecture.shape(config)
    with ParameterBudget(shape.num_layers, shape.hidden_size):
        return _planned(architecture, config, new, shape)


def _planned(architecture: Architecture, config: Any, items: tuple[SchemeSpec, ...], shape: ModelShape) -> SchemePlan:
    schemes = [item.build(shape) for item in items]
    check_backend(config._attn_implementation, list(items))
    parts: dict[int, nn.ModuleDict] = {}
    for place, (scheme, item) in enumerate(zip(schemes, items, strict=True)):
        for layer in item.active_layers(shape.num_layers):
            part = scheme.layer_module()
            if part is not None:
                parts.setdefault(layer, nn.ModuleDict())[str(place)] = part
    uses_stock_table = any(scheme.uses_stock_table() for scheme in schemes)
    if sum(scheme.uses_stock_table() for scheme in schemes) > 1:
        raise ValueError(
            "position_scheme names the type 'learned' twice, but the architecture has one table: once will do"
        )
    scheme_owns_table = uses_stock_table and any(scheme.rewrites_embeddings for scheme in schemes)
    return SchemePlan(
        schemes=schemes,
        parts=parts,
        active=acting_by_layer(architecture, schemes, items),
        uses_stock_table=uses_stock_table,
        scheme_owns_table=scheme_owns_table,
        position_scheme=copy.deepcopy(config.position_scheme),
    )


def acting_by_layer(
    architecture: Architecture, schemes: list[Scheme], items: tuple[SchemeSpec, ...]
) -> tuple[dict[str, tuple[int, ...]], ...]:
    """For each layer and seam, the places of the schemes that act there."""
    num_layers = schemes[0].shape.num_layers
    layers = [item.active_layers(num_layers) for item in items]
    return tuple(_acting(architecture, schemes, layers, layer) for layer in range(num_layers))


def _acting(
    architecture: Architecture, schemes: list[Scheme], layers: list[Any], layer: int
) -> dict[str, tuple[int, ...]]:
    acting = {
        seam: tuple(n for n, own in enumerate(layers) if layer in own and schemes[n].acts_at(seam))
        for seam in LAYER_SEAMS
    }
    turning = acting["rotate"]
    alone = len(turning) == 1 and not acting["score"] and not acting["value"]
    by_stock = alone and architecture.rotary is not None and schemes[turning[0]].uses_rotate_half()
    return {**acting, "rotate": (), STOCK_ROTATION: turning} if by_stock else {**acting, STOCK_ROTATION: ()}


def attach(base: nn.Module, architecture: Architecture, plan: SchemePlan) -> dict[str, nn.Module]:
    """Carry a plan out on a base model. Returns the modules that were taken out, by their path."""
    removed = {}
    if architecture.table and plan.uses_stock_table:
        table = base.get_submodule(architecture.table)
        assert isinstance(table, nn.Embedding)
        keeping = next(scheme for scheme in plan.schemes if scheme.uses_stock_table())
        patched = keeping.patch_embedding(table, plan.scheme_owns_table)
        if patched is not table:
            removed[architecture.table] = _replace(base, architecture.table, patched)
    elif architecture.table:
        removed[architecture.table] = drop_table(base, architecture)
    if architecture.rotary:
        removed[architecture.rotary] = _replace(base, architecture.rotary, IdentityRotary())
    for module in architecture.patched_modules(base):
        module.__class__ = architecture.attention[type(module)]
    for layer, module in architecture.attentions(base):
        if layer in plan.parts:
            module.position_scheme = plan.parts[layer]
    base.position_scheme = nn.ModuleList(plan.schemes)
    base.__dict__["active_schemes"] = plan.active
    base.__dict__["built_scheme"] = plan.position_scheme
    base.__dict__["scheme_owns_table"] = plan.scheme_owns_table
    return removed


def drop_table(base: nn.Module, architecture: Architecture) -> nn.Module:
    """Take the architecture's own table out; returns it."""
    assert architecture.table is not None
    return _replace(base, architecture.table, NullEmbedding())


def detach(base: nn.Module, architecture: Architecture, removed: dict[str, nn.Module]) -> None:
    """Undo `attach`: the modules that were taken out go back in, to where and what the model is now."""
    stock_class = {ours: stock for stock, ours in architecture.attention.items()}
    for module in architecture.patched_modules(base):
        module.__class__ = stock_class[type(module)]
        if hasattr(module, "position_scheme"):
            del module.position_scheme
    for name in ("active_schemes", "built_scheme", "scheme_owns_table"):
        del base.__dict__[name]
    del base.position_scheme
    like = base.get_input_embeddings().weight  # type: ignore[operator]
    for path, module in removed.items():
        is_table = path == architecture.table
        patched = base.get_submodule(path)
        if isinstance(module, nn.Embedding) and isinstance(patched, nn.Embedding):
            module.weight = patched.weight  # whatever the shared weight has become since
        _replace(base, path, module.to(device=like.device, dtype=like.dtype if is_table else None))
        module.train(base.training)


def init_scheme_weights(module: nn.Module) -> bool:
    """Initialise a scheme or a layer's part of one; False if the module is neither."""
    if isinstance(module, (Scheme, LayerModule)):
        module.reset_parameters()
        return True
    return False


@torch.no_grad()
def init_live_weights(plan: SchemePlan, like: torch.Tensor, training: bool) -> None:
    """Initialise the parameters of a plan for a model that is there already: its dtype, device and mode."""
    for container in (*plan.schemes, *plan.parts.values()):
        container.to(device=like.device, dtype=like.dtype).train(training)
        for module in container.modules():
            init_scheme_weights(module)


def ignored_keys(base: nn.Module, architecture: Architecture) -> tuple[set[str], set[str]]:
    """Patterns of keys that a checkpoint lacks, and of those it has too many, when the scheme is new to it."""
    missing, unexpected = {r"(^|\.)position_scheme\."}, {r"(^|\.)position_scheme\."}
    if architecture.table and isinstance(base.get_submodule(architecture.table), NullEmbedding):
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
