"""Render the report: a single HTML page without scripts or external resources."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path
from string import Template

from hf_posenc.analysis import AttentionByDistance, PositionEmbeddings
from hf_posenc.evaluation import EvaluationReport

from . import figures
from .evaluate import (
    EXTRAPOLATING_SCHEMES,
    FAR,
    MAX_INCREASE,
    Sample,
    failed_expectations,
    increase,
    perplexity_at,
    stop_reason,
)
from .finetune import LONG_LENGTH, CurvePoint
from .pretrain import TRAINED_LENGTH

TEMPLATE = Path(__file__).with_name("report.html")


@dataclasses.dataclass(frozen=True)
class DemoResults:
    """Everything that the report shows.

    Attributes:
        stock_perplexity: Validation perplexity of the stock model.
        curves: Validation curves of fine-tuning, by scheme.
        long_rows_from: Tokens of fine-tuning after which rows are longer.
    """

    evaluation: EvaluationReport
    stock_perplexity: float
    curves: dict[str, list[CurvePoint]]
    attention: list[AttentionByDistance]
    position_table: PositionEmbeddings
    samples: list[Sample]
    num_parameters: int
    long_rows_from: int
    pretraining_tokens: int
    seconds: float
    directory: Path


def summary_lines(evaluation: EvaluationReport) -> list[str]:
    """One line per model."""
    lines = []
    for model in evaluation.models:
        perplexity = perplexity_at(evaluation, model, TRAINED_LENGTH)
        change, reason = increase(evaluation, model), stop_reason(evaluation, model)
        line = f"{model}: perplexity {perplexity:.2f}" if perplexity is not None else f"{model}: not measured"
        if reason is not None:
            line += f" at {TRAINED_LENGTH} tokens, then it stops: {reason}"
        elif change is not None:
            line += f", {change:+.1%} at four times the length"
        lines.append(line)
    return lines


def render(results: DemoResults) -> str:
    evaluation, stock_perplexity = results.evaluation, results.stock_perplexity
    failures = failed_expectations(evaluation)
    tokens = max(point.tokens for points in results.curves.values() for point in points)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        summary="".join(f"<li>{escape(line)}</li>" for line in summary_lines(evaluation)),
        headline=_headline(failures),
        state="failed" if failures else "passed",
        lengths_head="".join(f"<th>{length // TRAINED_LENGTH}&times;</th>" for length in _lengths(evaluation)),
        lengths_rows="".join(_length_row(evaluation, model) for model in evaluation.models),
        recovery_rows="".join(_recovery_row(*item, stock_perplexity) for item in results.curves.items()),
        lengths_figure=figures.perplexity_by_length(evaluation),
        positions_figure=figures.perplexity_by_position(evaluation),
        recovery_figure=figures.validation_curves(results.curves, stock_perplexity, results.long_rows_from),
        table_figure=figures.position_table(results.position_table),
        attention_figure=figures.attention_by_distance(results.attention),
        samples="".join(map(_sample_card, results.samples)),
        parameters=f"{results.num_parameters:,}",
        trained=f"{results.pretraining_tokens:,}",
        recovered=f"{tokens:,}",
        share=f"{tokens / results.pretraining_tokens:.0%}",
        original=f"{stock_perplexity:.2f}",
        length=str(TRAINED_LENGTH),
        longer=str(LONG_LENGTH),
        longest=f"{max(_lengths(evaluation)):,}",
        directory=escape(str(results.directory)),
        minutes=f"{results.seconds / 60:.1f}",
    )


def _lengths(evaluation: EvaluationReport) -> list[int]:
    return sorted({result.length for result in evaluation.perplexity})


def _headline(failures: list[str]) -> str:
    if failures:
        return "Not as expected: " + escape("; ".join(failures)) + "."
    return (
        f"The stock model stops at {TRAINED_LENGTH} tokens. At {FAR} tokens, the perplexity of "
        f"{' and '.join(EXTRAPOLATING_SCHEMES)} is at most {MAX_INCREASE:.0%} higher than at {TRAINED_LENGTH}."
    )


def _length_row(evaluation: EvaluationReport, model: str) -> str:
    cells, lengths = "", _lengths(evaluation)
    for index, length in enumerate(lengths):
        perplexity = perplexity_at(evaluation, model, length)
        if perplexity is None:
            cells += f'<td class="end" colspan="{len(lengths) - index}">stops at {lengths[index - 1]} tokens</td>'
            break
        cells += f"<td>{perplexity:.2f}</td>"
    change = increase(evaluation, model)
    return f"<tr><th>{escape(model)}</th>{cells}<td>{'' if change is None else f'{change:+.1%}'}</td></tr>"


def _recovery_row(scheme: str, points: list[CurvePoint], stock_perplexity: float) -> str:
    cells = "".join(f"<td>{point.perplexity:.2f}</td>" for point in (points[0], points[-1]))
    return f"<tr><th>{escape(scheme)}</th>{cells}<td>{points[-1].perplexity / stock_perplexity - 1:+.1%}</td></tr>"


def _sample_card(sample: Sample) -> str:
    error = f'<p class="end">{escape(sample.error)}</p>' if sample.error else ""
    return (
        f"<article><h3>{escape(sample.model)}</h3><pre><b>{escape(sample.prompt)}</b>{escape(sample.within)}"
        f"<mark>{escape(sample.beyond)}</mark></pre>{error}</article>"
    )
