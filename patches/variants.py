"""The variant classes: for any stock model class, a subclass whose forward knows positions. Made on demand."""

from __future__ import annotations

import functools
import inspect
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from hf_posenc.attention.cache import annotate_cache, self_attention_cache, updated_caches
from hf_posenc.attention.context import cache_embeds, running_mean_embeds
from hf_posenc.attention.function import check_backend
from hf_posenc.attention.positions import PositionNeeds, ResolvedPositions, resolve_positions, token_like
from hf_posenc.config import VariantConfig, variant_config_class
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.inputs import is_tracing
from hf_posenc.validation import check_model_sizes

from .architecture import Architecture
from .attach import attach, ignored_keys, init_scheme_weights, plan_schemes, with_scheme

logger = logging.get_logger(__name__)
MODULE = "hf_posenc.models"
FLATTENED = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
"""Inputs with an axis for choices (double heads) are laid out flat, which stock models do for token ids only."""
patched_scheme: ContextVar[Any] = ContextVar("patched_scheme", default=None)


class PosEncModel:
    """What the variant classes of all architectures and heads share. Mixed in before the stock class."""

    architecture: ClassVar[Architecture]
    stock_class: ClassVar[type[PreTrainedModel]]
    _supports_flex_attn = True
    _keys_to_ignore_on_load_missing: Any
    _keys_to_ignore_on_load_unexpected: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, VariantConfig):
            scheme = patched_scheme.get()
            if scheme is None:
                raise ValueError(f"{type(self).__name__} needs a config with a position_scheme, got {type(config)}")
            config = with_scheme(config, scheme)
        check_model_sizes(vars(config))
        config.position_specs()
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self._take_schemes_in()
        if config.scheme_is_fresh or config.scheme_is_legacy:
            base: Any = next(module for module in self.modules() if isinstance(module, PosEncBaseModel))  # type: ignore
            missing, unexpected = ignored_keys(base, self.architecture)
            if config.scheme_is_legacy:  # its parameters are in the checkpoint, and must be
                missing, unexpected = set(), unexpected - missing
            self._keys_to_ignore_on_load_missing = _with(self._keys_to_ignore_on_load_missing, missing)
            self._keys_to_ignore_on_load_unexpected = _with(self._keys_to_ignore_on_load_unexpected, unexpected)
            if any(parameter.is_meta for parameter in self.parameters()):  # type: ignore[attr-defined]
                config.remember_base_model(config._name_or_path)  # from_pretrained, which will fill it from there
            # The checkpoint it came from is not this model: an adapter that names it would be put on a stock one.
            self.name_or_path = config._name_or_path = ""

    @property
    def config(self) -> Any:
        return self.__dict__["config"]

    @config.setter
    def config(self, config: Any) -> None:
        """Composite models replace the configs of their parts: whichever it is, it must name the scheme."""
        mine = self.__dict__.get("config")
        if mine is not None and not isinstance(config, VariantConfig):
            config.position_scheme = mine.position_scheme
        self.__dict__["config"] = config

    def _take_schemes_in(self) -> None:
        """Heads have nothing to take in: the base model inside of them has done it."""

    def _init_weights(self, module: nn.Module) -> None:
        if not init_scheme_weights(module):
            super()._init_weights(module)  # type: ignore[misc]

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        items = self.config.position_specs()
        check_backend(attn_implementation, list(items))
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: variants are saved with a shim that imports this package, never with copies of its files."""

    def _upload_modified_files(
        self,
        working_dir: Any,
        repo_id: str,
        files_timestamps: dict[str, float],
        commit_message: str | None = None,
        token: Any = None,
        create_pr: bool = False,
        revision: str | None = None,
        commit_description: str | None = None,
    ) -> Any:
        """The end of `push_to_hub`: with a card of ours, and without shards that an earlier push has left there."""
        from hf_posenc.hub.upload import holds_variant, upload_saved

        rest = (commit_message, token, create_pr, revision, commit_description)
        if not holds_variant(Path(working_dir)):  # an adapter
            return super()._upload_modified_files(working_dir, repo_id, files_timestamps, *rest)  # type: ignore[misc]
        return upload_saved(Path(working_dir), repo_id, files_timestamps, *rest)


def _with(patterns: Any, more: set[str]) -> Any:
    """The patterns and some more, in the container that this release of transformers keeps them in."""
    return patterns | more if isinstance(patterns, set) else [*(patterns or []), *more]


class PosEncBaseModel(PosEncModel):
    """The variant of a base model: holds the schemes, and finds the positions of every forward."""

    position_scheme: nn.ModuleList
    active_schemes: tuple[dict[str, tuple[int, ...]], ...]
    built_scheme: Any
    scheme_owns_table: bool

    def _take_schemes_in(self) -> None:
        attach(self, self.architecture, plan_schemes(self.architecture, self.config))  # type: ignore[arg-type]
        self.init_weights()  # type: ignore[attr-defined]

    def prepare_inputs(self, inputs: dict[str, Any]) -> ResolvedPositions:
        """Complete the inputs of a stock forward with positions, and return them."""
        config, words = self.config, self.get_input_embeddings()  # type: ignore[attr-defined]
        if not is_tracing() and config.position_scheme != self.built_scheme:
            raise ValueError(
                f"config.position_scheme is {config.position_scheme!r}, but the model was built with "
                f"{self.built_scheme!r}: a live model is changed by hf_posenc.restore and hf_posenc.retrofit"
            )
        dtype = words.weight.dtype if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"].dtype
        schemes: list[Scheme] = list(self.position_scheme)  # type: ignore[arg-type]
        needs = PositionNeeds(
            any(scheme.needs_distances for scheme in schemes if scheme.acts_at("score") or scheme.acts_at("value")),
            any(scheme.needs_key_positions for scheme in schemes),
        )
        causal = self.architecture.is_causal(config)
        located = resolve_positions(inputs, dtype, config, causal, needs)
        posenc = located.positions
        if self.scheme_owns_table:
            posenc.table = self.get_submodule(self.architecture.table)  # type: ignore[attr-defined]
        posenc.schemes, posenc.active = schemes, self.active_schemes
        posenc.prepared = [scheme("prepare", posenc) for scheme in schemes]
        self.architecture.fill_inputs(self, inputs)  # type: ignore[arg-type]
        embedding = [scheme for scheme in schemes if scheme.acts_at("embed")]
        if embedding and inputs.get("inputs_embeds") is None:
            inputs["inputs_embeds"] = words(inputs.pop("input_ids"))
        if any(scheme.needs_context for scheme in embedding):
            if located.attention_mask is not None and not isinstance(located.attention_mask, torch.Tensor):
                raise ValueError('query="context" needs a mask it can read: pass a tensor, not a BlockMask')
            located.inputs_embeds_BQE = inputs["inputs_embeds"]
            cache = self_attention_cache(inputs.get("past_key_values"))
            posenc.context_BQE = running_mean_embeds(
                located.inputs_embeds_BQE, located, cache, config.num_hidden_layers, causal
            )
        for scheme in embedding:
            inputs["inputs_embeds"] = scheme("embed", inputs["inputs_embeds"], posenc)
        inputs.update(position_ids=posenc.queries_BQ, attention_mask=located.attention_mask, posenc=posenc)
        return located


def variant_class(architecture: Architecture, stock_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The variant of a stock class, made once. Also works for a user's own subclass of a stock class."""
    with _lock:
        if stock_class not in _VARIANTS:
            _VARIANTS[stock_class] = _make_variant_class(architecture, stock_class)
        return _VARIANTS[stock_class]


