"""Every private name of transformers that the package touches, each behind a public one.

A release of transformers that renames something is followed up here and nowhere else. Imports are local because import
hooks use this module while transformers itself is still being imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

    from hf_posenc.attention import ProcessRank

LoadHook = Callable[[Any, Any], Any]


class AttentionConfig:
    """A view of a model's config that differs only in the attention function it names."""

    _attn_implementation = "hf_posenc"

    def __init__(self, config: PreTrainedConfig) -> None:
        object.__setattr__(self, "stock_config", config)

    def __getattr__(self, name: str) -> Any:
        if name == "stock_config" or name.startswith("__"):  # asked for while it is copied, before it has a config
            raise AttributeError(name)
        return getattr(self.stock_config, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.stock_config, name, value)


PROBE_NAME = "hf_posenc_probe"


class ProbeConfig(AttentionConfig):
    """A view of a config that names the attention function which records its calls."""

    _attn_implementation = PROBE_NAME


class ModelHooks:
    """The private methods of `PreTrainedModel` that variants override, as calls of public ones."""

    stock_class: ClassVar[Any]
    _supports_flex_attn = True
    _auto_class = None  # remote code sets it on stock classes, whose source files must not be saved with a variant
    _keys_to_ignore_on_load_missing: Any
    _keys_to_ignore_on_load_unexpected: Any

    def init_scheme_weights(self, module: nn.Module) -> bool:
        """Initialize a scheme's parameters; False if the module is not part of a scheme."""
        raise AssertionError("overridden")

    def init_stock_weights(self, init_weights: Callable[[nn.Module], None], module: nn.Module) -> None:
        """Initialize a module of the stock model with the stock method."""
        raise AssertionError("overridden")

    def check_attn_implementation(self, attn_implementation: str | None) -> None:
        """Refuse a backend that the schemes cannot run on."""
        raise AssertionError("overridden")

    def continue_through_padding(self, position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Positions of a prompt for `generate`, which continues them from the last slot of each row."""
        raise AssertionError("overridden")

    def upload_saved_files(self, directory: Path, *args: Any, **kwargs: Any) -> Any:
        """Upload the files that `push_to_hub` saved."""
        raise AssertionError("overridden")

    def share_scheme_weights(self) -> None:
        """Make processes that divide the model agree on the parameters of the schemes."""
        raise AssertionError("overridden")

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """transformers reads the source of a class's module for this; that of a variant says nothing."""
        return cls.stock_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.stock_class._can_set_experts_implementation()

    def _init_weights(self, module: nn.Module) -> None:
        if not self.init_scheme_weights(module):
            self.init_stock_weights(super()._init_weights, module)  # type: ignore[misc]

    def _initialize_missing_keys(self, *args: Any, **kwargs: Any) -> None:
        super()._initialize_missing_keys(*args, **kwargs)  # type: ignore[misc]
        self.share_scheme_weights()

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_attn_implementation(attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Explicit positions of a prompt, which `generate` continues from the last slot of each row."""
        prepare = super()._prepare_position_ids_for_generation  # type: ignore[misc]
        position_ids: torch.Tensor = prepare(inputs_tensor, model_kwargs, *args, **kwargs)
        return self.continue_through_padding(position_ids, model_kwargs.get("attention_mask"))

    def _upload_modified_files(
        self, working_dir: Any, repo_id: str, files_timestamps: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        """The end of `push_to_hub`: with a model card of ours, and without stale shards of an earlier push."""
        directory = Path(working_dir)
        is_model = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
        upload = self.upload_saved_files if is_model else super()._upload_modified_files  # type: ignore[misc]
        return upload(directory, repo_id, files_timestamps, *args, **kwargs)

    def ignore_on_load(self, missing: set[str], unexpected: set[str]) -> None:
        """Do not report these keys when a checkpoint is loaded. The container depends on the release."""
        for name, patterns in (("missing", missing), ("unexpected", unexpected)):
            attribute = f"_keys_to_ignore_on_load_{name}"
            ignored = getattr(self, attribute)
            setattr(self, attribute, ignored | patterns if isinstance(ignored, set) else [*(ignored or []), *patterns])

    def ignored_on_load(self) -> tuple[list[str], list[str]]:
        """Patterns of keys that may be missing from a checkpoint, and of unexpected ones that are ignored."""
        return list(self._keys_to_ignore_on_load_missing or ()), list(self._keys_to_ignore_on_load_unexpected or ())


def attn_implementation(config: PreTrainedConfig) -> str:
    """The attention backend that a config is set to."""
    return config._attn_implementation


def set_attn_implementation(config: PreTrainedConfig, backend: str) -> None:
    """Set a config's attention backend without checking that it is installed."""
    config._attn_implementation = backend


def checkpoint_name(config: PreTrainedConfig) -> str:
    """The directory or Hub id that a config was loaded from."""
    return config._name_or_path or ""


def set_checkpoint_name(model: PreTrainedModel, name: str, config_name: str) -> None:
    """Set what a model and its config say they were loaded from; PEFT records the former as the base of an adapter."""
    model.name_or_path, model.config._name_or_path = name, config_name


def base_model_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The model without a head that AutoModel builds for a config."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return MODEL_MAPPING[config_class]


def share_weight_conversions(names: dict[str, str]) -> None:
    """Let variants be loaded and saved by the conversions of their stock model types or classes, by name.

    transformers renames and merges weights by these names, and skips classes it does not know unless registered.
    """
    from transformers import conversion_mapping

    for stock_name, variant_name in names.items():
        conversions = conversion_mapping.get_checkpoint_conversion_mapping(stock_name)
        if conversions is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(variant_name, conversions, overwrite=True)


def checkpoint_to_model_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The parameter that each tensor of a checkpoint is loaded into; the first of them if it is split."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions, parameters = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, parameters)[0] for name in names}


def load_shapes(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], adjust: LoadHook
) -> tuple[set[str], set[str], list[Any]]:
    """Load tensors without data into a model without data, to see what `from_pretrained` would make of them.

    Args:
        model: A model on the meta device. Its parameters are replaced.
        tensors: Tensors on the meta device by their names in a checkpoint.
        adjust: Called with the model and the load config, as by `wrap_weight_loading`.

    Returns:
        The names of missing parameters, those of unexpected tensors, and (name, stored shape, shape of the parameter)
        of each one that does not fit.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model as load
    from transformers.modeling_utils import LoadStateDictConfig

    load_config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), device_map={"": "meta"})
    options = {"tp_plan": None} if "tp_plan" in inspect.signature(load).parameters else {}  # in older releases
    with _no_progress_bar():
        report = load(model, dict(tensors), adjust(model, load_config), **options)[0]
    # Tensors that cannot be merged or split, because some are missing or differ in shape.
    missing = report.missing_keys | set(report.conversion_errors)
    return missing, report.unexpected_keys, sorted(report.mismatched_keys)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def model_class_names(auto_class: Any) -> set[str]:
    """The names of the classes that an Auto class builds."""
    classes = auto_class._model_mapping._model_mapping.values()
    return {name for names in classes for name in (names if isinstance(names, tuple) else (names,))}


def predicts_tokens(model_class: type[PreTrainedModel]) -> bool:
    """Whether the output layer of a class is tied to its input embeddings."""
    return bool(model_class._tied_weights_keys)


def unshare_weight_conversions(names: Iterable[str]) -> None:
    """Undo `share_weight_conversions` for some variants."""
    from transformers import conversion_mapping

    registered: set[str] = getattr(
        conversion_mapping, "USER_REGISTERED_MAPPINGS", set()
    )  # old releases have no registration
    for name in names:
        if name in registered:
            registered.discard(name)
            conversion_mapping._checkpoint_conversion_mapping_cache.pop(name, None)


def find_process_rank(module: nn.Module) -> ProcessRank | None:
    """This process among those that tensor parallelism divides a module's weights among; None if it does not."""
    from hf_posenc.attention import ProcessRank

    modules: Iterable[Any] = module.modules()
    mesh = next((submodule._hf_device_mesh for submodule in modules if hasattr(submodule, "_hf_device_mesh")), None)
    if mesh is None:  # newer releases
        meshes = (getattr(parameter, "device_mesh", None) for parameter in module.parameters())
        mesh = next((mesh for mesh in meshes if mesh is not None and _has_tensor_axis(mesh)), None)
    if mesh is None:
        return None
    axis = 0 if mesh.ndim == 1 else mesh.mesh_dim_names.index("tp")
    return ProcessRank(mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis))


