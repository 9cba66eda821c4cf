"""One page that holds everything: no script runs in it, and nothing is fetched."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path
from string import Template

from hf_posenc.analysis import AttentionByDistance, PositionEmbeddings
from hf_posenc.evaluation import EvaluationReport

from . import figures
from .measure import (
    ALLOWED,
    FAR,
    HELD,
    Sample,
    broken_promises,
    end_of,
    growth,
    perplexity_at,
)
from .recovery import LONGER, Look
from .stock import TRAINED_LENGTH

FORM = Path(__file__).with_name("page.html")


@dataclasses.dataclass(frozen=True)
class Story:
    """All that is told."""

    evaluation: EvaluationReport
    original: float
    """Perplexity of the stock model on the text that is watched while the others recover."""
    curves: dict[str, list[Look]]
    attended: list[AttentionByDistance]
    table: PositionEmbeddings
    samples: list[Sample]
    parameters: int
    longer_from: int
    """Tokens into the recovery after which rows are longer."""
    trained_tokens: int
    seconds: float
    directory: Path


def findings(evaluation: EvaluationReport) -> list[str]:
    """A line for each model."""
    lines = []
    for model in evaluation.models:
        found = perplexity_at(evaluation, model, TRAINED_LENGTH)
        grown, end = growth(evaluation, model), end_of(evaluation, model)
        told = f"{model}: perplexity {found:.2f}" if found is not None else f"{model}: not measured"
        if end is not None:
            told += f" at {TRAINED_LENGTH} tokens; it ends there: {end}"
        elif grown is not None:
            told += f", at four times the length {grown:+.1%}"
        lines.append(told)
    return lines


def written(story: Story) -> str:
    evaluation = story.evaluation
    broken = broken_promises(evaluation)
    tokens = max(look.tokens for looks in story.curves.values() for look in looks)
    return Template(FORM.read_text(encoding="utf-8")).substitute(
        verdict="".join(f"<li>{escape(line)}</li>" for line in findings(evaluation)),
        promise=_promise(broken),
        state="broken" if broken else "kept",
        lengths_head="".join(f"<th>{length // TRAINED_LENGTH}&times;</th>" for length in _lengths(evaluation)),
        lengths_rows="".join(_length_row(evaluation, model) for model in evaluation.models),
        recovery_rows="".join(_recovery_row(scheme, looks, story.original) for scheme, looks in story.curves.items()),
        lengths_figure=figures.lengths(evaluation),
        places_figure=figures.places(evaluation),
        recovery_figure=figures.recoveries(story.curves, story.original, story.longer_from),
        table_figure=figures.table(story.table),
        attention_figure=figures.attention(story.attended),
        samples="".join(map(_sample, story.samples)),
        parameters=f"{story.parameters:,}",
        trained=f"{story.trained_tokens:,}",
        recovered=f"{tokens:,}",
        share=f"{tokens / story.trained_tokens:.0%}",
        original=f"{story.original:.2f}",
        length=str(TRAINED_LENGTH),
        longer=str(LONGER),
        longest=f"{max(_lengths(evaluation)):,}",
        directory=escape(str(story.directory)),
        minutes=f"{story.seconds / 60:.1f}",
    )


def _lengths(evaluation: EvaluationReport) -> list[int]:
    return sorted({one.length for one in evaluation.perplexity})


def _promise(broken: list[str]) -> str:
    if broken:
        return "Not as promised: " + escape("; ".join(broken)) + "."
    return (
        f"The stock model ends at {TRAINED_LENGTH} tokens. At {FAR}, the perplexity of {' and '.join(HELD)} is not "
        f"more than {ALLOWED:.0%} above that at {TRAINED_LENGTH}."
    )


def _length_row(evaluation: EvaluationReport, model: str) -> str:
    cells, lengths = "", _lengths(evaluation)
    for place, length in enumerate(lengths):
        found = perplexity_at(evaluation, model, length)
        if found is None:
            cells += f'<td class="end" colspan="{len(lengths) - place}">ends at {lengths[place - 1]} tokens</td>'
            break
        cells += f"<td>{found:.2f}</td>"
    grown = growth(evaluation, model)
    return f"<tr><th>{escape(model)}</th>{cells}<td>{'' if grown is None else f'{grown:+.1%}'}</td></tr>"


def _recovery_row(scheme: str, looks: list[Look], original: float) -> str:
    cells = "".join(f"<td>{look.perplexity:.2f}</td>" for look in (looks[0], looks[-1]))
    return f"<tr><th>{escape(scheme)}</th>{cells}<td>{looks[-1].perplexity / original - 1:+.1%}</td></tr>"


def _sample(sample: Sample) -> str:
    end = f'<p class="end">{escape(sample.end)}</p>' if sample.end else ""
    return (
        f"<article><h3>{escape(sample.model)}</h3><pre><b>{escape(sample.prompt)}</b>{escape(sample.within)}"
        f"<mark>{escape(sample.beyond)}</mark></pre>{end}</article>"
    )
