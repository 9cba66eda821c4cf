"""Shrink a config to a model that is built and run in milliseconds, keeping the settings that decide how it works."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.errors import PosEncError

NUM_LAYERS = 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "ffn_hidden_size"), 40),
    "vocab_size": 61,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "local_attention"), 8),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The size of every field that sets one. Fields that a config lacks, or leaves unset, stay as they are."""
SET_ANYWAY = ("head_dim", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields that are set even where a config leaves them unset: some models cannot run without."""

HARMLESS = re.compile(r"use_cache|tie_.*|output_.*|return_.*|.*bias|torchscript")
"""Switches that do not change how positions reach attention."""


def tiny_config(prototype: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """A config of the same type and settings, with every size reduced.

    Args:
        prototype: The config to shrink.
        **changes: Further fields to set.

    Returns:
        A new config.
    """
    values = prototype.to_dict()
    for name in ("model_type", "auto_map", "transformers_version", "architectures", "dtype", "quantization_config"):
        values.pop(name, None)
    kept = {name: value for name, value in values.items() if not name.startswith("_")}
    return type(prototype)(**{**kept, **_sizes(prototype, kept), **changes})


def _sizes(prototype: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name in values and (values[name] is not None or name in SET_ANYWAY)
    }
    heads = getattr(prototype, "num_attention_heads", None)
    if heads is not None and values.get("num_key_value_heads") == heads:
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]  # perhaps it cannot group heads
    num_layers = getattr(prototype, "num_hidden_layers", None)
    for name, kinds in _kinds_of_layers(values, num_layers).items():
        sizes[name] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]  # some of every kind
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            sizes[name] = _unscaled(values[name])
    return sizes


def _unscaled(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings without factors that depend on sizes. Perhaps nested by the type of layers."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _unscaled(value) if isinstance(value, dict) else value for name, value in rope.items()}
    kept: dict[str, Any] = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    has_lists = any(isinstance(value, list) for value in rope.values())
    return {"rope_type": "default", **kept} if has_lists else rope


def _kinds_of_layers(values: dict[str, Any], num_layers: int | None) -> dict[str, list[Any]]:
    """For each field with a value per layer, the different values."""
    kinds = {}
    for name, value in values.items():
        if isinstance(value, list) and value and len(value) == num_layers:
            with contextlib.suppress(TypeError):  # of unhashable values
                kinds[name] = list(dict.fromkeys(value))
    return kinds


def tested_only(tested: PreTrainedConfig) -> Callable[[PreTrainedConfig], None]:
    """A check that refuses configs with switches, or kinds of layers, that a test did not cover.

    Args:
        tested: The config of the model that was tested.

    Returns:
        A function that raises PosEncError for such a config.
    """
    values = tested.to_dict()
    switches = {name: value for name, value in values.items() if isinstance(value, bool) and not HARMLESS.match(name)}
    layer_kinds = _kinds_of_layers(values, NUM_LAYERS)

    def check(config: PreTrainedConfig) -> None:
        given = config.to_dict()
        untested = {name: given.get(name) for name, value in switches.items() if bool(given.get(name)) != value}
        for name, kinds in _kinds_of_layers(given, getattr(config, "num_hidden_layers", None)).items():
            if not set(kinds) <= set(layer_kinds.get(name, kinds if name not in values else ())):
                untested[name] = kinds
        if untested:
            name, value = next(iter(untested.items()))
            raise PosEncError(
                f"hf_posenc.support did not test {type(tested).__name__} with {name}={value}. Start a new process, and "
                "call support with the config of this checkpoint instead of a model type or another config"
            )

    return check
