"""Hand the architecture's own encoding over to the new schemes of a model, step by step."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import nn

from hf_posenc.config import VariantConfig
from hf_posenc.grammar import parse, schedule_of
from hf_posenc.schedule import Schedule, at_step
from hf_posenc.scheme import Scheme

from .attach import Progress, acting_by_layer, drop_table, set_strength, share_out, with_scheme

PROGRESS = "handover.progress"
"""How far a handover has come, by its name in a base model."""
REMOVED = "_posenc_removed_modules"
"""Where a model that was changed live keeps what was taken out of it, by path."""


def configs_of(model: nn.Module, kind: type) -> dict[int, Any]:
    """The configs of a kind that modules of the model hold, each once, by identity."""
    held = (module.__dict__.get("config") for module in model.modules())
    return {id(config): config for config in held if isinstance(config, kind)}


def give_own_configs(model: nn.Module, kind: type, position_scheme: Any = None) -> None:
    """Give the model configs of its own, that name the scheme if one is given: those it has may be shared with others.

    A composite model has the configs of its parts inside of its own: there they are replaced as well.
    """
    held = configs_of(model, kind)
    new = {
        key: copy.deepcopy(config) if position_scheme is None else with_scheme(config, position_scheme)
        for key, config in held.items()
    }
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in new:
            module.__dict__["config"] = new[id(config)]
        elif config is not None:
            for name, part in list(getattr(config, "__dict__", {}).items()):
                if id(part) in new:
                    config.__dict__[name] = new[id(part)]


def bases_of(model: nn.Module) -> list[Any]:
    """The base models with schemes inside of a model."""
    return [module for module in model.modules() if "built_scheme" in module.__dict__]


def schedule_in(model: nn.Module) -> Schedule | None:
    """The handover that is under way in a model, if there is one."""
    found = {schedule for base in bases_of(model) if (schedule := _schedule(base)) is not None}
    if len(found) > 1:
        raise ValueError("the parts of the model hand over differently: give both the same steps and shape")
    return next(iter(found), None)


def _schedule(base: Any) -> Schedule | None:
    return schedule_of(parse(base.built_scheme))


def table_that_gives_way(base: Any) -> nn.Parameter | None:
    """The architecture's own table, if a handover is under way at whose end it will be gone."""
    kept = list(base.position_scheme)[: base.num_new_schemes]
    if not base.architecture.table or _schedule(base) is None or any(scheme.keeps_table() for scheme in kept):
        return None
    (weight,) = base.get_submodule(base.architecture.table).parameters()
    return weight


def take_in_hand(model: nn.Module) -> None:
    """Make a model ready to be moved along: what gives way is not trained, since it will be gone."""
    for base in bases_of(model):
        base.__dict__["waits_for_handover"] = False
        weight = table_that_gives_way(base)
        if weight is not None:
            base.__dict__["froze_table"] = weight.requires_grad or base.__dict__.get("froze_table", False)
            weight.requires_grad_(False)
    give_own_configs(model, VariantConfig)


def go_to(model: nn.Module, step: int) -> None:
    """Bring the handover of a model to a step. At the last one the old encoding is taken out, and stays out."""
    schedule = schedule_in(model)
    over = schedule is None or step >= schedule.steps
    for base in bases_of(model):
        if _schedule(base) is not None and schedule is not None:
            if over:
                _finish(base)
            else:
                _share_out_anew(base, dataclasses.replace(schedule, step=step))
    for config in configs_of(model, VariantConfig).values():
        config.position_scheme = at_step(config.position_scheme, None if over else step)


def marks_of_the_end(model: nn.Module) -> set[str]:
    """Names of buffers that say of base models that their handover is over."""
    return {
        f"{name}.progress" for name, module in model.named_modules() if isinstance(module, Progress) and module.is_over
    }


def _share_out_anew(base: Any, schedule: Schedule) -> None:
    base.__dict__["built_scheme"] = at_step(base.built_scheme, schedule.step)
    base.handover.go_to(schedule)
    schemes: list[Scheme] = list(base.position_scheme)
    share_out(schemes, base.num_new_schemes, schedule.share)
    for scheme in schemes[base.num_new_schemes :]:
        if scheme.keeps_table():
            base.get_submodule(base.architecture.table).__dict__["strength"] = scheme.strength


def _finish(base: Any) -> None:
    new: list[Scheme] = list(base.position_scheme)[: base.num_new_schemes]
    old: list[Scheme] = list(base.position_scheme)[base.num_new_schemes :]
    for scheme in new:
        set_strength(scheme, 1.0)
    base.handover.retire()
    for scheme in old:
        if scheme.keeps_table() and not any(other.keeps_table() for other in new):
            scheme.undress_table(base.get_submodule(base.architecture.table))
            table = drop_table(base, base.architecture)
            base.__dict__["holds_table"] = False
            if REMOVED in base.__dict__:
                base.__dict__[REMOVED][base.architecture.table] = table
    base.__dict__["built_scheme"] = at_step(base.built_scheme, None)
    base.position_scheme = nn.ModuleList(new).train(base.training)
    base.__dict__["active_schemes"] = acting_by_layer(base.architecture, new, parse(base.built_scheme))
    if base.architecture.table and any(scheme.keeps_table() for scheme in new):  # dressed as a pure model's is
        table = base.get_submodule(base.architecture.table)
        for scheme in new:
            if scheme.keeps_table():
                scheme.undress_table(table)
                scheme.dress_table(table, base.holds_table, fades=False)


def _is_from_behind_the_end(base: Any, state: dict[str, Any], prefix: str) -> bool:
    """Whether a state holds all of the model that is left at the end, and cannot be that of the stock model.

    Of an architecture without a table and schemes without parameters, the two look alike: then it is taken for stock.
    """
    table = f"{base.architecture.table}.weight"
    own = {f"{prefix}{name}" for name, _ in base.named_parameters() if name != table}
    has_new = any("position_scheme." in name for name in own)
    return own <= set(state) and f"{prefix}{table}" not in state and (has_new or base.architecture.table is not None)


def before_loading(base: Any, state: dict[str, Any], prefix: str) -> None:
    """Weights are about to be loaded into a model: bring it to the step of the handover that they are from."""
    progress = state.get(f"{prefix}{PROGRESS}")
    schedule = schedule_in(base)
    if progress is None:
        if schedule is not None and _is_from_behind_the_end(base, state, prefix):
            go_to(base, schedule.steps)
        return
    step, steps = progress.tolist()
    if step >= steps:
        if schedule is not None:
            go_to(base, schedule.steps)
        del state[f"{prefix}{PROGRESS}"]  # one that never handed over has no place for it, and others have their own
        return
    if schedule is None:
        raise ValueError(
            f"these weights are from step {step} of a handover, and the model has none under way any more: load that "
            "checkpoint with from_pretrained (with a Trainer, leave load_best_model_at_end out: it would put weights "
            "of the way into what is there at the end)"
        )
    if steps != schedule.steps:
        raise ValueError(
            f"these weights are from a handover of {steps} steps, and the model has one of {schedule.steps}: give it "
            "the same"
        )
    go_to(base, step)
