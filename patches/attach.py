"""Put the schemes that a config names into a base model, and take them out again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.attention import PositionNeeds, Window, check_backend
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import Kind, ModelShape, ParameterModule, Scheme
from hf_posenc.schemes.base import LAYER_SEAMS, STOCK_ROTATION
from hf_posenc.schemes.inputs import LayerSeams
from hf_posenc.spec import PositionScheme, SchemeSpec, assign_layers
from hf_posenc.validation import ParameterBudget, check_model_sizes

from .architecture import Architecture, NullEmbedding
from .attention_modules import PosEncAttention, attention_class, cross_attention_class, layer_class
from .compat import AttentionConfig, attn_implementation, swap_class


@dataclasses.dataclass
class SchemeState:
    """What a base model knows of its schemes, besides the modules in `base.position_scheme`."""

    position_scheme: PositionScheme
    """What the model was built with."""
    active: tuple[LayerSeams, ...]
    """For each layer and seam, the indices of the schemes that act there."""
    needs: PositionNeeds
    at_embedding: tuple[int, ...]
    """The indices of the schemes that act at the input embedding."""
    causal: bool
    window: Window | None
    uses_stock_table: bool
    """Whether the architecture's own position table stays."""
    scheme_owns_table: bool
    """Whether the scheme adds that table instead of the architecture, because another scheme makes order matter."""
    replaced: dict[str, nn.Module] | None = None
    """By path, the stock modules that `retrofit` replaced; None if the model was built with its schemes."""
    replaced_configs: list[Any] = dataclasses.field(default_factory=list)
    """The `ReplacedConfig` of each config that `retrofit` replaced."""
    attentions_checked: bool = False
    """Whether `check_attentions` passed; the first forward calls it."""
    longest_input: int = 0
    """One more than the highest position that was read."""
    loaded_from: str = ""
    """The checkpoint that the stock model said it was loaded from."""


@dataclasses.dataclass(frozen=True)
class SchemePlan:
    """The schemes of a model, built and checked against it, before the model is touched."""

    schemes: list[Scheme]
    layer_modules: dict[int, nn.ModuleDict]
    """For each layer with scheme parameters of its own, the module of each scheme by its index."""
    state: SchemeState


def plan_schemes(architecture: Architecture, config: PreTrainedConfig) -> SchemePlan:
    """Build the schemes that a variant's config names.

    Args:
        architecture: The architecture of the model.
        config: A variant's config.

    Returns:
        The plan, for `attach`.

    Raises:
        PosEncError: If the sizes of the config are absurd, or a scheme does not fit the model or its backend.
    """
    check_model_sizes(vars(config))
    architecture.check_config(config)
    specs, shape = config.position_specs, architecture.shape(config)
    check_backend(attn_implementation(config), specs)
    if shape.num_layers < config.num_hidden_layers and any(spec.selects_layers for spec in specs):
        raise PosEncError(
            f"{architecture.model_type} shares the weights of its {config.num_hidden_layers} layers, so a scheme acts "
            "in all of them: leave out `layers` and `except_layers`"
        )
    specs, layers = assign_layers(specs, shape.num_layers, architecture.stock_scheme, shape.layer_types)
    specs, layers, shapes = _split_by_rotation(architecture, config, specs, layers)
    layer_modules: dict[int, nn.ModuleDict] = {}
    with ParameterBudget(shape.num_layers, shape.hidden_size):
        schemes = [spec.build(own_shape) for spec, own_shape in zip(specs, shapes, strict=True)]
        for index, scheme in enumerate(schemes):
            for layer in layers[index]:
                module = scheme.layer_module()
                if module is not None:
                    layer_modules.setdefault(layer, nn.ModuleDict())[str(index)] = module
    num_tables = sum(scheme.uses_stock_table() for scheme in schemes)
    if num_tables > 1:
        raise PosEncError("position_scheme lists 'learned' twice, but the architecture has one table; list it once")
    seams = [spec.seams for spec in specs]
    caps_or_sinks = getattr(config, "attn_logit_softcapping", None) or architecture.has_sinks
    if caps_or_sinks and any("value" in of_scheme for of_scheme in seams):
        raise PosEncError(
            f"{architecture.model_type} caps its attention logits or adds attention sinks, which cannot be combined "
            'with terms that schemes add to the values: set "values": false, or use another scheme'
        )
    state = SchemeState(
        position_scheme=copy.deepcopy(config.position_scheme),
        active=tuple(_layer_seams(architecture, schemes, seams, layers, layer) for layer in range(shape.num_layers)),
        needs=PositionNeeds.of(schemes, seams),
        at_embedding=tuple(index for index in range(len(specs)) if "embed" in seams[index]),
        causal=shape.causal,
        window=architecture.window(config),
        uses_stock_table=num_tables == 1,
        scheme_owns_table=num_tables == 1 and any(scheme.rewrites_embeddings for scheme in schemes),
    )
    return SchemePlan(schemes, layer_modules, state)