def _make_variant_class(architecture: Architecture, stock_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    is_base = issubclass(stock_class, architecture.base)
    name = f"PosEnc{stock_class.__name__}"
    body: dict[str, Any] = {
        "__module__": MODULE,
        "__qualname__": name,
        "__doc__": f"{stock_class.__name__} with a position scheme.",
        "architecture": architecture,
        "stock_class": stock_class,
        "config_class": variant_config_class(architecture.family.config_class),
    }
    if is_base:
        body["forward"] = _positioned_forward(stock_class)
    return type(name, (PosEncBaseModel if is_base else PosEncModel, stock_class), body)


_VARIANTS: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
_lock = threading.RLock()


def _positioned_forward(stock_class: type[PreTrainedModel]) -> Any:
    stock_forward = stock_class.forward
    names = list(inspect.signature(stock_forward).parameters)[1:]

    @functools.wraps(stock_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
            return stock_forward(self, **inputs)  # which says what is wrong with that
        shape = token_like(inputs).shape
        for name in FLATTENED if len(shape) > 2 else ():
            if inputs.get(name) is not None:
                inputs[name] = inputs[name].flatten(0, len(shape) - 2)
        located = self.prepare_inputs(inputs)
        outputs = stock_forward(self, **inputs)
        for cache in updated_caches(inputs.get("past_key_values"), outputs):
            length_matters = any(scheme.depends_on_length for scheme in self.position_scheme)
            annotate_cache(cache, located.positions, located.order, located.all_BK, length_matters)
            if located.inputs_embeds_BQE is not None:
                cache_embeds(cache, located.inputs_embeds_BQE, self.config.num_hidden_layers)
        return outputs if len(shape) == 2 else _unflattened(outputs, shape)

    return forward


def _unflattened(outputs: Any, shape: Any) -> Any:
    """The last hidden state with the axes that the input had: several choices a row."""
    if isinstance(outputs, tuple):
        return (outputs[0].unflatten(0, shape[:-1]), *outputs[1:])
    outputs.last_hidden_state = outputs.last_hidden_state.unflatten(0, shape[:-1])
    if outputs.get("hidden_states"):
        outputs.hidden_states = (*outputs.hidden_states[:-1], outputs.last_hidden_state)
    return outputs


def install(architecture: Architecture) -> None:
    """Make stock classes build their variant when they are given a variant's config. Inert for stock configs."""
    family = architecture.family
    if "__new__" in family.__dict__:
        return

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("config")
        inside_patched = config is not None and patched_scheme.get() is not None
        wanted = isinstance(config, VariantConfig) or inside_patched
        if wanted and not isinstance(config, (VariantConfig, family.config_class)):
            raise ValueError(
                f"{cls.__name__} is built here with a {type(config).__name__}, which cannot name a position scheme; "
                f"build it outside of hf_posenc.patched, or with a {family.config_class.__name__}"
            )
        if wanted and not issubclass(cls, PosEncModel):
            cls = variant_class(architecture, cls)
        return super(family, cls).__new__(cls)

    # Static, as Python makes it only for one that stands in the class body: DataParallel calls it on an instance.
    family.__new__ = staticmethod(__new__)  # type: ignore[assignment]
