"""Training with FSDP2 and DeepSpeed: models are loaded whole for the warm start, and the teacher is sharded too."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from ..errors import PosEncError
from ..schemes import Scheme
from .distillation import transformer_layers

if TYPE_CHECKING:
    from accelerate import Accelerator

RAM_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""With this variable, transformers loads the weights in the first process of a machine only."""


def is_sharded(arguments: TrainingArguments) -> bool:
    """Whether FSDP or DeepSpeed will shard the models, by the arguments or the config of `accelerate launch`."""
    from accelerate.utils import parse_flag_from_env

    by_launcher = any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    return bool(by_launcher or arguments.fsdp or arguments.deepspeed)


@contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Inside the block, models are loaded with all their weights in every process, which a warm start needs.

    Otherwise transformers partitions them with ZeRO-3 while it loads, or leaves them out with FSDP.
    """
    config = getattr(arguments, "hf_deepspeed_config", None)  # of --deepspeed, or else of the launcher
    config = config or getattr(getattr(arguments, "deepspeed_plugin", None), "dschf", None)
    ram_efficient = os.environ.pop(RAM_EFFICIENT_LOADING, None)
    if config is not None:
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)
        if ram_efficient is not None:
            os.environ[RAM_EFFICIENT_LOADING] = ram_efficient


def check_zero3(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise PosEncError if ZeRO-3 cannot run a model, or would not gather its weights on saving."""
    zero = _zero_config(accelerator)
    if zero.get("stage") != 3:
        return
    if any(isinstance(module, Scheme) and module.name == "cope" for module in model.modules()):
        raise PosEncError("DeepSpeed ZeRO-3 cannot run cope, whose module returns a dtype: use FSDP2 or ZeRO-2")
    if not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise PosEncError(
            "ZeRO-3 would save shards that cannot be loaded: set zero3_save_16bit_model: true in the config of "
            "accelerate, or stage3_gather_16bit_weights_on_model_save in that of DeepSpeed"
        )


def local_shard(parameter: nn.Parameter) -> torch.Tensor:
    """What this process keeps of a parameter that FSDP2 or ZeRO-3 has sharded; all of another one."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local().detach()
    return getattr(parameter, "ds_tensor", parameter).detach()


def shard_teacher(model: PreTrainedModel, accelerator: Accelerator) -> nn.Module:
    """Shard a frozen model in the way of the run, on its device. It keeps its dtype.

    Where only gradients and optimizer states are sharded, as with ZeRO-2, it is whole on every device.

    Args:
        model: The model; all processes must run it together from then on.
        accelerator: Of the trainer.

    Returns:
        The model to call.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "fsdp_version", 1) == 2:
        return _fully_shard(model, accelerator)
    if _zero_config(accelerator).get("stage") == 3:
        return _partition(model, accelerator)
    return model.to(accelerator.device)


def _fully_shard(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Shard each layer, the embeddings and the rest with FSDP2, so that at most one of them is gathered at a time.

    Not with `accelerator.prepare`, which shards no model without an optimizer, and keeps the head gathered.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if accelerator.state.fsdp_plugin.cpu_offload:
        options["offload_policy"] = accelerator.state.fsdp_plugin.cpu_offload
    for layer in transformer_layers(model):
        fully_shard(layer, **options)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight:  # tied weights belong to the rest
        for module in (embeddings, head):
            if module is not None:
                fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def _partition(model: PreTrainedModel, accelerator: Accelerator) -> nn.Module:
    """Partition a model with ZeRO-3, in an engine without an optimizer."""
    import deepspeed

    zero = {name: value for name, value in _zero_config(accelerator).items() if value != "auto"}
    zero.pop("offload_optimizer", None)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, and used for nothing
        "zero_optimization": copy.deepcopy(zero),
        "bf16": {"enabled": model.dtype == torch.bfloat16},
        "fp16": {"enabled": model.dtype == torch.float16},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def _zero_config(accelerator: Accelerator) -> dict[str, Any]:
    """The section of DeepSpeed's config on ZeRO; empty without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
