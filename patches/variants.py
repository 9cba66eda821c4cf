"""The variant classes: for any stock model class, a subclass whose forward knows positions. Created on demand."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.attention import (
    ResolvedPositions,
    annotate_caches,
    check_backend,
    check_direction,
    check_sequence_parallel,
    resolve_positions,
    token_like,
)
from hf_posenc.config import SchemeOrigin, VariantConfig, variant_config_class
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import Positions, is_tracing
from hf_posenc.spec import PositionScheme

from .architecture import Architecture
from .attach import SchemeState, attach, check_attentions, ignored_keys, init_scheme_weights, plan_schemes, with_scheme
from .attention_modules import CLASS_MODULE
from .compat import ModelHooks, attn_implementation, checkpoint_name
from .from_pretrained import keep_source_name
from .lengths import stock_length
from .pickling import PickledByStockClass
from .tensor_parallel import share_scheme_weights

FLATTENED = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
"""Inputs with an axis for choices (double heads) are flattened, which stock models do for token ids only."""
patched_scheme: ContextVar[PositionScheme | None] = ContextVar("patched_scheme", default=None)
"""The scheme of the innermost `hf_posenc.patched` block."""
patched_classes: ContextVar[list[type[PreTrainedModel]]] = ContextVar("patched_classes")
"""The classes of the models that were built in that block, stock if they are not supported."""
_variant_classes: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
_lock = threading.RLock()


class ConfigAttribute:
    """The `config` of a variant. Reads come from the instance; only setting it is intercepted."""

    def __set__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        # Composite models replace the configs of their parts; whichever it is, it must name the scheme.
        if "config" in vars(model) and not isinstance(config, VariantConfig):
            config.position_scheme = model.config.position_scheme
        vars(model)["config"] = config


class PosEncModel(PickledByStockClass, ModelHooks):
    """Shared by the variant classes of all architectures and heads. Mixed in before the stock class."""

    kind = "model"

    architecture: ClassVar[Architecture]
    stock_class: ClassVar[type[PreTrainedModel]]
    config: Any = ConfigAttribute()

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, VariantConfig):
            scheme = patched_scheme.get()
            if scheme is None:
                raise PosEncError(f"{type(self).__name__} needs a config with a position_scheme, got {type(config)}")
            config = with_scheme(config, scheme)
        plan = plan_schemes(self.architecture, config) if isinstance(self, PosEncBaseModel) else None
        with stock_length(config):
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if plan is not None:
            attach(self, self.architecture, plan)
            self.init_weights()  # type: ignore[attr-defined]
        if config.scheme_origin is not SchemeOrigin.CHECKPOINT:
            self._expect_stock_checkpoint(config)

    def _expect_stock_checkpoint(self: Any, config: PreTrainedConfig) -> None:
        """The scheme is new to the checkpoint: neither its parameters nor a dropped table are worth a warning."""
        missing, unexpected = ignored_keys(base_models(self)[0], self.architecture)
        if config.scheme_origin is SchemeOrigin.LEGACY:  # its parameters are in the checkpoint, and must be
            missing, unexpected = set(), unexpected - missing
        self.ignore_on_load(missing, unexpected)
        if any(parameter.is_meta for parameter in self.parameters()):  # from_pretrained, which will fill it
            config.record_base_model(checkpoint_name(config))
        keep_source_name(self)

    def init_scheme_weights(self, module: nn.Module) -> bool:
        return init_scheme_weights(module)

    def init_stock_weights(self, init_weights: Callable[[nn.Module], None], module: nn.Module) -> None:
        with stock_length(self.config):
            init_weights(module)

    def share_scheme_weights(self: Any) -> None:
        for base in base_models(self):
            share_scheme_weights(base)

    def check_attn_implementation(self, attn_implementation: str | None) -> None:
        check_backend(attn_implementation, self.config.position_specs)

    def continue_through_padding(self, position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Let padding after the tokens of a row keep the last position, so that new tokens continue the prompt.

        The stock positions of padding are 0, so that the tokens after a right-padded prompt would start again at 1.
        """
        if attention_mask is None or attention_mask.shape != position_ids.shape:
            return position_ids
        return torch.where(attention_mask.bool(), position_ids, position_ids.cummax(-1).values)

    def create_masks_for_generate(self, **inputs: Any) -> Any:
        """The masks that `generate` prepares for static caches; for flex_attention, the forward prepares them."""
        if attn_implementation(self.config) == "flex_attention":  # generate() cannot pass on block masks
            return inputs["attention_mask"]
        return getattr(super(), "create_masks_for_generate", create_masks_for_generate)(**inputs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: variants are saved with a module that imports this package, never with copies of its files."""

    def upload_saved_files(
        self,
        directory: Path,
        repo_id: str,
        files_timestamps: dict[str, float],
        commit_message: str | None = None,
        token: bool | str | None = None,
        create_pr: bool = False,
        revision: str | None = None,
        commit_description: str | None = None,
    ) -> Any:
        upload = import_module("hf_posenc.hub").upload_saved_model  # by name, because hub is a room above this one
        rest = (commit_message, token, create_pr, revision, commit_description)
        return upload(directory, repo_id, files_timestamps, *rest)


class PosEncBaseModel(PosEncModel):
    """The variant of a base model: owns the schemes, and resolves the positions of every forward pass."""

    position_scheme: nn.ModuleList
    posenc: SchemeState

    def prepare_inputs(self: Any, inputs: dict[str, Any]) -> ResolvedPositions:
        """Add positions to the inputs of the stock forward, in place.

        Args:
            inputs: The keyword arguments of the forward.

        Returns:
            The positions, and what the cache must remember of them.

        Raises:
            PosEncError: If the config or an attention module was changed after the model was built, or positions
                cannot be resolved.
        """
        config, state, tracing = self.config, self.posenc, is_tracing()
        if not tracing and config.position_scheme != state.position_scheme:
            raise PosEncError(
                f"config.position_scheme is {config.position_scheme!r}, but the model was built with "
                f"{state.position_scheme!r}. Change a live model with hf_posenc.restore and hf_posenc.retrofit"
            )
        if not tracing and not state.attentions_checked:
            check_attentions(self, self.architecture)
        causal = self._is_causal(inputs)
        schemes, embedding = list(self.position_scheme), self.get_input_embeddings()
        if state.at_embedding and inputs.get("inputs_embeds") is None:
            inputs["inputs_embeds"] = embedding(inputs.pop("input_ids"))
        inputs_embeds = inputs.get("inputs_embeds")
        rotary_positions = _split_position_axes(inputs, self.architecture.position_axes)
        has_position_ids = inputs.get("position_ids") is not None
        if has_position_ids:
            _count_from_zero(inputs, self.architecture.first_position(config))
        resolved = resolve_positions(
            inputs,
            dtype=embedding.weight.dtype if inputs_embeds is None else inputs_embeds.dtype,
            backend=attn_implementation(config),
            causal=causal,
            tracing=tracing,
            needs=state.needs,
            schemes=schemes,
            active=state.active,
            table=self.get_submodule(self.architecture.table) if state.scheme_owns_table else None,
            rotary=self.rotary_emb if self.architecture.rotary else None,
            rotary_positions=rotary_positions,
            window=state.window,
        )
        positions = resolved.positions
        if not tracing:
            state.longest_input = max(state.longest_input, _length_read(positions, has_position_ids))
        check_sequence_parallel(positions, has_position_ids)
        if self.architecture.fill_inputs is not None:
            self.architecture.fill_inputs(inputs)
        for index in state.at_embedding:
            inputs["inputs_embeds"] = schemes[index]("embed", inputs["inputs_embeds"], positions)
        position_ids = positions.queries_BQ
        if rotary_positions is not None:
            position_ids = torch.cat([position_ids.expand_as(rotary_positions[:1]), rotary_positions])
        inputs.update(position_ids=position_ids, attention_mask=resolved.attention_mask, posenc=positions)
        return resolved

    def _is_causal(self: Any, inputs: dict[str, Any]) -> bool:
        """Whether this pass is causal: transformers lets a call, or a later change of the config, decide.

        Rotations and input embeddings do not depend on it; terms of the scores and values do.
        """
        state: SchemeState = self.posenc
        asked = inputs.get("is_causal")
        asked = self.architecture.is_causal(self.config) if asked is None else bool(asked)
        if any(seams["score"] or seams["value"] for seams in state.active):
            check_direction(asked, state.causal)
        return asked


def _length_read(positions: Positions, has_position_ids: bool) -> int:
    """One more than the highest position of a forward pass, or what is known of it without waiting for a GPU."""
    if positions.queries_BQ.device.type == "cpu":
        return positions.length() or 0
    return positions.length_bound or (0 if has_position_ids else positions.queries_BQ.shape[-1])


def _split_position_axes(inputs: dict[str, Any], num_axes: int) -> torch.Tensor | None:
    """The positions that stock rotations read, if they have several axes; `position_ids` keep those in the text.

    The axes are the last ones of explicit position_ids; without one more for the text, tokens count by their slot.
    """
    position_ids = inputs.get("position_ids")
    if num_axes == 1 or position_ids is None or position_ids.dim() < 3:
        return None
    inputs["position_ids"] = position_ids[0] if len(position_ids) > num_axes else None
    return position_ids[-num_axes:]


def _count_from_zero(inputs: dict[str, Any], first_position: int) -> None:
    """Subtract what the architecture calls position 0 from explicit position_ids, in place. Padding gets any."""
    if not first_position:
        return
    position_ids, mask = inputs["position_ids"] - first_position, inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[-1] == position_ids.shape[-1]:
        position_ids = torch.where(mask.bool(), position_ids, 0)
    inputs["position_ids"] = position_ids


def base_models(model: nn.Module) -> list[PreTrainedModel]:
    """The base models with schemes inside a model: several in an encoder-decoder."""
    return [module for module in model.modules() if isinstance(module, PosEncBaseModel)]


def variant_class(architecture: Architecture, stock_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The variant of a stock class, or of a user's subclass of one, created on first use."""
    with _lock:
        if stock_class not in _variant_classes:
            _variant_classes[stock_class] = _make_variant_class(architecture, stock_class)
        return _variant_classes[stock_class]


def forget_variant_classes(architecture: Architecture) -> list[str]:
    """Forget the variants of an architecture that is not supported after all; their names."""
    with _lock:
        variants = {
            stock: variant for stock, variant in _variant_classes.items() if variant.architecture is architecture
        }
        for stock_class in variants:
            del _variant_classes[stock_class]
    return [variant.__name__ for variant in variants.values()]


def _make_variant_class(architecture: Architecture, stock_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    is_base = issubclass(stock_class, architecture.base)
    name = f"PosEnc{stock_class.__name__}"
    import_module(CLASS_MODULE)  # transformers looks the module of a class up in sys.modules
    body: dict[str, Any] = {
        "__module__": CLASS_MODULE,
        "__qualname__": name,
        "__doc__": f"{stock_class.__name__} with a position scheme.",
        "architecture": architecture,
        "stock_class": stock_class,
        "config_class": variant_config_class(architecture.config_class),
    }
    if is_base:
        body["forward"] = _make_forward(stock_class)
    return type(name, (PosEncBaseModel if is_base else PosEncModel, stock_class), body)


def _make_forward(stock_class: type[PreTrainedModel]) -> Callable[..., Any]:
    """The stock forward with positions resolved before it, and the cache annotated after it."""
    stock_forward = stock_class.forward
    names = list(inspect.signature(stock_forward).parameters)[1:]

    @functools.wraps(stock_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
            return stock_forward(self, **inputs)  # raises the stock error
        shape = token_like(inputs).shape
        for name in FLATTENED if len(shape) > 2 else ():
            if inputs.get(name) is not None:
                inputs[name] = inputs[name].flatten(0, len(shape) - 2)
        resolved = self.prepare_inputs(inputs)
        outputs = stock_forward(self, **inputs)
        length, num_layers = self.posenc.needs.length, self.config.num_hidden_layers
        annotate_caches(inputs.get("past_key_values"), outputs, resolved, length, num_layers)
        return outputs if len(shape) == 2 else _unflatten(outputs, shape)

    return forward


def _unflatten(outputs: Any, shape: torch.Size) -> Any:
    """The last hidden state with the axes of the input: several choices per row."""
    if isinstance(outputs, tuple):
        return (outputs[0].unflatten(0, shape[:-1]), *outputs[1:])
    outputs.last_hidden_state = outputs.last_hidden_state.unflatten(0, shape[:-1])
    if outputs.get("hidden_states"):
        outputs.hidden_states = (*outputs.hidden_states[:-1], outputs.last_hidden_state)
    return outputs


def install_variants() -> None:
    """Make stock classes build their variant when they are given a variant's config. Inert for stock configs."""
    if "__new__" in vars(PreTrainedModel):
        return

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("config")
        if config is not None and not issubclass(cls, PosEncModel):
            cls = _class_to_build(cls, config)
        return super(PreTrainedModel, cls).__new__(cls)

    # Python makes __new__ static only in a class body, and DataParallel calls it on an instance.
    PreTrainedModel.__new__ = staticmethod(__new__)


def _class_to_build(cls: type[PreTrainedModel], config: object) -> type[PreTrainedModel]:
    """The variant of a class if the config, or the innermost `hf_posenc.patched` block, names a scheme."""
    if patched_scheme.get() is None:
        return _variant_or_stock(cls, config) if isinstance(config, VariantConfig) else cls
    built = _variant_or_stock(cls, config)
    if built.config_class is not None:  # else it is not a model of transformers
        patched_classes.get().append(built)
    return built


def _variant_or_stock(cls: type[PreTrainedModel], config: object) -> type[PreTrainedModel]:
    from .families import ARCHITECTURES

    config_class = getattr(config, "stock_class", cls.config_class)
    architecture = ARCHITECTURES.get(config_class.model_type) if config_class is not None else None
    if architecture is None or not issubclass(cls, architecture.family):
        return cls
    if not isinstance(config, (VariantConfig, architecture.config_class)):
        raise PosEncError(
            f"{cls.__name__} is built here with a {type(config).__name__}, which has no position_scheme; "
            f"build it outside hf_posenc.patched, or with a {architecture.config_class.__name__}"
        )
    if architecture.own_base is not None and cls.config_class.model_type != architecture.model_type:
        raise PosEncError(
            f"{cls.__name__} is a class of model type {cls.config_class.model_type!r}, so it cannot be built with the "
            f"position_scheme of a {architecture.model_type!r} config; use classes whose config_class is "
            f"{architecture.config_class.__name__}"
        )
    return variant_class(architecture, cls)
