"""The outcome of an evaluation: tables to read, JSON and CSV to process."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import LENGTH_CURVE_FILE, write_text
from ..errors import PosEncError
from .results import (
    METRICS,
    Estimate,
    OrderResult,
    PasskeyResult,
    PerplexityResult,
    Result,
    SimilarityResult,
    perplexity_estimate,
)

MAX_WIDTH = 100
"""Widest table, in characters: what most terminals show without wrapping."""
CSV_COLUMNS = ("metric", "model", "length", "breakdown", "quantity", "value", "low", "high", "stopped")
Notes = dict[tuple[str, int | str], str]
"""Footnotes about models that stopped, by model and either its maximum length or the reason."""
BREAKDOWN_FIELDS = ("start", "end", "depth", "block_size")


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """Results of all models. Print it for tables.

    Attributes:
        models: Names of the models.
        trained_length: What "1x" stands for; None if the models differ and all lengths were given in tokens.
        confidence: Confidence level of the intervals.
        num_processes: Number of processes that shared the work.
        perplexity: One result per model and length, if requested. So are `passkey`, `order` and `similarity`.
    """

    models: tuple[str, ...]
    trained_length: int | None
    confidence: float
    num_processes: int = 1
    perplexity: tuple[PerplexityResult, ...] = ()
    passkey: tuple[PasskeyResult, ...] = ()
    order: tuple[OrderResult, ...] = ()
    similarity: tuple[SimilarityResult, ...] = ()

    def relative_perplexity(self) -> dict[tuple[str, int], Estimate]:
        """Perplexity relative to the first model, by model and length.

        Models are compared on each text segment, which cancels how hard the text is: the intervals are much narrower
        than those of the two perplexities. Models that read other tokens than the first one are left out.
        """
        baselines = {result.length: result for result in self.perplexity if result.model == self.models[0]}
        ratios = {}
        for result in self.perplexity:
            base = baselines.get(result.length)
            if base is None or base is result or result.stopped or base.text_hash != result.text_hash:
                continue
            if base.segment_tokens == result.segment_tokens:
                losses, base_losses = torch.tensor([result.segment_losses, base.segment_losses], dtype=torch.float64)
                counts = torch.tensor(base.segment_tokens)
                ratio = perplexity_estimate(losses - base_losses, counts, self.confidence)
                ratios[result.model, result.length] = ratio
        return ratios

    def is_comparable(self) -> bool:
        """Whether all perplexities are over the same tokens."""
        return len({result.text_hash for result in self.perplexity if result.stopped is None}) <= 1

    def to_dict(self) -> dict[str, object]:
        """All results as JSON values."""
        ratios = [
            {"model": model, "length": length, **dataclasses.asdict(ratio)}
            for (model, length), ratio in self.relative_perplexity().items()
        ]
        return {**dataclasses.asdict(self), "comparable": self.is_comparable(), "relative_perplexity": ratios}

    def save_json(self, path: str | Path) -> None:
        """Write all results to a JSON file."""
        write_text(path, json.dumps(self.to_dict(), indent=1))

    def save_csv(self, path: str | Path) -> None:
        """Write a CSV file with one row per number."""
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        for metric in METRICS:
            for result in getattr(self, metric):
                writer.writerows(_csv_rows(metric, result))
        write_text(path, file.getvalue())

    def save_length_curve(self, directory: str | Path, model: str | None = None) -> Path:
        """Write `length_curve.json` to an existing model directory, where the model card picks it up.

        The model may be omitted if there is only one. Returns the path of the file.
        """
        if model is None and len(self.models) != 1:
            raise PosEncError(f"Choose the model of the length curve: one of {list(self.models)}")
        if not Path(directory).is_dir():
            raise PosEncError(f"Cannot write {LENGTH_CURVE_FILE}: {directory} is not a directory")
        curve = [
            {"length": result.length, "perplexity": result.perplexity.value}
            for result in self.perplexity
            if result.model == (model or self.models[0]) and result.perplexity is not None
        ]
        return write_text(Path(directory) / LENGTH_CURVE_FILE, json.dumps(curve, indent=1))

    def __str__(self) -> str:
        text = self._tables()
        if max((len(line) for line in text.splitlines() if line.startswith("|")), default=0) <= MAX_WIDTH:
            return text
        references = [result.reference for result in self.similarity if result.reference]  # none if it stopped
        labels = {name: f"model {number}" for number, name in enumerate(dict.fromkeys([*self.models, *references]), 1)}
        legend = "\n".join(f"{label}: {name}" for name, label in labels.items())
        return f"{self._with_names(labels)._tables()}\n\n{legend}"

    def _with_names(self, names: dict[str, str]) -> EvaluationReport:
        """The same report with other names of the models."""
        renamed: dict[str, Any] = {
            metric: tuple(_rename(result, names) for result in getattr(self, metric)) for metric in METRICS
        }
        return dataclasses.replace(self, models=tuple(names[model] for model in self.models), **renamed)

    def _tables(self) -> str:
        notes: Notes = {}
        paragraphs = [self._perplexity_table(notes)] if self.perplexity else []
        if not self.is_comparable():
            paragraphs.append("Perplexities are not comparable: the models tokenize the text differently.")
        tables: dict[str, Sequence[Result]] = {
            "Passkey accuracy by depth": self.passkey,
            "Loss increase when the context is shuffled (nats per token)": self.order,
            "Similarity of embeddings": self.similarity,
        }
        paragraphs += [_table(title, results, notes) for title, results in tables.items() if results]
        paragraphs += [f"[{number}] {text}" for number, text in enumerate(notes.values(), 1)]
        return "\n\n".join(paragraphs)

    def _perplexity_table(self, notes: Notes) -> str:
        """One table with the ratios next to the perplexities, or two if that is too wide."""
        lengths = sorted({result.length for result in self.perplexity})
        cells = {
            (result.model, result.length): _cell(result, result.perplexity, notes)
            for result in sorted(self.perplexity, key=attrgetter("length"))
        }
        ratios, baseline = self.relative_perplexity(), self.models[0]
        compared = [model for model in self.models if any(name == model for name, _ in ratios)]
        rows, ratio_rows = [["length", *self.models]], [["length", *compared]]
        for length in lengths:
            multiple = "" if self.trained_length is None else f" ({length / self.trained_length:.3g}x)"
            rows.append([f"{length:,}{multiple}", *(cells.get((model, length), "") for model in self.models)])
            ratio_rows.append([rows[-1][0], *(str(ratios.get((model, length), "")) for model in compared)])
        title = f"Perplexity ({self.confidence:.0%} confidence interval)"
        headed = [["", *(f"{model} / {baseline}" for model in compared)], *ratio_rows[1:]]
        together = [[*row, *ratio_row[1:]] for row, ratio_row in zip(rows, headed, strict=True)]
        if _width(together) <= MAX_WIDTH:
            return _render(title, together)
        tables = [_render_fitting(title, rows)]
        if compared:
            tables.append(_render_fitting(f"Perplexity divided by that of {baseline}", ratio_rows))
        return "\n\n".join(tables)


def _rename(result: Result, names: dict[str, str]) -> Result:
    if isinstance(result, SimilarityResult):
        return dataclasses.replace(result, model=names[result.model], reference=names.get(result.reference, ""))
    return dataclasses.replace(result, model=names[result.model])


def _csv_rows(metric: str, result: Result) -> Iterator[dict[str, object]]:
    """The numbers of a result, then those of its breakdown by position, depth or block size."""
    shared = {"metric": metric, "model": result.model, "length": result.length}
    if result.stopped:
        yield {**shared, "stopped": result.stopped.reason}
    parts = [row for value in vars(result).values() if isinstance(value, tuple) for row in value]
    for record in (result, *filter(dataclasses.is_dataclass, parts)):
        breakdown = [str(value) for name, value in vars(record).items() if name in BREAKDOWN_FIELDS]
        for quantity, value in vars(record).items():
            if isinstance(value, float) and quantity not in BREAKDOWN_FIELDS:
                value = Estimate(value)
            if isinstance(value, Estimate):
                low, high = value.confidence_interval or (None, None)
                numbers = {"value": value.value, "low": low, "high": high}
                yield {**shared, "breakdown": "-".join(breakdown), "quantity": quantity, **numbers}


def _cell(result: Result, value: object, notes: Notes) -> str:
    """The value, or where the model stopped with a reference to a footnote: one per limit, not per length."""
    if result.stopped is None:
        return str(value)
    reason, max_length = result.stopped.reason, result.stopped.max_length
    key = (result.model, max_length or reason)
    notes.setdefault(key, f"{result.model}: {reason}")
    text = "not measured" if max_length is None else f"stops at {max_length:,}"
    return f"{text} [{list(notes).index(key) + 1}]"


def _columns(result: Result) -> dict[str, str]:
    """The table cells of a result, by column."""
    if isinstance(result, PasskeyResult):
        num_trials = sum(cell.num_trials for cell in result.depths)
        preference = sum(cell.preference.value * cell.num_trials for cell in result.depths) / num_trials
        rank = math.exp(sum(math.log(cell.rank) * cell.num_trials for cell in result.depths) / num_trials)
        accuracies = {f"depth {cell.depth:.0%}": f"{cell.accuracy.value:.0%}" for cell in result.depths}
        return {**accuracies, "preference": f"{preference:.0%}", "rank": f"{rank:.1f}"}
    if isinstance(result, OrderResult):
        names = [f"blocks of {cell.block_size}" if cell.block_size else "window" for cell in result.shuffles]
        return {name: str(cell.loss_increase) for name, cell in zip(names, result.shuffles, strict=True)}
    assert isinstance(result, SimilarityResult)
    correlation = "" if result.correlation is None else f"{result.correlation:.3f}"
    return {"reference": result.reference, "cosine": str(result.cosine), "correlation": correlation}


def _table(title: str, results: Sequence[Result], notes: Notes) -> str:
    """One row per model and length; a model that stopped says so in the first column that it has no value for."""
    columns = [_columns(result) if result.stopped is None else {} for result in results]
    names = list(dict.fromkeys(name for row in columns for name in row)) or [""]
    rows = [["model", "length", *names]]
    for result, row in zip(results, columns, strict=True):
        values = [row.get(name, "") for name in names]
        rows.append([result.model, f"{result.length:,}", _cell(result, values[0], notes), *values[1:]])
    return _render_fitting(title, rows, num_labels=2)


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _width(rows: Sequence[Sequence[str]]) -> int:
    """The width of a table in characters."""
    return sum(width + 3 for width in _column_widths(rows)) + 1


def _render_fitting(title: str, rows: Sequence[Sequence[str]], num_labels: int = 1) -> str:
    """A table of at most `MAX_WIDTH` characters: transposed if that is enough, else in parts with the same labels."""
    if _width(rows) <= MAX_WIDTH:
        return _render(title, rows)
    transposed = [list(column) for column in zip(*rows, strict=True)]
    if num_labels == 1 and _width(transposed) <= MAX_WIDTH:
        return _render(title, [["model", *transposed[0][1:]], *transposed[1:]])
    parts: list[list[int]] = [[]]
    for column in range(num_labels, len(rows[0])):
        chosen = [*range(num_labels), *parts[-1], column]
        if parts[-1] and _width([[row[index] for index in chosen] for row in rows]) > MAX_WIDTH:
            parts.append([])
        parts[-1].append(column)
    selections = [[*range(num_labels), *columns] for columns in parts]
    titles = [title, *(f"{title}, continued" for _ in parts[1:])]
    tables = [[[row[index] for index in selection] for row in rows] for selection in selections]
    return "\n\n".join(_render(heading, table) for heading, table in zip(titles, tables, strict=True))


def _render(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned to be read as plain text too."""
    widths = _column_widths(rows)
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    head, *body = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([title, "", head, f"|{rule}|", *body])
