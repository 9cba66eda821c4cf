"""One small picture per scheme that shows what it does. It depends on where the scheme acts: see `draw`.

Pictures are drawn for the width of a phone: `WIDTH` inches become about 300 CSS pixels there, so that a font of 10
points is 10 pixels high.

Shape legend: H heads, N tokens, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import matplotlib as mpl
import torch
from transformers import PreTrainedModel

from hf_posenc import analysis
from hf_posenc.analysis.inspection import ModelInspector, inspect_model
from hf_posenc.attention import apply_rotation, materialize, score_terms
from hf_posenc.errors import PosEncError
from hf_posenc.plots import style
from hf_posenc.registry import SchemeInfo
from hf_posenc.schemes import Content, Kind
from scripts.small_models import LENGTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, FONT_SIZE, SMALLEST_FONT = 4.0, 2.7, 10.0, 9.0
"""In inches and points."""
NUM_SCORED_ROWS = 32
TRAINED = "learned by a small GPT-2 on 64 tokens"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure, and the sentence that says what it shows."""

    figure: Figure
    caption: str


def draw(info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> Picture:
    """Draw what explains a scheme: its embeddings, rotation, bias, scores, factors or gates.

    Args:
        info: The scheme.
        model: A small model that was trained with it.
        text: Token ids for what depends on the content.

    Returns:
        The picture.
    """
    drawings: dict[Kind, Callable[[Axes, SchemeInfo, PreTrainedModel, torch.Tensor], str]] = {
        Kind.INPUT: draw_embeddings,
        Kind.ROTATION: draw_decay,
        Kind.DISTANCE: draw_bias,
        Kind.CONTENT: draw_scores,
        Kind.TEMPERATURE: draw_factors,
    }
    drawing = SPECIAL.get(info.name) or drawings.get(info.kind, draw_attention)
    try:
        return _draw_with(drawing, info, model, text)
    except PosEncError:  # a scheme of this kind that this cannot be measured of
        return _draw_with(draw_attention, info, model, text)


def _draw_with(drawing: Callable[..., str], info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> Picture:
    fonts = {"font.size": FONT_SIZE, "legend.fontsize": SMALLEST_FONT}
    fonts |= dict.fromkeys(("axes.titlesize", "axes.labelsize"), FONT_SIZE)
    fonts |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), SMALLEST_FONT)
    with mpl.rc_context(fonts):
        figure, (axes,) = style.subplots(1, 1, WIDTH, HEIGHT)
        return Picture(figure, drawing(axes, info, model, text))


def has_parameters(model: PreTrainedModel) -> bool:
    """Whether the scheme has something to learn; then the trained model is shown, else the scheme alone."""
    base = model.base_model
    stock_table = base.architecture.table
    keeps_table = any(scheme.uses_stock_table() for scheme in base.position_scheme)
    return keeps_table or any(
        "position_scheme" in name and stock_table not in name for name, _ in base.named_parameters()
    )


