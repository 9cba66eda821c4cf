"""An evaluation in whole: what was found, as JSON, as CSV, and as tables to read."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.file_names import LENGTH_CURVE_FILE
from .estimates import Estimate, mean, perplexity
from .results import LengthResult, OrderResult, PasskeyResult, Result, SimilarityResult
from .tables import Notes, length_table, order_table, passkey_table, similarity_table

COLUMNS = ("measure", "model", "length", "part", "value", "low", "high", "count", "stopped")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of all models, measure by measure. `print` it for tables."""

    models: tuple[str, ...]
    trained_length: int | None
    """What 1x is; None where all lengths were given in tokens and the models were not trained at one."""
    confidence: float
    processes: int = 1
    perplexity: tuple[LengthResult, ...] = ()
    passkey: tuple[PasskeyResult, ...] = ()
    order: tuple[OrderResult, ...] = ()
    similarity: tuple[SimilarityResult, ...] = ()

    def against_first(self) -> dict[tuple[str, int], Estimate]:
        """Perplexity by that of the first model, by model and length, on the same pieces of text.

        Piece by piece, what makes one text harder than another falls out: the interval is far narrower than those of
        the two models. Empty where models have other tokens.
        """
        firsts = {one.length: one for one in self.perplexity if one.model == self.models[0]}
        found = {}
        for one in self.perplexity:
            first = firsts.get(one.length)
            if first is None or first is one or (first.text, first.counts) != (one.text, one.counts) or one.stop:
                continue
            gap = torch.tensor(one.losses, dtype=torch.float64) - torch.tensor(first.losses, dtype=torch.float64)
            found[one.model, one.length] = perplexity(mean(gap, torch.tensor(one.counts), self.confidence))
        return found

    def comparable(self) -> bool:
        """Whether all perplexities are over the same tokens."""
        return len({one.text for one in self.perplexity if one.stop is None}) <= 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = [
            {"model": model, "length": length, **dataclasses.asdict(ratio)}
            for (model, length), ratio in self.against_first().items()
        ]
        return {**dataclasses.asdict(self), "comparable": self.comparable(), "against_first": ratios}

    def curve(self, model: str) -> list[dict[str, Any]]:
        """Perplexity by length of one model, without the lengths that it does not reach."""
        return [
            {"length": one.length, "perplexity": one.perplexity.value}
            for one in self.perplexity
            if one.model == model and one.perplexity is not None
        ]

    def write_json(self, path: str | Path) -> None:
        place_for(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    def write_csv(self, path: str | Path) -> None:
        """One row a number, as data frames like it."""
        with place_for(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())

    def write_curve(self, directory: str | Path, model: str | None = None) -> Path:
        """`length_curve.json` into a model's directory."""
        if model is None and len(self.models) != 1:
            raise ValueError(f"the curve of which model? Name one of {list(self.models)}")
        if not Path(directory).is_dir():
            raise ValueError(f"{directory} is no directory to write {LENGTH_CURVE_FILE} into")
        path = place_for(Path(directory) / LENGTH_CURVE_FILE)
        path.write_text(json.dumps(self.curve(model or self.models[0]), indent=1), encoding="utf-8")
        return path

    def rows(self) -> Iterator[dict[str, Any]]:
        results: tuple[Result, ...] = (*self.perplexity, *self.passkey, *self.order, *self.similarity)
        for one in results:
            for measure, part, estimate, count in _numbers(one):
                values = dataclasses.asdict(estimate) if estimate is not None else {}
                stopped = one.stop.reason if one.stop else None
                named = {"measure": measure, "model": one.model, "length": one.length, "part": part}
                yield {**named, **values, "count": count, "stopped": stopped}

    def __str__(self) -> str:
        notes: Notes = {}
        parts = []
        if self.perplexity:
            parts.append(length_table(self.perplexity, self.models, self.trained_length, self.against_first(), notes))
            if not self.comparable():
                parts.append("The models read the text in other tokens: their perplexities are not comparable.")
        if self.passkey:
            parts.append(passkey_table(self.passkey, notes))
        if self.order:
            parts.append(order_table(self.order, notes))
        if self.similarity:
            parts.append(similarity_table(self.similarity, notes))
        parts.extend(f"[{number}] {text}" for number, text in enumerate(notes.values(), 1))
        return "\n\n".join(parts)


def place_for(path: str | Path) -> Path:
    """The path of a file to write, with its directory made. Called early, it spares a measurement that ends in vain."""
    path = Path(path)
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    return path


def _numbers(one: Result) -> Iterator[tuple[str, Any, Estimate | None, int | None]]:
    """Each number of a record: what it is, of which part, and over how much."""
    if isinstance(one, LengthResult):
        yield "perplexity", None, one.perplexity, one.tokens
        for place in one.positions:
            yield "perplexity_by_position", f"{place.start}-{place.end}", place.perplexity, place.tokens
    elif isinstance(one, PasskeyResult):
        if one.stop:
            yield "passkey_accuracy", None, None, None
        for cell in one.depths:
            yield "passkey_accuracy", cell.depth, cell.accuracy, cell.trials
            yield "passkey_preference", cell.depth, cell.preference, cell.trials
            yield "passkey_rank", cell.depth, Estimate(cell.rank), cell.trials
            yield "passkey_log_probability", cell.depth, Estimate(cell.log_probability), cell.trials
    elif isinstance(one, OrderResult):
        if one.stop:
            yield "loss_increase_when_shuffled", None, None, None
        for shuffle in one.shuffles:
            yield "loss_increase_when_shuffled", shuffle.block or "whole", shuffle.increase, shuffle.tokens
    else:
        yield "similarity_to_original", None, one.cosine, one.windows
        if one.agreement is not None:
            yield "agreement_with_original", None, Estimate(one.agreement), one.windows