def _split_by_rotation(
    architecture: Architecture, config: Any, specs: tuple[SchemeSpec, ...], layers: list[tuple[int, ...]]
) -> tuple[list[SchemeSpec], list[tuple[int, ...]], list[ModelShape]]:
    """Let a rotation inherit the checkpoint's settings for the type of its layers.

    A rotation in layers of several types, whose settings differ, becomes one for each type. The further ones are
    appended, so that the indices of schemes, and with them the names of their parameters, stay.
    """
    shape = architecture.shape(config)
    all_specs, all_layers, shapes = list(specs), list(layers), [shape] * len(specs)
    if shape.layer_types is None or not architecture.rotary:
        return all_specs, all_layers, shapes
    by_type = {name: architecture.shape(config, name) for name in sorted(set(shape.layer_types))}
    if all(own.rope_parameters == shape.rope_parameters for own in by_type.values()):
        return all_specs, all_layers, shapes
    for index, spec in enumerate(specs):
        if not spec.scheme.inherits_rotation or spec.build(shape).keeps_stock_rotation():
            continue
        first = True
        for name, own_shape in by_type.items():
            of_type = tuple(layer for layer in layers[index] if shape.layer_types[layer] == name)
            if of_type and first:
                all_layers[index], shapes[index], first = of_type, own_shape, False
            elif of_type:
                all_specs.append(spec)
                all_layers.append(of_type)
                shapes.append(own_shape)
    return all_specs, all_layers, shapes


def _layer_seams(
    architecture: Architecture,
    schemes: list[Scheme],
    seams: list[frozenset[str]],
    layers: list[tuple[int, ...]],
    layer: int,
) -> LayerSeams:
    in_layer = [index for index in range(len(schemes)) if layer in layers[index]]
    active = {seam: tuple(index for index in in_layer if seam in seams[index]) for seam in LAYER_SEAMS}
    rotations = active["rotate"]
    if active["remap"]:
        _check_remap(schemes, active)
    is_only_rotation = len(rotations) == 1 and not active["score"] and not active["value"]
    # Nothing else needs unrotated queries: leave the rotation to the stock code, which is exact and fused.
    by_stock = is_only_rotation and architecture.rotary and _rotates_by_stock(architecture, schemes[rotations[0]])
    return {**active, "rotate": () if by_stock else rotations, STOCK_ROTATION: rotations if by_stock else ()}


def _check_remap(schemes: list[Scheme], active: LayerSeams) -> None:
    """Refuse schemes in a layer whose far keys have another rotation, if they would act on near keys only."""
    (first, *_), rotations = active["remap"], [i for i in active["rotate"] if schemes[i].kind is Kind.ROTATION]
    others = [schemes[index].name for index in (*active["score"], *active["value"], *rotations) if index != first]
    if others:
        raise PosEncError(
            f"{schemes[first].name}: extend computes near and far keys apart, where {others[0]!r} cannot act: use one "
            "of the two in each layer (see the `layers` option)"
        )


