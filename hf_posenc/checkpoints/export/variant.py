"""A variant to export: its files, its schemes with their trained parameters, and the names of its tensors."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from ...config import VariantConfig
from ...errors import PosEncError
from ...model_types import VARIANT_PREFIX
from ...patches import SchemePlan, find_architecture, plan_schemes
from ...patches.compat import checkpoint_to_model_names
from ...schemes import ModelShape, Scheme
from ..inspection import base_prefix, build_meta_model, check_weights, is_scheme_parameter
from ..links import check_checkpoint_links
from ..source import Checkpoint, find_checkpoint, merge_tensors, read_config, read_config_fields, read_shards

Rules = Mapping[str, str | None]
"""Regular expressions and their replacements, applied in order. What matches a None is left out, and what matches
MERGED too, because its values become part of other tensors."""
MERGED = ""
HEAD = "/"
"""The beginning of a new name that is outside of the base model."""


class NoStockEqual(PosEncError):
    """No stock model of some kind computes what the variant computes. The message says why."""


@dataclasses.dataclass(frozen=True)
class Variant(Checkpoint):
    """A saved variant, opened for export: its weights are complete and fit its config."""

    head: str
    """The name of the stock class that it is a variant of."""
    model_names: dict[str, str]
    """The parameter that each tensor is loaded into."""
    parameters: frozenset[str]
    """The names of all parameters of the model."""
    prefix: str
    """The prefix of the base model's parameters."""

    @classmethod
    def open(cls, source: str | Path, revision: str | None = None, token: str | bool | None = None) -> Variant:
        """Open a variant's directory or Hub id. Raises `PosEncError` if it is not an intact variant."""
        directory = find_checkpoint(source, revision, token)
        try:
            check_checkpoint_links(directory)
            model_type = read_config_fields(directory)["model_type"]
            if not model_type.startswith(VARIANT_PREFIX):
                raise PosEncError(f"{source} is a stock checkpoint ({model_type}) already: there is nothing to export")
            config = read_config(directory)
            shards = read_shards(directory)
        except OSError as error:
            raise PosEncError(f"{source} cannot be read: {error}") from error
        architecture = find_architecture(config)
        if architecture is None or not isinstance(config, VariantConfig):
            raise PosEncError(f"{source} is not a variant that this version knows: {model_type}")
        tensors = merge_tensors(shards)
        if getattr(config, "quantization_config", None):
            raise PosEncError(
                f"{source} is quantized: export the variant before quantization, then quantize the export"
            )
        if any(".lora_" in name for name in tensors):
            raise PosEncError(f"{source} contains LoRA adapters: merge them with merge_and_unload and save the result")
        _, problems, _ = check_weights(config, tensors)
        if problems:
            raise PosEncError(f"{source} cannot be exported: {'; '.join(problems[:3])}")
        model = build_meta_model(config, architecture, base_only=False)
        return cls(
            directory=directory,
            config=config,
            architecture=architecture,
            shards=shards,
            head=type(model).__name__.removeprefix("PosEnc"),
            model_names=checkpoint_to_model_names(model, tensors),
            parameters=frozenset(model.state_dict()),
            prefix=base_prefix(model, architecture),
        )

    @property
    def model_type(self) -> str:
        """The model type of the stock model."""
        return self.architecture.model_type

    @property
    def shape(self) -> ModelShape:
        return self.architecture.shape(self.config)

    @property
    def scheme_text(self) -> str:
        return json.dumps(self.config.position_scheme)

    @cached_property
    def plan(self) -> SchemePlan:
        """The schemes, with the parameters that all layers share loaded from the files."""
        plan = plan_schemes(self.architecture, self.config)
        for index, scheme in enumerate(plan.schemes):
            prefix = f"{self.prefix}position_scheme.{index}."
            state = {name: self.read(f"{prefix}{name}").float() for name in scheme.state_dict()}
            scheme.to(torch.float32).load_state_dict(state)
        return plan

    @property
    def schemes(self) -> list[Scheme]:
        return self.plan.schemes

    def attention_path(self, layer: int) -> str:
        """The path of a layer's self-attention, as in the names of parameters."""
        return f"{self.prefix}{self.architecture.layers}.{layer}.{self.architecture.self_attention}"

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """The tensor in the files for each parameter."""
        return {parameter: name for name, parameter in self.model_names.items()}

    def read(self, parameter: str) -> torch.Tensor:
        """Read one parameter from the files."""
        name = self.stored_names[parameter]
        shard = next(shard for shard in self.shards if name in shard.tensors)
        with safe_open(shard.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def stock_config(self) -> PreTrainedConfig:
        """The config of the stock model that this is a variant of."""
        config = copy.deepcopy(self.config)
        config.become_stock()
        config.architectures = [self.head]
        return config

    def rename(self, base: Rules, target_prefix: str, head: Rules) -> tuple[dict[str, str | None], list[str]]:
        """New names for all tensors by the old ones, for a model of another type; and the tensors that are left out.

        The name of a tensor that is not written is None.

        Args:
            base: Rules for the names inside the base model.
            target_prefix: The prefix of the base model inside the target with a head.
            head: Rules for the names of the head.
        """
        names: dict[str, str | None] = {}
        left_out = []
        for name, parameter in self.model_names.items():
            new: str | None = MERGED if is_scheme_parameter(parameter) else None
            if parameter in self.parameters and new is None:
                in_base = parameter.startswith(self.prefix)
                new = _apply(base if in_base else head, parameter.removeprefix(self.prefix) if in_base else parameter)
                if new and in_base and self.prefix:
                    new = new.removeprefix(HEAD) if new.startswith(HEAD) else f"{target_prefix}{new}"
            if new is None:
                left_out.append(name)
            names[name] = new or None
        return names, left_out


def _apply(rules: Rules, name: str) -> str | None:
    for pattern, replacement in rules.items():
        if replacement:
            name = re.sub(pattern, replacement, name)
        elif re.search(pattern, name):
            return replacement
    return name
