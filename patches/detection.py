"""Find the parts of an unknown architecture by running a tiny model of it, not by the names of its modules."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.errors import PosEncError

from .architecture import Architecture
from .families import fill_token_types
from .probing import AttentionCall, TableReads, probe_tokens, probing, record_calls
from .tiny_configs import tested_only

SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
Build = Callable[..., PreTrainedModel]
"""Builds the tiny model, with changes to its config."""


def detect(model_type: str, build: Build) -> tuple[Architecture, PreTrainedModel]:
    """Find the parts of an architecture.

    Args:
        model_type: The model type.
        build: Builds a tiny model of the type, with or without a head.

    Returns:
        The record, and the base model that it describes.

    Raises:
        PosEncError: If a part is missing or of an unknown form.
    """
    model = build()
    config: Any = model.config
    calls = record_calls(model)
    if not calls:
        raise PosEncError("its attention does not go through transformers' attention interface")
    base = _base_model(model, [call.module for call in calls])
    missing = [name for name in SIZE_FIELDS if getattr(config, name, None) is None]
    if missing:
        raise PosEncError(f"its config has no {missing[0]}")
    layers, attention_path = _layer_paths(base, [call.module for call in calls])
    attention = calls[0].module
    if not hasattr(sys.modules[type(attention).__module__], "eager_attention_forward"):
        raise PosEncError(f"the module of {type(attention).__name__} has no eager_attention_forward")
    fields: dict[str, Any] = {
        "model_type": model_type,
        "own_config": type(config),
        "own_base": type(base),
        "layers": layers,
        "self_attention": attention_path,
        "layers_drop_kwargs": _layers_drop_kwargs(base, [call.module for call in calls]),
        "is_causal": _constant(_is_causal(base)),
        "check_config": tested_only(config),
    }
    if "token_type_ids" in inspect.signature(type(base).forward).parameters:
        fields["fill_inputs"] = fill_token_types
    rotates = "position_embeddings" in inspect.signature(type(attention).forward).parameters
    fields |= _rotary_fields(base, attention) if rotates else _table_fields(base, build)
    architecture = Architecture(**fields)
    _check_heads(architecture, base, calls)
    if architecture.is_causal(config):
        _check_cache(base)
    return architecture, base


def _check_heads(architecture: Architecture, base: PreTrainedModel, calls: list[AttentionCall]) -> None:
    """Refuse heads that are not what the config says, and layers without the own rotation."""
    head_size = architecture.shape(base.config).head_size
    for query, key, value in {(call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]) for call in calls}:
        if {query, key, value} != {head_size}:
            raise PosEncError(
                f"queries, keys and values have {query}, {key} and {value} features by head, not {head_size}"
            )
    if not architecture.rotary:
        return
    expected, num_angles = architecture.angle_size(base.config), _num_angles(base)
    if expected != num_angles:
        raise PosEncError(f"it rotates by {num_angles} angles where its config asks for {expected}")
    positions = torch.arange(probe_tokens().shape[1])[None] + 3
    shifted = record_calls(base, position_ids=positions)
    still = [
        layer
        for layer, (call, moved) in enumerate(zip(calls, shifted, strict=True))
        if torch.allclose(call.query, moved.query, rtol=0, atol=1e-3)
    ]
    if still:
        raise PosEncError(f"layers {still} of {len(calls)} do not rotate queries and keys")


@torch.no_grad()
def _check_cache(base: PreTrainedModel) -> None:
    """Refuse attention that receives a cache but does not get earlier keys from it."""
    if "past_key_values" not in inspect.signature(type(base).forward).parameters:
        return
    start, rest = probe_tokens().split([6, 8], dim=1)
    cache = base(input_ids=start, use_cache=True).past_key_values
    with probing(base) as calls:
        base(input_ids=rest, past_key_values=cache, use_cache=True)
    for layer, call in enumerate(calls):
        if call.key.shape[2] <= rest.shape[1]:
            raise PosEncError(f"layer {layer} does not update the cache before it calls the attention function")


def _base_model(model: PreTrainedModel, attentions: list[nn.Module]) -> PreTrainedModel:
    """The innermost model that contains all attention modules."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    base = [module for module in models if set(attentions) <= set(module.modules())][-1]
    if type(base.config) is not type(model.config):
        raise PosEncError(
            f"its attention belongs to a part, {type(base).__name__}, with a config of its own; "
            f"call support({type(base.config).__name__}) instead"
        )
    names = inspect.signature(type(base).forward).parameters
    if not {"input_ids", "inputs_embeds", "attention_mask", "position_ids"} <= set(names):
        raise PosEncError(
            f"{type(base).__name__}.forward lacks input_ids, inputs_embeds, attention_mask or position_ids"
        )
    return base


def _layer_paths(base: PreTrainedModel, attentions: list[nn.Module]) -> tuple[str, str]:
    """The path to the list of layers, and the path from a layer to its self-attention."""
    if len(set(attentions)) < len(attentions):
        raise PosEncError("an attention module calls the attention function several times in one forward pass")
    num_layers = base.config.num_hidden_layers
    for path, module in base.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        by_layer = [[name for name, submodule in layer.named_modules() if submodule in attentions] for layer in module]
        if not any(by_layer):
            continue
        for index, names in enumerate(by_layer):
            if len(names) != 1:
                raise PosEncError(f"layer {index} has {len(names)} attentions that go through the interface, not one")
        if len(by_layer) != len(attentions) or len({names[0] for names in by_layer}) > 1:
            raise PosEncError("its layers differ in where their attention is")
        return path, by_layer[0][0]
    raise PosEncError(f"no list of {num_layers} layers contains its attention")


