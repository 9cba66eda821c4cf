"""What acts in each layer of a model, and which way each backend computes it: the engine's own choices, asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from hf_posenc.attention.dispatch import AttentionPath, DispatchKey, MaskKind, select_path
from hf_posenc.attention.function import PosEncAttention, schemes_at, score_terms
from hf_posenc.schemes.base import STOCK_ROTATION
from hf_posenc.schemes.inputs import Content, Positions

from .variants import PosEncBaseModel

SEAMS = ("rotate", STOCK_ROTATION, "score", "value")
BACKENDS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
OCCASIONS: dict[str, dict[str, Any]] = {
    "no padding": {},
    "padding at the ends of rows": {"mask": MaskKind.PADDING},
    "another mask": {"mask": MaskKind.OTHER},
    "documents or gaps in position_ids": {"mask": MaskKind.OTHER, "uniform": False},
    "one token behind a cache": {"single_query": True},
    "training": {"requires_grad": True},
    "training with dropout": {"requires_grad": True, "dropout": True},
    "compiled or exported": {"tracing": True},
}


@dataclasses.dataclass(frozen=True)
class PathChoice:
    """The way that is taken on one occasion."""

    backend: str
    occasion: str
    path: AttentionPath
    why: str


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer: which scheme acts at which seam, and what is chosen for every backend and occasion."""

    layer: int
    acting: tuple[str, ...]
    """Such as "rope: rotate"."""
    choices: tuple[PathChoice, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Of a whole model: the names of schemes at its input embedding, and its layers."""

    at_input: tuple[str, ...]
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "a stock model: hf_posenc does nothing in it"
        lines = [f"input: {', '.join(self.at_input)}"] if self.at_input else []
        for same in _runs_of_equals(self.layers):
            numbers = f"layer {same[0].layer}" if len(same) == 1 else f"layers {same[0].layer} to {same[-1].layer}"
            lines.append(f"{numbers}: {', '.join(same[0].acting) or 'nothing acts'}")
            lines.extend(_table(same[0].choices))
        return "\n".join(lines)


def explain(model: nn.Module) -> Explanation:
    """Print, for each layer of a model, which seam acts and which path each backend takes and why; return it too.

    Nothing is run but the schemes themselves, on two tokens.
    """
    explanation = build_explanation(model)
    print(explanation)
    return explanation


def build_explanation(model: nn.Module) -> Explanation:
    """What `explain` prints. A model on the meta device, without any weights, is taken for one on the CPU."""
    bases: list[Any] = [module for module in model.modules() if isinstance(module, PosEncBaseModel)]
    at_input = tuple(_named(scheme) for base in bases for scheme in base.position_scheme if scheme.at_input)
    return Explanation(at_input, tuple(report for base in bases for report in _reports(base)))


def _named(scheme: Any) -> str:
    return scheme.name


def _reports(base: Any) -> list[LayerReport]:
    device = next(base.parameters()).device
    with torch.enable_grad():
        posenc = base.prepare_inputs({"input_ids": torch.zeros(1, 2, dtype=torch.long, device=device)}).positions
        layers = [module for module in base.modules() if isinstance(module, PosEncAttention)]
        return [_report(module, posenc, base) for module in sorted(layers, key=lambda module: module.layer_idx)]


def _report(module: PosEncAttention, posenc: Positions, base: Any) -> LayerReport:
    acting: list[str] = []
    for seam in SEAMS:
        acting.extend(f"{_named(scheme)}: {seam}" for scheme, _, _ in schemes_at(seam, module, posenc))
    terms, values = _terms(module, posenc, base)
    by_place = any(scheme.needs_distances for scheme in posenc.schemes if scheme.acts_at("score"))
    common: dict[str, Any] = {
        "term_types": frozenset(map(type, terms)),
        "has_value_terms": values,
        "on_cpu": next(base.parameters()).device.type in ("cpu", "meta"),
    }
    choices = []
    for backend in BACKENDS:
        for occasion, facts in OCCASIONS.items():
            uniform = facts.get("uniform", True) or not by_place  # who asks for no distance, has none for each pair
            now = DispatchKey(backend=backend, **{**common, **facts, "uniform": uniform})
            choices.append(PathChoice(backend, occasion, *select_path(now)))
    return LayerReport(module.layer_idx, tuple(acting), tuple(choices))


def _terms(module: PosEncAttention, posenc: Positions, base: Any) -> tuple[list[Any], bool]:
    """The score terms of a layer for two tokens of zeros, and whether vectors join the values."""
    shape, dtype = posenc.schemes[0].shape, next(base.parameters()).dtype
    groups = getattr(base.config, "num_key_value_heads", None) or shape.num_heads
    query, key = (
        torch.zeros(1, heads, 2, shape.head_size, dtype=dtype, device=posenc.queries_BQ.device)
        for heads in (shape.num_heads, groups)
    )
    everything = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=query.device)
    content = Content(query, query, key, 1.0, lambda: everything, lambda states: module.project_rows(states, query))
    return score_terms(schemes_at("score", module, posenc), content), bool(schemes_at("value", module, posenc))


def _runs_of_equals(layers: tuple[LayerReport, ...]) -> list[list[LayerReport]]:
    runs: list[list[LayerReport]] = []
    for layer in layers:
        alike = runs and layer.layer == runs[-1][-1].layer + 1
        if alike and (layer.acting, layer.choices) == (runs[-1][-1].acting, runs[-1][-1].choices):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _table(choices: tuple[PathChoice, ...]) -> list[str]:
    """A line for each backend and way, with the occasions that share it."""
    shared: dict[tuple[str, AttentionPath, str], list[str]] = {}
    for choice in choices:
        shared.setdefault((choice.backend, choice.path, choice.why), []).append(choice.occasion)
    lines = []
    for (backend, path, why), occasions in shared.items():
        when = "always" if len(occasions) == len(OCCASIONS) else "; ".join(occasions)
        lines.append(f"  {backend:<18} {when}: {path.value} ({why})")
    return lines
