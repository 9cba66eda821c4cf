"""Put the schemes of a config into a base model, and take them out again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from hf_posenc.attention import refuse_backend
from hf_posenc.grammar import Item, items_of_stock, schedule_of
from hf_posenc.limits import SchemeBudget
from hf_posenc.schedule import Schedule, progress_of
from hf_posenc.scheme import LAYER_SEAMS, STOCK_ROTATION, LayerPart, ModelShape, Scheme

from .architecture import Architecture, NoRotation, NoTable


class NothingToHandOver(ValueError):
    """The old encoding does not go on beside the new one, not even for a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The schemes of a model, built and checked against it; nothing of the model has been touched yet."""

    schemes: list[Scheme]
    """The new ones, and behind them, while a handover is under way, the architecture's own."""
    parts: dict[int, nn.ModuleDict]
    """For each layer with parameters of its own, those of each scheme by its place."""
    active: tuple[dict[str, tuple[int, ...]], ...]
    """For each layer and seam, the places of the schemes that act there."""
    keeps_table: bool
    holds_table: bool
    """Whether the table that is kept is put in by its scheme: another one makes the order of them matter."""
    position_scheme: Any
    num_new: int
    """How many of the schemes are there to stay."""
    schedule: Schedule | None
    """Of the handover that is under way."""


