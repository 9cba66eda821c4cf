"""Change models that already exist, or that a script you cannot edit is about to build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.errors import PosEncError
from hf_posenc.spec import PositionScheme, parse_position_scheme

from .architecture import Architecture
from .attach import attach, detach, init_live_weights, plan_schemes, with_scheme
from .compat import checkpoint_name, set_checkpoint_name, swap_class, was_loaded
from .families import find_architecture
from .from_pretrained import keep_source_name
from .lengths import check_config_length, check_max_length, set_config_length
from .replaced_configs import replace_configs, restore_configs
from .rollback import unchanged_on_error
from .saving import install_save_guard
from .tensor_parallel import share_scheme_weights
from .unsupported import refuse
from .variants import (
    PosEncBaseModel,
    PosEncModel,
    base_models,
    install_variants,
    patched_classes,
    patched_scheme,
    variant_class,
)

Model = TypeVar("Model", bound=nn.Module)


def architecture_of(model: nn.Module) -> Architecture:
    """The architecture of a model, stock or variant.

    Args:
        model: A transformers model, with or without a head.

    Returns:
        Its record.

    Raises:
        PosEncError: If the architecture is not supported.
    """
    config = getattr(model, "config", None)
    architecture = find_architecture(config)
    if architecture is not None and isinstance(model, architecture.family):
        return architecture
    path = _supported_part(model) if isinstance(model, PreTrainedModel) else None
    if path is not None:
        raise PosEncError(
            f"{type(model).__name__} is not supported as a whole, but its part model.{path} is: pass that"
        )
    model_type = getattr(config, "model_type", "")
    subject = f"{type(model).__name__} with a {type(config).__name__}"
    if architecture is None and isinstance(config, PreTrainedConfig):
        raise refuse(model_type, subject)
    raise PosEncError(
        f"{subject} is not supported (model type {model_type!r}). Unwrap a compiled, parallel or PEFT model first; "
        "docs/families.md lists what is supported"
    )


def _supported_part(model: PreTrainedModel) -> str | None:
    """The path of the first part of a model that is supported by itself: the text model of a multimodal one."""
    for path, module in model.named_modules():
        architecture = find_architecture(getattr(module, "config", None))
        if architecture is not None and isinstance(module, architecture.base):
            return path
    return None


def retrofit(model: Model, position_scheme: PositionScheme) -> Model:
    """Give a live stock model a position scheme, in place.

    The result equals `from_pretrained(..., position_scheme=...)`. `restore` undoes it. If anything is wrong, the model
    is left as it was.

    Args:
        model: A stock model of a supported architecture, also one that is part of another model: after
            `retrofit(model.model.language_model, ...)`, Gemma 3 is saved and loaded with the scheme.
        position_scheme: A scheme name, a dict with a `type` and options, or a list of these.

    Returns:
        The same model.

    Raises:
        PosEncError: If the model already has a scheme, is not supported, or the scheme does not fit it.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
        >>> hf_posenc.retrofit(model, "alibi")
    """
    parse_position_scheme(position_scheme)
    if isinstance(model, PosEncModel):
        raise PosEncError(
            f"The model already has the position scheme {model.config.position_scheme!r}. Call "
            "hf_posenc.restore(model) first, or load the checkpoint again with another position_scheme"
        )
    architecture = architecture_of(model)
    bases: list[Any] = [module for module in model.modules() if isinstance(module, architecture.base)]
    for base in bases:
        _check_base(base, architecture)
    plans = [plan_schemes(architecture, with_scheme(base.config, position_scheme)) for base in bases]
    loaded_from = checkpoint_name(model.config)
    with unchanged_on_error(model):
        replaced_configs = replace_configs(model, architecture.config_class, position_scheme)
        if was_loaded(model):
            for replaced in replaced_configs:
                replaced.variant.record_base_model(loaded_from)
        keep_source_name(model)
        for replaced in replaced_configs:
            replaced.remember()
        for base, plan in zip(bases, plans, strict=True):
            init_live_weights(plan, base.get_input_embeddings().weight, base.training)
            plan.state.replaced = attach(base, architecture, plan)
            share_scheme_weights(base)
            plan.state.replaced_configs = replaced_configs
            plan.state.loaded_from = loaded_from
        for module in model.modules():
            if isinstance(module, architecture.family):
                swap_class(module, variant_class(architecture, type(module)))
    return model


def restore(model: Model) -> Model:
    """Undo `retrofit`: the stock model is back, bit for bit, with whatever its other weights have become.

    It has its original config object again, with the changes that were made to the variant's since.

    Args:
        model: A model that `retrofit` changed.

    Returns:
        The same model.

    Raises:
        PosEncError: If the model has no scheme, or was built with it.
    """
    if not isinstance(model, PosEncModel):
        raise PosEncError("The model has no position scheme: there is nothing to restore")
    bases = base_models(model)
    if any(base.posenc.replaced is None for base in bases):
        raise PosEncError(
            "The model was built with its position scheme, not changed by retrofit(), so the stock modules are gone; "
            "load the stock checkpoint instead"
        )
    loaded_from, replaced_configs = bases[0].posenc.loaded_from, bases[0].posenc.replaced_configs
    with unchanged_on_error(model):
        for base in bases:
            detach(base, model.architecture)
        for module in model.modules():
            if isinstance(module, PosEncModel):
                swap_class(module, module.stock_class)
        restore_configs(model, replaced_configs)
        set_checkpoint_name(model, loaded_from, loaded_from)
    return model


@contextlib.contextmanager
def patched(position_scheme: PositionScheme) -> Iterator[None]:
    """Give every supported model that is built inside the block a position scheme: for scripts you cannot edit.

    Blocks nest, and the innermost one wins. Configs are copied, not changed; a config that already names a scheme keeps
    it. The block applies to the current thread or task only.

    Args:
        position_scheme: A scheme name, a dict with a `type` and options, or a list of these.

    Raises:
        PosEncError: If the scheme is not valid, or none of the models that the block built is supported.

    Example:
        >>> with hf_posenc.patched("alibi"):
        ...     model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    """
    parse_position_scheme(position_scheme)
    install_save_guard()
    install_variants()
    built: list[Any] = []
    tokens = patched_scheme.set(position_scheme), patched_classes.set(built)
    try:
        yield
    finally:
        patched_scheme.reset(tokens[0])
        patched_classes.reset(tokens[1])
    if built and not any(issubclass(cls, PosEncModel) for cls in built):
        outermost = built[0]
        raise refuse(outermost.config_class.model_type, f"hf_posenc.patched changed nothing, not {outermost.__name__}")


def _check_base(base: PreTrainedModel, architecture: Architecture) -> None:
    if isinstance(base, PosEncBaseModel):
        raise PosEncError("A part of the model already has a position scheme; call hf_posenc.restore on it first")
    architecture.check_config(base.config)
    config_class = architecture.config_class
    if not isinstance(base.config, config_class):
        raise PosEncError(
            f"{type(base).__name__} has a {type(base.config).__name__}, which has no position_scheme; hf_posenc "
            f"supports models with a {config_class.__name__}"
        )
    attentions = (*architecture.self_attentions(base), *architecture.cross_attentions(base))
    for module in (base, *attentions):
        if "forward" in vars(module):
            raise PosEncError(
                f"A hook has replaced the forward of {type(module).__name__} (device maps and some kernel patches do "
                "this), so the scheme could not act; use from_pretrained(..., position_scheme=...) instead"
            )


def set_max_length(model: nn.Module, max_length: int) -> None:
    """Let tools read longer inputs with a model whose scheme extends, also after it is saved and loaded.

    Stock models end at their `max_position_embeddings`, so tools such as sentence-transformers and lm_eval cut inputs
    there. `hf-posenc convert` and `train` set the length with `--max-length`.

    Args:
        model: A model with a position scheme, or one that contains such a model: a `SentenceTransformer`, for example,
            whose `max_seq_length` is set too.
        max_length: The longest input, in tokens.

    Raises:
        PosEncError: If the model has no position scheme, or its scheme or its rotation does not allow this length.

    Example:
        >>> embedder = SentenceTransformer("my-bert", model_kwargs={"position_scheme": "t5"})
        >>> hf_posenc.set_max_length(embedder, 2048)
    """
    bases = base_models(model)
    if not bases:
        raise PosEncError(
            f"{type(model).__name__} has no position scheme, so its length is fixed; give it one with "
            "hf_posenc.retrofit or position_scheme=..."
        )
    for base in bases:
        check_max_length(base.position_scheme, max_length)
        check_config_length(base.position_scheme, base.config)
    for base in bases:
        set_config_length(base.position_scheme, base.config, max_length)
    if hasattr(model, "max_seq_length"):
        model.max_seq_length = max_length  # type: ignore[assignment]