def _has_tensor_axis(mesh: DeviceMesh) -> bool:
    """Whether one axis of a mesh is for tensor parallelism: by its name, or because it is the only one, unnamed."""
    return "tp" in mesh.mesh_dim_names if mesh.mesh_dim_names else mesh.ndim == 1


def was_loaded(model: PreTrainedModel) -> bool:
    """Whether `from_pretrained` filled the model, rather than only its config having been read."""
    return "_weight_conversions" in vars(model)


def swap_class(module: Any, new_class: type) -> None:
    """Change the class of a live module, and let transformers record outputs under the new class.

    A new module instead would break references that users hold: optimizers, hooks, tied weights.
    """
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    module.__class__ = new_class
    if hasattr(new_class, "_can_record_outputs"):
        # Keyed by the class's name in all releases; newer ones have a dict subclass with another key function.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(new_class), new_class._can_record_outputs)


def wrap_weight_loading(adjust: LoadHook, marker: str) -> None:
    """Pass the load config of every `from_pretrained` through `adjust(model, load_config)`. Idempotent by `marker`."""
    from transformers.modeling_utils import PreTrainedModel

    stock = PreTrainedModel._load_pretrained_model
    if hasattr(stock, marker):
        return

    @functools.wraps(stock)
    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(model, state_dict, checkpoint_files, adjust(model, load_config), *args, **kwargs)

    setattr(load, marker, True)
    PreTrainedModel._load_pretrained_model = staticmethod(load)


