"""Measure models side by side: the way from names and a text to an Evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import lengths as length_words
from .crew import Crew
from .halt import Halt
from .order import measure_order
from .passkey import measure_passkey
from .perplexity import measure_length
from .report import Evaluation
from .results import MEASURES, Result, Stop
from .scoring import longest_that_works
from .settings import Settings
from .similarity import measure_similarity
from .store import Store
from .subject import Candidate, Subject, candidates_of, fingerprint, loaded, refuse_foreign_tokens, tokenizer_for
from .text import Data, digest, stream_of
from .windows import Frame

HEADLESS = "it has no head that predicts tokens: load it for causal or masked language modelling (--task)"


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a model comes to its text."""

    data: Data
    tokenizer: Any
    split: str
    column: str | None
    revision: str | None


def evaluate(
    models: Any,
    data: Data,
    *,
    lengths: Sequence[int | str] = length_words.DEFAULT,
    measures: Sequence[str] = ("perplexity",),
    trained_length: int | None = None,
    original: Any = None,
    tokenizer: Any = None,
    results: str | Path | None = None,
    restart: bool = False,
    device: str | None = None,
    split: str = "test",
    text_column: str | None = None,
    revision: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Measure one or several models on a text, at lengths in tokens (512) or in trained lengths ("2x").

    `models`: directories, Hub ids or live models; one, a list, or a mapping of names to them. `data`: a file or
    dataset as for training, a list of texts, or token ids. `measures`: perplexity, passkey, order, similarity (to
    `original`, or to the first model). `results`: a JSON file that is written as results come in; asked for the same
    again, what it has is not measured again. The rest are the fields of `hf_posenc.evaluation.settings.Settings`.

    A model that cannot go on has a record that says where it ends and why.
    """
    how = _settings(settings)
    asked = _measures(measures)
    crew = Crew.gathered(device, progress)
    candidates = candidates_of(models, how.task, revision)
    known = {candidate.name: candidate.config for candidate in candidates}
    needed = any(map(length_words.relative, lengths))
    trained = length_words.trained_length(known, trained_length, needed)
    tokens = length_words.in_tokens(lengths, trained)
    reading = Reading(data, tokenizer, split, text_column, revision)
    store = Store(Path(results) if results is not None else None, crew, restart)
    first = candidates[0] if original is None else candidates_of({"original": original}, how.task, revision)[0]
    found: dict[str, list[Any]] = {measure: [] for measure in asked}
    with contextlib.ExitStack() as held:
        compared = held.enter_context(_ready(first, reading, how, crew)) if "similarity" in asked else None
        for measure in asked:
            against = {"original": fingerprint(compared.model)} if compared and measure == "similarity" else {}
            store.expect(measure, how, **against)
        for candidate in candidates:
            with _ready(candidate, reading, how, crew) as subject:
                store.admit(subject.name, weights=fingerprint(subject.model), text=digest(subject.stream))
                for measure in asked:
                    found[measure] += _measured(measure, subject, compared, tokens, how, crew, store)
    done = {measure: tuple(records) for measure, records in found.items()}
    return Evaluation(tuple(known), trained, how.confidence, crew.size, **done)


def _settings(given: dict[str, Any]) -> Settings:
    names = [field.name for field in dataclasses.fields(Settings)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"there is no setting {unknown}; there are {names}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return Settings(**values)


def _measures(wanted: Sequence[str]) -> list[str]:
    unknown = [measure for measure in wanted if measure not in MEASURES]
    if unknown or not wanted:
        raise ValueError(f"there is no measure {unknown}; there are {list(MEASURES)}")
    return [measure for measure in MEASURES if measure in wanted]


@contextlib.contextmanager
def _ready(candidate: Candidate, reading: Reading, how: Settings, crew: Crew) -> Iterator[Subject]:
    """The model in memory, and the text in its tokens."""
    words = tokenizer_for(candidate, reading.tokenizer, reading.revision)
    stream = stream_of(reading.data, words, how.max_tokens, reading.split, reading.column)
    with loaded(candidate, how.dtype, crew.device, reading.revision) as model:
        device: torch.device = next(model.parameters()).device
        frame = Frame.of(words, candidate.causal)
        subject = Subject(candidate.name, model, words, candidate.objective, stream, frame, device)
        refuse_foreign_tokens(subject)
        yield subject


def _measured(
    measure: str,
    subject: Subject,
    original: Subject | None,
    lengths: tuple[int, ...],
    how: Settings,
    crew: Crew,
    store: Store,
) -> list[Result]:
    """One measure at all lengths, shortest first: what is in the store, and what is measured now."""
    results: list[Result] = []
    for length in lengths:
        result = store.find(measure, subject.name, length)
        if result is None:
            result, lasting = _one(measure, subject, original, length, how, crew)
            if lasting:
                store.add(measure, result)
        results.append(result)
    return results


def _one(
    measure: str, subject: Subject, original: Subject | None, length: int, how: Settings, crew: Crew
) -> tuple[Result, bool]:
    """A record, and whether it would come out the same another time."""
    try:
        if measure != "similarity" and not subject.objective.predicts_tokens:
            raise Halt(HEADLESS)
        if measure == "similarity" and original is not None:
            return measure_similarity(subject, original, length, how, crew), True
        measured: dict[str, Callable[..., Result]] = {
            "perplexity": measure_length,
            "passkey": measure_passkey,
            "order": measure_order,
        }
        return measured[measure](subject, length, how, crew), True
    except Halt as halt:
        reaches = longest_that_works(subject.model, length) if halt.refused else None
        return MEASURES[measure](subject.name, length, Stop(halt.reason, reaches)), halt.lasting
