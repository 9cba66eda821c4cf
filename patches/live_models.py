"""Change models that are there already, or that a script you cannot edit is about to build."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posenc.config import VariantConfig
from hf_posenc.spec import parse_position_scheme

from . import save_guard as guard
from .attach import attach, detach, init_live_weights, plan_schemes, with_scheme
from .bert import BERT
from .gpt2 import GPT2
from .llama import LLAMA
from .variants import PosEncBaseModel, PosEncModel, install, patched_scheme, variant_class

ARCHITECTURES = {architecture.model_type: architecture for architecture in (BERT, GPT2, LLAMA)}
Model = TypeVar("Model", bound=nn.Module)
_NAME = "_posenc_loaded_from"
_LOADED = "_weight_conversions"
"""What from_pretrained leaves on the models that it has filled with weights."""


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


def retrofit(model: Model, position_scheme: Any) -> Model:
    """Change a live stock model to a position scheme, in place; `restore` undoes it.

    Gives the model that `from_pretrained(..., position_scheme=...)` gives, and returns it. If anything is wrong it
    raises ValueError and leaves the model as it was.
    """
    parse_position_scheme(position_scheme)
    if isinstance(model, PosEncModel):
        raise ValueError(
            f"the model carries the position scheme {model.config.position_scheme!r} already; "
            "hf_posenc.restore(model) first, or load the checkpoint again with another position_scheme"
        )
    architecture = next((found for found in ARCHITECTURES.values() if isinstance(model, found.family)), None)
    if architecture is None:
        raise ValueError(
            f"{type(model).__name__} is not a model that hf_posenc knows; it takes models of {sorted(ARCHITECTURES)} "
            "(unwrap a compiled, parallel or PEFT model first)"
        )
    bases = [module for module in model.modules() if isinstance(module, architecture.base)]
    for module in (found for base in bases for found in (base, *architecture.patched_modules(base))):
        if "forward" in module.__dict__:
            raise ValueError(
                f"a hook has replaced the forward of {type(module).__name__} (device maps and some kernel patches do "
                "this), so the scheme could not act: load the model with from_pretrained(..., position_scheme=...)"
            )
    if any(isinstance(base, PosEncBaseModel) for base in bases):
        raise ValueError("a part of the model carries a position scheme already; hf_posenc.restore that part first")
    for base in bases:
        if not isinstance(base.config, architecture.family.config_class):
            raise ValueError(
                f"{type(base).__name__} has a {type(base.config).__name__} here, which cannot name a position scheme; "
                f"hf_posenc takes models with a {architecture.family.config_class.__name__}"
            )
    plans = [plan_schemes(architecture, with_scheme(base.config, position_scheme)) for base in bases]
    give_own_configs(model, architecture.family.config_class, position_scheme)
    # What it was loaded from is not this model any more: an adapter that named it would be put on a stock one.
    model.__dict__[_NAME] = model.__dict__.get("name_or_path", "")
    if _LOADED in model.__dict__:  # else only its config is from there, and its weights are its own
        for config in configs_of(model, VariantConfig).values():
            config.remember_base_model(model.__dict__[_NAME])
    model.__dict__["name_or_path"] = model.__dict__["config"]._name_or_path = ""
    for base, its_plan in zip(bases, plans, strict=True):
        init_live_weights(its_plan, base.get_input_embeddings().weight, base.training)
        base.__dict__[REMOVED] = attach(base, architecture, its_plan)
    for module in model.modules():
        if isinstance(module, architecture.family):
            module.__class__ = variant_class(architecture, type(module))
            # By its name in all versions: newer ones have a dict of their own that is asked for with models.
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(module)), type(module)._can_record_outputs)
    return model


def restore(model: Model) -> Model:
    """Undo `retrofit`: the stock model is back, to the bit, with whatever its other weights have become since."""
    if not isinstance(model, PosEncModel):
        raise ValueError("the model carries no position scheme: there is nothing to restore")
    architecture = model.architecture
    bases = [module for module in model.modules() if isinstance(module, PosEncBaseModel)]
    if any(REMOVED not in base.__dict__ for base in bases):
        raise ValueError(
            "the model was built with its position scheme, not changed by retrofit(), so what it replaced is not "
            "there; load the stock checkpoint instead"
        )
    for base in bases:
        detach(base, architecture, base.__dict__.pop(REMOVED))
    for module in model.modules():
        if isinstance(module, PosEncModel):
            module.__class__ = module.stock_class
    for config in configs_of(model, VariantConfig).values():
        config.forget_scheme()
    model.__dict__["name_or_path"] = model.__dict__["config"]._name_or_path = model.__dict__.pop(_NAME, "")
    return model


@contextlib.contextmanager
def patched(position_scheme: Any) -> Iterator[None]:
    """Every BERT, GPT-2 and LLaMA built inside carries the scheme: for scripts that you cannot edit.

    Blocks nest, the inner one wins. Nothing is shared between threads: a thread sees the blocks it is in itself.
    Configs passed in are copied, not changed. A model whose config names a scheme already keeps that scheme. As with
    every context variable, a block inside a generator holds between its yields as well.
    """
    parse_position_scheme(position_scheme)
    guard.install()
    for architecture in ARCHITECTURES.values():
        install(architecture)
    token = patched_scheme.set(position_scheme)
    try:
        yield
    finally:
        patched_scheme.reset(token)
