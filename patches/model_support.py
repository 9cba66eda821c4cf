"""Enable model types that have no record in `families`, after a self-test on a tiny model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from hf_posenc.config import install_field, uninstall_field
from hf_posenc.errors import PosEncError
from hf_posenc.model_types import MODEL_TYPES, VARIANT_PREFIX

from .architecture import Architecture
from .auto_classes import register_variants, unregister_variants
from .candidates import Candidate, config_class_of, find_candidate, head_to_test, heads_by_name, is_own
from .compat import forget_config, model_from_config, supports_sdpa
from .detection import detect
from .families import ARCHITECTURES
from .import_hooks import forget_model_type, register_model_type
from .self_test import TestBench, randomize, run_self_test
from .tiny_configs import tiny_config
from .unsupported import refusal_of
from .variants import patched_scheme

BACKENDS = ("sdpa", "eager")
MAX_PARAMETERS = 20_000_000
"""A tiny model with more is not one: its sizes are under names that `tiny_configs` does not know."""


@dataclasses.dataclass(frozen=True)
class Support:
    """What `hf_posenc.support` found out about a model type."""

    model_type: str
    architecture: Architecture
    """Where the parts of the model are."""
    checks: tuple[str, ...] = ()
    """The checks that a tiny model passed; none for model types that the package supports by itself."""

    def __str__(self) -> str:
        if not self.checks:
            return f"{self.model_type} is supported by the package"
        record = self.architecture
        positions = f"table {record.table}" if record.table else "rotary"
        parts = f"layers {record.layers}, attention {record.self_attention}, {positions}"
        return f"{self.model_type} is supported ({parts}); passed: {', '.join(self.checks)}"


_supported: dict[str, Support] = {}


def support(
    model_or_type: str | PreTrainedConfig | type[PreTrainedConfig] | PreTrainedModel | type[PreTrainedModel],
    *,
    trust_remote_code: bool = False,
) -> Support:
    """Enable `position_scheme` for another model type, in this process.

    Works for models that call transformers' attention interface, remote code included. The parts of the model are found
    by running a tiny, randomly initialized one, and then checked: the own encoding must equal the stock model to the
    bit, schemes must act in every layer, cached decoding must equal the full forward pass, neither padding nor packing
    may matter, and variants must load as they were saved. Nothing is enabled unless all of it holds. It takes a few
    seconds.

    A name tests the default settings of the type; a config or model tests its own settings. A process that loads a
    saved variant of the type must call `support` first.

    Args:
        model_or_type: A model type, a config or its class, or a model or its class.
        trust_remote_code: Whether a config may load its model class from the repository that it names.

    Returns:
        A report: the model type, its parts, and the checks that passed. A type that is supported already returns at
        once.

    Raises:
        PosEncError: If a part was not found or a check failed; it names which. Nothing stays registered then.

    Example:
        >>> hf_posenc.support("bitnet")
        >>> model = AutoModelForCausalLM.from_pretrained("microsoft/bitnet-b1.58-2B-4T", position_scheme="alibi")
    """
    config_class = config_class_of(model_or_type)
    model_type = config_class.model_type
    known = ARCHITECTURES.get(model_type)
    if known is not None:
        if known.config_class is not config_class:
            raise PosEncError(
                f"Model type {model_type!r} is supported with {_full_name(known.config_class)}, but this is "
                f"{_full_name(config_class)}; a process can support one of them"
            )
        if isinstance(model_or_type, (PreTrainedConfig, PreTrainedModel)):
            known.check_config(getattr(model_or_type, "config", model_or_type))
        return _supported.get(model_type) or Support(model_type, known)
    try:
        with _undisturbed():
            report = _test(model_type, find_candidate(model_or_type, config_class, trust_remote_code))
    except PosEncError as error:
        refusal = refusal_of(model_type)
        reason = f"{refusal.reason}. {refusal.way_out} (found by the test: {error})"
        message = reason if refusal.is_structural else str(error)
        raise PosEncError(f"hf_posenc cannot support model type {model_type!r}: {message}") from error.__cause__
    _supported[model_type] = report
    return report


def _test(model_type: str, candidate: Candidate) -> Support:
    """Find the parts, register the architecture, and run the checks; unregister it if one fails."""

    _check_kind(candidate.config)
    backends = BACKENDS if supports_sdpa(candidate.model_class) else BACKENDS[1:]

    def build(**changes: Any) -> PreTrainedModel:
        return _build(candidate.model_class, candidate.config, backends[0], **changes)

    try:
        architecture, base = detect(model_type, build)
    except PosEncError:
        raise
    except Exception as error:
        raise PosEncError(f"its parts were not found: {type(error).__name__}: {error}") from error
    _check_base_class(architecture)
    if not is_own(candidate.model_class):
        architecture = dataclasses.replace(architecture, own_heads=candidate.heads or heads_by_name(architecture))
    head = head_to_test(architecture, candidate)
    model = _build(head, candidate.config, backends[0])
    _register(architecture)
    try:
        checks = run_self_test(TestBench(architecture, base, model, backends))
    except BaseException:
        _unregister(architecture)
        raise
    return Support(model_type, architecture, checks)


def _check_kind(config: PreTrainedConfig) -> None:
    """Refuse kinds of models that no test on a tiny one could clear."""
    if getattr(config, "is_encoder_decoder", False):
        raise PosEncError("it is an encoder-decoder; only encoders and decoders are supported")
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            raise PosEncError(
                f"it is made of several models; call support for the one with the text, if {name} is its config: "
                f"support({type(value).__name__})"
            )
        if name.startswith(("mamba_", "ssm_")):
            raise PosEncError("it has recurrent (Mamba) layers, which know the order of tokens by themselves")


def _check_base_class(architecture: Architecture) -> None:
    """Refuse base classes of another model type: their variants belong to that one."""
    other_type = getattr(architecture.base.config_class, "model_type", None)
    if other_type != architecture.model_type:
        name = architecture.base.__name__
        raise PosEncError(
            f"its layers are in a {name}, whose config_class has the model type {other_type!r}; use a subclass of "
            f"{name} with config_class = {architecture.config_class.__name__}"
        )


def _build(
    model_class: type[PreTrainedModel], prototype: PreTrainedConfig, backend: str, **changes: Any
) -> PreTrainedModel:
    """A tiny model with random weights."""
    try:
        config = tiny_config(prototype, **changes)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
        if size > MAX_PARAMETERS:
            raise PosEncError(
                f"no tiny model can be built: it still has {size:,} parameters when its sizes are reduced"
            )
        model = model_from_config(model_class, config, backend).float().eval()
    except PosEncError:
        raise
    except Exception as error:
        raise PosEncError(f"no tiny model can be built: {type(error).__name__}: {error}") from error
    randomize(model)
    return model


def _register(architecture: Architecture) -> None:
    config_class = architecture.config_class
    ARCHITECTURES[architecture.model_type] = architecture
    MODEL_TYPES.append(architecture.model_type)
    variant = install_field(config_class)
    CONFIG_MAPPING.register(variant.model_type, variant)
    register_model_type()
    register_variants(config_class)


def _unregister(architecture: Architecture) -> None:
    unregister_variants(architecture.config_class)
    forget_model_type(architecture.model_type)
    forget_config(VARIANT_PREFIX + architecture.model_type)
    uninstall_field(architecture.config_class)
    MODEL_TYPES.remove(architecture.model_type)
    del ARCHITECTURES[architecture.model_type]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the caller's random state, defaults and logs alone."""
    verbosity, progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    token = patched_scheme.set(None)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            with torch.enable_grad():
                yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bar:
            logging.enable_progress_bar()
        patched_scheme.reset(token)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