def extra_configs(module: types.ModuleType) -> dict[str, Any]:
    """The registered configs of AutoConfig; `module` is transformers' configuration_auto."""
    return module.CONFIG_MAPPING._extra_content


def set_extra_configs(module: types.ModuleType, configs: dict[str, Any]) -> None:
    module.CONFIG_MAPPING._extra_content = configs


def forget_config(model_type: str) -> None:
    """Undo `AutoConfig.register`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING._extra_content.pop(model_type, None)


def auto_mappings(config_class: type[PreTrainedConfig] | None = None) -> Iterator[Any]:
    """The mappings from config class to model class, one per kind of head; those that have a config class, or all."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.auto_factory import _LazyAutoMapping

    for value in vars(modeling_auto).values():
        if isinstance(value, _LazyAutoMapping) and (
            config_class is None
            or config_class.model_type in value._model_mapping
            or config_class in value._extra_content
        ):
            yield value


def mapping_of_auto_class(name: str) -> Any:
    """The mapping behind an Auto class, such as `AutoModelForCausalLM`; None if there is no such class."""
    from transformers.models.auto import modeling_auto

    return getattr(getattr(modeling_auto, name, None), "_model_mapping", None)


def register_in_mapping(mapping: Any, config_class: type[PreTrainedConfig], classes: tuple[type, ...]) -> None:
    """Register model classes for a config class, also by name.

    Trainer's label smoothing and pipelines look class names up in the table of names behind the mapping.
    """
    names = tuple(cls.__name__ for cls in classes)
    mapping.register(config_class, classes if len(classes) > 1 else classes[0], exist_ok=True)
    mapping._model_mapping[config_class.model_type] = names if len(names) > 1 else names[0]


def unregister_in_mapping(mapping: Any, config_class: type[PreTrainedConfig]) -> None:
    """Undo `register_in_mapping`."""
    mapping._extra_content.pop(config_class, None)
    mapping._model_mapping.pop(config_class.model_type, None)


def model_from_config(model_class: type[PreTrainedModel], config: PreTrainedConfig, backend: str) -> PreTrainedModel:
    """Build a model with an attention backend."""
    return model_class._from_config(config, attn_implementation=backend)


def supports_sdpa(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model class says that it has SDPA attention."""
    return bool(model_class._supports_sdpa)


def registered_auto_classes(config_class: type[PreTrainedConfig]) -> dict[str, str]:
    """The name of the model class that each Auto class gives for a registered config class."""
    from transformers.models.auto import modeling_auto

    names = {}
    for auto_class in vars(modeling_auto).values():
        mapping = getattr(auto_class, "_model_mapping", None) if isinstance(auto_class, type) else None
        model_class = getattr(mapping, "_extra_content", {}).get(config_class)
        if model_class is not None:
            first = model_class[0] if isinstance(model_class, tuple) else model_class
            names[auto_class.__name__] = first.__name__
    return names
