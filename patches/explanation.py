"""What acts in each layer of a model, and which path each backend takes: the dispatcher's own choices."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.attention import (
    AttentionPath,
    DispatchKey,
    LayerSchemes,
    MaskKind,
    TokenGates,
    find_local_heads,
    flex_min_scores,
    has_dense_terms,
    runs_flex_kernels,
    score_terms,
    select_path,
    triton_supports,
)
from hf_posenc.schemes import Content, Positions, Scheme
from hf_posenc.schemes.base import STOCK_ROTATION

from .attention_modules import PosEncAttention
from .variants import base_models

SEAMS = ("rotate", STOCK_ROTATION, "content_scale", "score", "value", "remap")
BACKENDS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
SITUATIONS: dict[str, dict[str, Any]] = {
    "no padding": {},
    "padding at the ends of rows": {"mask": MaskKind.PADDING},
    "any other mask": {"mask": MaskKind.OTHER},
    "packed rows": {"mask": MaskKind.OTHER},
    "gaps in position_ids": {"mask": MaskKind.OTHER, "uniform": False},
    "decoding one token": {"single_query": True},
    "training": {"requires_grad": True},
    "training with dropout": {"requires_grad": True, "dropout": True},
    "compiled or exported": {"tracing": True},
}


@dataclasses.dataclass(frozen=True)
class PathChoice:
    """The path that is taken in one situation."""

    backend: str
    situation: str
    path: AttentionPath
    reason: str


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer: which scheme acts at which seam, and the path for every backend and situation."""

    layer: int
    active: tuple[str, ...]
    """Such as "rope: rotate"."""
    choices: tuple[PathChoice, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A whole model: the schemes at its input embedding, and its layers. Print it to read it."""

    at_input: tuple[str, ...]
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "a stock model: hf_posenc does nothing in it"
        lines = [f"input: {', '.join(self.at_input)}"] if self.at_input else []
        groups: dict[tuple[Any, ...], list[int]] = {}
        for report in self.layers:
            groups.setdefault((report.active, report.choices), []).append(report.layer)
        shared = _shared_lines([choices for _, choices in groups])
        explained: dict[tuple[PathChoice, ...], str] = {}
        for (active, choices), indices in groups.items():
            name = _format_layers(indices)
            lines.append(f"{name}: {', '.join(active) or 'no scheme'}")
            if choices in explained:
                lines.append(f"  paths as in {explained[choices]}")
            else:
                lines.extend(line for line in _format_choices(choices) if line not in shared)
            explained.setdefault(choices, name)
        return "\n".join([*lines, *(["all layers:"] if shared else []), *shared])


def explain(model: nn.Module) -> Explanation:
    """Print which scheme acts in each layer of a model, and which path each backend takes and why.

    Runs nothing but the schemes themselves, on two tokens.

    Args:
        model: A stock model or a variant.

    Returns:
        What was printed.

    Example:
        >>> hf_posenc.explain(model)
        layers 0 to 11: alibi: score
        ...
    """
    explanation = build_explanation(model)
    print(explanation)
    return explanation


def build_explanation(model: nn.Module) -> Explanation:
    """What `explain` prints. A model on the meta device is treated as one on the CPU."""
    bases = base_models(model)
    at_input = tuple(_describe_input(scheme) for base in bases for scheme in base.position_scheme if scheme.at_input)
    return Explanation(at_input, tuple(report for base in bases for report in _layer_reports(base)))


def _layer_reports(base: PreTrainedModel) -> list[LayerReport]:
    device = next(base.parameters()).device
    with torch.enable_grad():
        inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.long, device=device)}
        positions = base.prepare_inputs(inputs).positions
        return [_layer_report(module, positions, base) for module in base.architecture.self_attentions(base)]


def _layer_report(module: PosEncAttention, positions: Positions, base: PreTrainedModel) -> LayerReport:
    seams, layer = positions.active[module.layer_idx], module.layer_schemes(positions)
    active = [_describe(positions.schemes[index], seam) for seam in SEAMS for index in seams[seam]]
    needs_distances = any(scheme.needs_distances for scheme in positions.schemes if scheme.acts_at("score"))
    terms, parameter = _score_terms(module, layer, base), next(base.parameters())
    term_types, on_cpu = frozenset(map(type, terms)), parameter.device.type in ("cpu", "meta")
    situations = _situations(terms, parameter, positions.schemes[0].shape.head_size)
    caps_or_sinks = any(getattr(module, name, None) is not None for name in ("attn_logit_softcapping", "sinks"))
    choices = []
    for backend, (situation, facts) in itertools.product(BACKENDS, situations.items()):
        uniform = facts.get("uniform", True) or not needs_distances
        if module.has_window:  # inputs longer than the window are masked by it
            facts = {**facts, "mask": MaskKind.OTHER}
        common = {"term_types": term_types, "has_value_terms": bool(layer.value), "on_cpu": on_cpu}
        common.update(caps_or_sinks=caps_or_sinks, remapped=bool(layer.remap))
        key = DispatchKey(backend=backend, **{**common, **facts, "uniform": uniform})
        choices.append(PathChoice(backend, situation, *select_path(key)))
    return LayerReport(module.layer_idx, tuple(active), tuple(choices))


def _situations(terms: list[Any], parameter: torch.Tensor, head_size: int) -> dict[str, dict[str, Any]]:
    """The situations of a layer. Where there are fused kernels for score terms, large inputs are some of their own."""
    least = flex_min_scores()
    if least is None or not runs_flex_kernels(parameter.device):
        return SITUATIONS
    facts: dict[str, Any] = {"flex_pays": not has_dense_terms(terms)}
    any_mask = {"any mask": {**facts, "mask": MaskKind.OTHER}}
    if facts["flex_pays"] and triton_supports(terms, parameter.dtype, head_size):
        any_mask = {"any other mask": any_mask["any mask"]}
        facts["triton_computes"] = True
        any_mask["padding at the ends of rows, packed rows or a window"] = {**facts, "mask": MaskKind.OTHER}
        any_mask["training with dropout"] = {**facts, **SITUATIONS["training with dropout"]}
    large = {"no padding": facts, "training": {**facts, "requires_grad": True}, **any_mask}
    return {**SITUATIONS, **{f"from {least:,} scores per layer on, {name}": known for name, known in large.items()}}


def _describe(scheme: Scheme, seam: str) -> str:
    details = scheme.details(seam)
    return f"{scheme.name}: {seam}" + (f" ({details})" if details else "")


def _describe_input(scheme: Scheme) -> str:
    details = scheme.details("embed")
    return scheme.name + (f" ({details})" if details else "")


def _score_terms(module: PosEncAttention, layer: LayerSchemes, base: PreTrainedModel) -> list[Any]:
    """The score terms of a layer for two tokens of zeros."""
    if module.process_rank() is not None:
        return _local_score_terms(module, layer)
    shape, parameter = layer.positions.schemes[0].shape, next(base.parameters())
    num_key_heads = getattr(base.config, "num_key_value_heads", None) or shape.num_heads
    query, key = (parameter.new_zeros(1, heads, 2, shape.head_size) for heads in (shape.num_heads, num_key_heads))
    visible = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=query.device)
    content = Content(query, query, key, 1.0, lambda: visible, module.project_rows)
    return score_terms(layer.score, content, gates=_zero_gates(module, layer, parameter))


def _local_score_terms(module: PosEncAttention, layer: LayerSchemes) -> list[Any]:
    """The same for the heads that this process has, under tensor parallelism."""
    if not layer.score:
        return []
    width, parameter = layer.score[0].scheme.shape.hidden_size, next(module.parameters())
    projections = module.project(torch.zeros(1, 2, width, device=parameter.device, dtype=parameter.dtype))
    query, key = projections.query_BHND, projections.key_BGND
    local_heads = find_local_heads(module, query, key, [active.scheme for active in layer.score])
    visible = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=query.device)
    heads = None if local_heads is None else local_heads.heads
    content = Content(query, query, key, projections.scaling, lambda: visible, module.project_rows, heads)
    return score_terms(layer.score, content, local_heads, _zero_gates(module, layer, parameter))


def _zero_gates(module: PosEncAttention, layer: LayerSchemes, parameter: torch.Tensor) -> TokenGates | None:
    """The gates of two hidden states of zeros."""
    width = layer.positions.schemes[0].shape.hidden_size
    states_BNE = torch.zeros(1, 2, width, device=parameter.device, dtype=parameter.dtype)  # whole on each process
    return module.token_gates(layer, states_BNE, layer.positions)


def _format_layers(indices: list[int]) -> str:
    """Name layers by their indices: "layer 3", "layers 0 to 5", "layers 0, 2, 4", "layers 3, 7 to 9"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer {indices[0]}" if len(indices) == 1 else f"layers {', '.join(names)}"


def _shared_lines(choices: list[tuple[PathChoice, ...]]) -> list[str]:
    """The lines that all groups of layers have in common, if their paths differ."""
    first, *others = dict.fromkeys(choices)
    texts = [set(_format_choices(other)) for other in others]
    return [line for line in _format_choices(first) if texts and all(line in text for text in texts)]


def _format_choices(choices: tuple[PathChoice, ...]) -> list[str]:
    """One line per backend and path, with the situations that share it."""
    situations: dict[tuple[str, AttentionPath, str], list[str]] = {}
    number = len({choice.situation for choice in choices})
    for choice in choices:
        situations.setdefault((choice.backend, choice.path, choice.reason), []).append(choice.situation)
    lines = []
    for (backend, path, reason), shared in situations.items():
        when = "always" if len(shared) == number else "; ".join(shared)
        lines.append(f"  {backend:<18} {when}: {path.value} ({reason})")
    return lines