class Progress(LayerPart):
    """How far a handover has come, kept with the weights: whoever loads them comes to the same step."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule
        self.register_buffer("progress", torch.tensor(progress_of(schedule)))

    def reset_parameters(self) -> None:
        init.copy_(self.progress, torch.tensor(progress_of(self.schedule)))

    @property
    def is_over(self) -> bool:
        return self.schedule.is_over

    def retire(self) -> None:
        """It is over. The buffer stays, to tell weights of the end from stock ones, and because DDP breaks on models
        whose last buffer goes away; `save_pretrained` leaves it out."""
        self.go_to(dataclasses.replace(self.schedule, step=self.schedule.steps))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Saved variants of the end do without it."""
        if self.is_over:
            state_dict.setdefault(f"{prefix}progress", self.progress)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def go_to(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.progress.copy_(torch.tensor(progress_of(schedule)))  # type: ignore[operator]


def plan(architecture: Architecture, config: Any) -> Plan:
    """Build the schemes that a config names for a model of it; whatever does not fit is a ValueError."""
    architecture.refuse_config(config)
    new = config.position_items()
    shape = architecture.shape(config)
    with SchemeBudget(shape.num_layers, shape.hidden_size):
        return _planned(architecture, config, new, shape)


def _planned(architecture: Architecture, config: Any, new: tuple[Item, ...], shape: ModelShape) -> Plan:
    schedule = schedule_of(new)
    schemes = [item.build(shape) for item in new]
    old = _given_up(architecture, schemes) if schedule is not None else ()
    items = (*new, *old)
    refuse_backend(config._attn_implementation, list(items))
    schemes += [item.build(shape) for item in old]
    if schedule is not None:
        share_out(schemes, len(new), schedule.share)
    parts: dict[int, nn.ModuleDict] = {}
    for place, (scheme, item) in enumerate(zip(schemes, items, strict=True)):
        for layer in item.active_layers(shape.num_layers):
            part = scheme.layer_part()
            if part is not None:
                parts.setdefault(layer, nn.ModuleDict())[str(place)] = part
    keeps_table = any(scheme.keeps_table() for scheme in schemes)
    if sum(scheme.keeps_table() for scheme in schemes[: len(new)]) > 1:
        raise ValueError(
            "position_scheme names the type 'learned' twice, but the architecture has one table: once will do"
        )
    holds_table = keeps_table and any(scheme.rewrites_words for scheme in schemes)
    return Plan(
        schemes=schemes,
        parts=parts,
        active=acting_by_layer(architecture, schemes, items),
        keeps_table=keeps_table,
        holds_table=holds_table,
        position_scheme=copy.deepcopy(config.position_scheme),
        num_new=len(new),
        schedule=schedule,
    )


def _given_up(architecture: Architecture, schemes: list[Scheme]) -> tuple[Item, ...]:
    """The architecture's own encoding, which gives way; nothing, where the new schemes go on adding its table."""
    for scheme in schemes:
        if scheme.moves_rows():
            raise NothingToHandOver(
                f"{scheme.name}: the rows of the table are read otherwise from the first step on, so that there is "
                "nothing to hand over: leave handover out"
            )
    return () if any(map(_goes_on, schemes)) else items_of_stock("table" if architecture.table else "rotary")


def share_out(schemes: list[Scheme], num_new: int, share: float) -> None:
    """Give the new schemes their share, and the old ones the rest. A table that is there to stay is there in whole."""
    for scheme in schemes[:num_new]:
        set_strength(scheme, 1.0 if _goes_on(scheme) else share)
    for scheme in schemes[num_new:]:
        set_strength(scheme, 1.0 - share)


def set_strength(scheme: nn.Module, strength: float) -> None:
    """Of a scheme, or of all copies of it that something has wrapped: PEFT does, to train one of them."""
    for module in scheme.modules():
        if isinstance(module, Scheme):
            module.strength = strength


def _goes_on(scheme: Scheme) -> bool:
    """Whether the scheme adds the architecture's own table, as the architecture always did."""
    return scheme.keeps_table() and not scheme.rewrites_words


def acting_by_layer(
    architecture: Architecture, schemes: list[Scheme], items: tuple[Item, ...]
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
    by_stock = alone and architecture.rotary is not None and schemes[turning[0]].turns_by_halves()
    return {**acting, "rotate": (), STOCK_ROTATION: turning} if by_stock else {**acting, STOCK_ROTATION: ()}


def attach(base: nn.Module, architecture: Architecture, plan: Plan) -> dict[str, nn.Module]:
    """Carry a plan out on a base model. Returns the modules that were taken out, by their path."""
    removed = {}
    if architecture.table and plan.keeps_table:
        table = base.get_submodule(architecture.table)
        assert isinstance(table, nn.Embedding)
        keeping = next(scheme for scheme in plan.schemes if scheme.keeps_table())  # the new one, if both do
        keeping.dress_table(table, plan.holds_table, plan.schedule is not None)
    elif architecture.table:
        removed[architecture.table] = drop_table(base, architecture)
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
    base.__dict__["num_new_schemes"] = plan.num_new
    base.__dict__["waits_for_handover"] = plan.schedule is not None
    if plan.schedule is not None:
        base.handover = Progress(plan.schedule).to(next(base.parameters()).device)
    return removed


def drop_table(base: nn.Module, architecture: Architecture) -> nn.Module:
    """Take the architecture's own table out; returns it."""
    assert architecture.table is not None
    return _replace(base, architecture.table, NoTable())


def detach(base: nn.Module, architecture: Architecture, removed: dict[str, nn.Module]) -> None:
    """Undo `attach`: the modules that were taken out go back in, to where and what the model is now."""
    stock_class = {ours: stock for stock, ours in architecture.attention.items()}
    for module in architecture.patched_modules(base):
        module.__class__ = stock_class[type(module)]
        if hasattr(module, "position_scheme"):
            del module.position_scheme
    if base.__dict__.pop("froze_table", False):
        assert architecture.table is not None
        (removed.get(architecture.table) or base.get_submodule(architecture.table)).requires_grad_(True)
    if architecture.table and architecture.table not in removed:
        for scheme in base.position_scheme:  # type: ignore[union-attr]
            scheme.undress_table(base.get_submodule(architecture.table))
    if hasattr(base, "handover"):
        del base.handover
    for name in ("active_schemes", "built_scheme", "holds_table", "num_new_schemes", "waits_for_handover"):
        del base.__dict__[name]
    del base.position_scheme
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
    missing, unexpected = {r"(^|\.)position_scheme\.", r"(^|\.)handover\."}, {r"(^|\.)position_scheme\."}
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