def _layers_drop_kwargs(base: nn.Module, attentions: list[nn.Module]) -> bool:
    """Whether a keyword argument of the base model ends at the layers, where it can be picked up."""
    marker = object()
    hooks = [
        module.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "posenc": marker}), with_kwargs=True)
        for module in attentions
    ]
    try:
        calls = record_calls(base)
    except PosEncError:
        calls = []
    finally:
        for hook in hooks:
            hook.remove()
    if not calls or any(call.kwargs.get("posenc") is not marker for call in calls):
        raise PosEncError(
            f"{type(attentions[0]).__name__} does not pass its keyword arguments on to the attention function, "
            "so positions cannot reach it"
        )
    forward = inspect.signature(type(base).forward).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in forward):
        raise PosEncError(f"{type(base).__name__}.forward takes no keyword arguments, so positions cannot pass it")
    return any(call.kwargs.get("posenc") is not marker for call in record_calls(base, posenc=marker))


@torch.no_grad()
def _is_causal(base: nn.Module) -> bool:
    """Whether earlier tokens do not see later ones."""
    tokens = probe_tokens()
    changed = tokens.clone()
    changed[:, -1] += 1
    return torch.equal(base(input_ids=tokens)[0][:, :-1], base(input_ids=changed)[0][:, :-1])


def _rotary_fields(base: PreTrainedModel, attention: nn.Module) -> dict[str, Any]:
    """How the architecture rotates queries and keys."""
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None or not isinstance(getattr(base, "rotary_emb", None), nn.Module):
        raise PosEncError("its rotation is not that of a `rotary_emb` module and an `apply_rotary_pos_emb` function")
    if not isinstance(getattr(base.config, "rope_parameters", None), dict):
        raise PosEncError("its config has no rope_parameters")
    num_angles = _num_angles(base)
    for size in (num_angles, 2 * num_angles):
        states, sin = torch.zeros(1, 1, 1, size), torch.ones(1, 1, num_angles)
        states[..., 0] = 1
        with contextlib.suppress(RuntimeError):  # sizes that do not fit
            rotated = rotate(states, states, torch.zeros_like(sin), sin)[0].flatten()
            partner = int(rotated.abs().argmax())
            if partner in (1, size // 2):
                return {
                    "interleaved": partner == 1,
                    "reversed_rotation": bool(rotated[partner] < 0),
                    "angle_per_pair": size > num_angles,
                }
    raise PosEncError("its rotation pairs features neither half a head apart nor next to each other")


def _num_angles(base: PreTrainedModel) -> int:
    """The number of angles per position."""
    inputs: dict[str, Any] = {}
    if "layer_type" in inspect.signature(base.rotary_emb.forward).parameters:
        inputs["layer_type"] = base.config.layer_types[0]
    angles = base.rotary_emb(torch.zeros(1, 2, 8), torch.arange(2)[None], **inputs)
    if not isinstance(angles, tuple) or len(angles) != 2:
        raise PosEncError("its `rotary_emb` does not return cos and sin")
    return angles[0].shape[-1]


def _table_fields(base: nn.Module, build: Build) -> dict[str, Any]:
    """Where the position table is, and which rows it uses."""
    path, first_row = _find_table(base)
    other_pad = _find_table(build(pad_token_id=5).get_submodule(_path_in(build(), type(base))))[1]
    extra_rows = base.get_submodule(path).weight.shape[0] - base.config.max_position_embeddings  # type: ignore
    shift = other_pad - first_row
    if shift not in (0, 5):
        raise PosEncError("the first row of its position table depends on the padding token in an unknown way")
    fields = {
        "table": path,
        "extra_rows": extra_rows,
        "first_row": (lambda config: config.pad_token_id + first_row) if shift else _constant(first_row),
    }
    positions = torch.arange(probe_tokens().shape[1])[None]
    first_position = first_row - _find_table(base, position_ids=positions)[1]
    if first_position not in (0, first_row):
        raise PosEncError("its position_ids name rows of the position table in an unknown way")
    return {**fields, "first_position": fields["first_row"]} if first_position else fields


def _path_in(model: nn.Module, base: type) -> str:
    return [name for name, module in model.named_modules() if type(module) is base][-1]


@torch.no_grad()
def _find_table(base: nn.Module, **inputs: Any) -> tuple[str, int]:
    """The path to the embedding that is read in order of the positions, and the first row that is read."""
    with TableReads() as mode:
        base(input_ids=probe_tokens(), **inputs)
    tables = {}
    for weight, rows in mode.reads:
        rows = rows.flatten()[: probe_tokens().shape[1]]
        if len(rows) == probe_tokens().shape[1] and torch.equal(rows.diff(), torch.ones_like(rows[1:])):
            tables.update({id(weight): int(rows[0])})
    paths = [
        (name, tables[id(module.weight)])
        for name, module in base.named_modules()
        if isinstance(module, nn.Embedding) and id(module.weight) in tables
    ]
    if len(paths) != 1:
        raise PosEncError(f"it has {len(paths)} position tables, and no rotation that layers receive; expected one")
    return paths[0]


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda config: value