def _rotates_by_stock(architecture: Architecture, scheme: Scheme) -> bool:
    """Whether the stock code can rotate for a scheme: with its own angles, or with the scheme's in their place."""
    differs = architecture.interleaved or architecture.angle_per_pair or architecture.reversed_rotation
    is_partial = (scheme.shape.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0
    takes_any_angles = architecture.rotates is None and not differs and not is_partial
    return scheme.keeps_stock_rotation() or (takes_any_angles and scheme.uses_rotate_half())


def attach(base: PreTrainedModel, architecture: Architecture, plan: SchemePlan) -> dict[str, nn.Module]:
    """Carry out a plan on a base model.

    Returns:
        The stock modules that were replaced, by path.
    """
    replaced = {}
    if architecture.table and plan.state.uses_stock_table:
        scheme = next(scheme for scheme in plan.schemes if scheme.uses_stock_table())
        table = base.get_submodule(architecture.table)
        patched = scheme.patch_embedding(table, plan.state.scheme_owns_table)
        if patched is not table:
            replaced[architecture.table] = _replace(base, architecture.table, patched)
    elif architecture.table:
        replaced[architecture.table] = _replace(base, architecture.table, NullEmbedding())
    for module in architecture.cross_attentions(base):
        swap_class(module, cross_attention_class(type(module)))  # type: ignore[arg-type]
    if architecture.layers_drop_kwargs:
        for module in base.get_submodule(architecture.layers).children():
            swap_class(module, layer_class(type(module)))  # type: ignore[arg-type]
    angle_size = architecture.angle_size(base.config)
    for layer, module in enumerate(architecture.self_attentions(base)):
        swap_class(module, attention_class(type(module), architecture))  # type: ignore[arg-type]
        module.config = AttentionConfig(module.config)  # type: ignore[assignment]
        module.layer_idx, module.angle_size = layer, angle_size  # type: ignore[assignment]
        module.has_window = architecture.has_window(base.config, layer)  # type: ignore[assignment]
        if layer in plan.layer_modules:
            module.position_scheme = plan.layer_modules[layer]
    base.position_scheme = nn.ModuleList(plan.schemes)
    base.posenc = plan.state
    return replaced


def check_attentions(base: PreTrainedModel, architecture: Architecture) -> None:
    """Refuse a model whose attention modules were replaced after `attach`: these would ignore the scheme.

    Raises:
        PosEncError: If a layer has an attention module without the scheme.
    """
    for layer, attention in enumerate(architecture.self_attentions(base)):
        if not any(isinstance(module, PosEncAttention) for module in attention.modules()):  # itself, or in a wrapper
            raise PosEncError(
                f"the attention of layer {layer} is a {type(attention).__name__}, put in place after the position "
                f"scheme, which it would ignore. Build the model without position_scheme, then call hf_posenc.retrofit"
            )
    base.posenc.attentions_checked = True


def detach(base: PreTrainedModel, architecture: Architecture) -> None:
    """Undo `attach` on a model that `retrofit` changed, on whatever device and in whatever dtype it is now."""
    for module in architecture.self_attentions(base):
        module.config = module.config.stock_config  # type: ignore[union-attr]
        if hasattr(module, "position_scheme"):
            del module.position_scheme
        swap_class(module, module.stock_class)  # type: ignore[arg-type]
    for module in architecture.cross_attentions(base):
        swap_class(module, module.stock_class)  # type: ignore[arg-type]
    if architecture.layers_drop_kwargs:
        for module in base.get_submodule(architecture.layers).children():
            swap_class(module, module.stock_class)
    replaced = base.posenc.replaced
    del base.position_scheme, base.posenc
    embedding = base.get_input_embeddings().weight
    for path, module in replaced.items():
        patched = base.get_submodule(path)
        if isinstance(module, nn.Embedding) and isinstance(patched, nn.Embedding):
            module.weight = patched.weight  # shared, and perhaps trained or moved since
        dtype = embedding.dtype if path == architecture.table else None
        _replace(base, path, module.to(device=embedding.device, dtype=dtype).train(base.training))


def init_scheme_weights(module: nn.Module) -> bool:
    """Initialize a scheme or its module of a layer; False if the module is neither."""
    if isinstance(module, ParameterModule):
        module.reset_parameters()
        return True
    return False


@torch.no_grad()
def init_live_weights(plan: SchemePlan, embedding: torch.Tensor, training: bool) -> None:
    """Initialize the parameters of a plan for a live model, in its dtype, on its device and in its mode."""
    for container in (*plan.schemes, *plan.layer_modules.values()):
        container.to(device=embedding.device, dtype=embedding.dtype).train(training)
        for module in container.modules():
            init_scheme_weights(module)


def ignored_keys(base: nn.Module, architecture: Architecture) -> tuple[set[str], set[str]]:
    """Patterns of keys that a stock checkpoint lacks, and of those it has too many, for a new scheme.

    Scheme parameters are not among the latter: a checkpoint that has some was trained with another scheme.
    """
    missing: set[str] = {r"(^|\.)position_scheme\."}
    unexpected: set[str] = set()
    if architecture.table and isinstance(base.get_submodule(architecture.table), NullEmbedding):
        unexpected = {rf"(^|\.){architecture.table.replace('.', '[.]')}[.]weight$"}
    return missing, unexpected


def with_scheme(config: PreTrainedConfig, position_scheme: PositionScheme) -> Any:
    """A copy of a config with a position scheme."""
    config = copy.deepcopy(config)
    config.position_scheme = position_scheme
    return config


def _replace(base: nn.Module, path: str, module: nn.Module) -> nn.Module:
    parent_path, _, name = path.rpartition(".")
    parent = base.get_submodule(parent_path)
    replaced = getattr(parent, name)
    setattr(parent, name, module)
    return replaced