def draw_embeddings(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    trained = has_parameters(model)
    shown = model if trained else analysis.build_model(info.name, max_positions=128)
    table = analysis.position_embeddings(shown, LENGTH if trained else 128).table
    style.draw_diverging(axes, table.numpy(), "value")
    axes.set(xlabel="feature", ylabel="position")
    return f"The embedding of each position, {TRAINED}." if trained else "The embedding of each position."


def draw_decay(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    others = {"rope": {"type": "rope", "theta": 500_000.0}}
    schemes = {
        info.name: info.name,
        ("theta = 500,000" if info.name in others else "rope"): others.get(info.name, "rope"),
    }
    for number, (label, scheme) in enumerate(schemes.items()):
        similarity = rotated_similarity(analysis.build_model(scheme, num_heads=1), 512)
        axes.plot(similarity.tolist(), label=label, linewidth=1.3, **style.line_style(number))
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(xlabel="distance", ylabel="similarity")
    axes.legend()
    return "How similar a query and a key with equal features are, by their distance (head size 64)."


def rotated_similarity(model: PreTrainedModel, length: int) -> torch.Tensor:
    """The similarity of a query and a key of ones by distance, relative to unrotated vectors."""
    with inspect_model(model, length) as inspector:
        rotations = inspector.rotations(0)
        if not rotations:
            raise PosEncError(f"{inspector.name} does not rotate")
        ones = torch.ones(1, inspector.shape.num_heads, length, inspector.shape.head_size)
        query, key = (apply_rotation(ones, rotations, keys)[0, 0].double() for keys in (False, True))
    return (query[-1] * key).flip(0).mean(-1)


def draw_bias(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    trained = has_parameters(model)
    shown = model if trained else analysis.build_model(info.name, num_heads=8)
    bias = analysis.bias_by_distance(shown, 2 * LENGTH)
    _draw_heads(axes, -bias.distances, bias.values, "bias")
    if trained:
        _mark_trained_length(axes)
    origin = "" if bias.query is None else f" seen from position {bias.query}"
    return f"The bias of each head by distance{origin}" + (f", {TRAINED} (dotted line)." if trained else ".")


def draw_scores(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    scores_HN = mean_scores_by_distance(model, text, LENGTH)
    distances = torch.arange(LENGTH)
    _draw_heads(axes, distances, scores_HN, "mean score")
    return f"What it adds to the attention scores of each head, averaged over a text, {TRAINED}."


def mean_scores_by_distance(model: PreTrainedModel, text: torch.Tensor, length: int) -> torch.Tensor:
    """(H, N): what the first layer's score terms add at each distance back from the query, averaged over a text."""
    rows = text[: NUM_SCORED_ROWS * length].view(-1, length)
    slots = torch.arange(length)
    distances = slots[:, None] - slots
    visible = distances >= 0
    totals = torch.zeros(0)
    with inspect_model(model, length) as inspector:

        def add_scores(layer: int, hidden_states_NE: torch.Tensor, weights_HNN: torch.Tensor) -> None:
            nonlocal totals
            if layer == 0:
                scores_HNN = score_matrix(inspector, hidden_states_NE, visible)
                totals = scores_HNN.new_zeros(len(scores_HNN), length) if not len(totals) else totals
                totals.index_add_(1, distances[visible], scores_HNN[:, visible])

        inspector.run(rows, add_scores)
    return totals / (len(rows) * (length - slots))


def score_matrix(inspector: ModelInspector, hidden_states_NE: torch.Tensor, visible_NN: torch.Tensor) -> torch.Tensor:
    """(H, N, N): what the schemes of the first layer add to the scores of one row."""
    attention, rotations = inspector.attentions[0], inspector.rotations(0)
    query, key = (states[None] for states in attention.project_rows(hidden_states_NE))
    rotated_query, rotated_key = (
        apply_rotation(states, rotations, keys) for states, keys in ((query, False), (key, True))
    )
    scaling = attention.project(hidden_states_NE[None, :1]).scaling
    mask = visible_NN[None, None]
    content = Content(query, rotated_query, rotated_key, scaling, lambda: mask, attention.project_rows)
    layer = inspector.layer_schemes(0)
    gates = attention.token_gates(layer, hidden_states_NE[None], inspector.positions)
    terms = score_terms(layer.score, content, gates=gates)
    if not terms:
        raise PosEncError(f"{inspector.name} adds nothing to the scores")
    length = len(visible_NN)
    return sum(materialize(term, inspector.positions, content)[0].expand(-1, length, -1) for term in terms)  # type: ignore[return-value]


def draw_gates(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    """CoPE's gates in one head: sigmoids of the logits."""
    shown, gates_NN = 32, torch.zeros(0)
    with inspect_model(model, shown) as inspector:

        def keep_gates(layer: int, hidden_states_NE: torch.Tensor, weights_HNN: torch.Tensor) -> None:
            nonlocal gates_NN
            if layer == 0:
                query, key = inspector.attentions[0].project_rows(hidden_states_NE)
                scaling = inspector.attentions[0].project(hidden_states_NE[None, :1]).scaling
                gates_HNN = (query @ key.mT * scaling).sigmoid()
                gates_NN = gates_HNN[gates_HNN.flatten(1).std(-1).argmax()]

        inspector.run(text[None, :shown], keep_gates)
    hidden = torch.ones_like(gates_NN, dtype=torch.bool).triu(1)
    style.draw_heatmap(axes, gates_NN.masked_fill(hidden, torch.nan).numpy(), "gate", limits=(0.0, 1.0))
    axes.set(xlabel="key", ylabel="query")
    return (
        f"The gates of one head on {shown} words, {TRAINED}. A key's position is their sum, from the query back to it."
    )


def draw_factors(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    shown = analysis.build_model(info.name, num_heads=1, max_positions=2)
    length = 65_536
    with inspect_model(shown, length) as inspector:
        (scheme, prepared, layer_params), *_ = inspector.layer_schemes(0).content_scale
        factors_N = scheme("content_scale", prepared, layer_params).expand(1, 1, length)[0, 0]
    axes.plot(factors_N.tolist(), linewidth=1.3, **style.line_style(0))
    axes.set(xlabel="position", ylabel="factor", xticks=range(0, length + 1, length // 4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    return "The factor of each query's scores by its position, with the default options."


def draw_attention(axes: Axes, info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> str:
    """Attention of one head on equal tokens, so that only positions can tell them apart."""
    shown, weights_NN = 32, torch.zeros(0)
    with inspect_model(model, shown) as inspector:

        def keep_weights(layer: int, hidden_states_NE: torch.Tensor, weights_HNN: torch.Tensor) -> None:
            nonlocal weights_NN
            weights_NN = weights_HNN[0] if layer == 0 else weights_NN

        inspector.run(text[:1].expand(1, shown), keep_weights)
    hidden = torch.ones_like(weights_NN, dtype=torch.bool).triu(1)
    weights = weights_NN.masked_fill(hidden, torch.nan).numpy()
    style.draw_heatmap(axes, weights, "weight", limits=(0.0, 0.25), extend="max")
    axes.set(xlabel="key", ylabel="query")
    return "Attention of one head in the first layer if all tokens are equal."


SPECIAL: dict[str, Callable[[Axes, SchemeInfo, PreTrainedModel, torch.Tensor], str]] = {"cope": draw_gates}
"""Schemes that another picture explains better than that of their kind."""


def _draw_heads(axes: Axes, distances: torch.Tensor, values_HN: torch.Tensor, label: str) -> None:
    for head, values in enumerate(values_HN.tolist()):
        axes.plot(distances.tolist(), values, linewidth=1.3, label=f"{head}", **style.line_style(head))
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(xlabel="distance back from the query", ylabel=label)
    axes.legend(title="head", ncols=1 + len(values_HN) // 5, handlelength=1.4, labelspacing=0.25, columnspacing=0.8)


def _mark_trained_length(axes: Axes) -> None:
    axes.axvline(LENGTH - 1, color="0.4", linewidth=0.9, linestyle=":")
