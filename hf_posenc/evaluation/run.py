"""`hf_posenc.evaluate`: from models and a text to a report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..checkpoints import check_writable, load_tokenizer, lock_output, write_text
from ..errors import PosEncError
from .data import TextData, load_token_ids, text_hash
from .metrics import evaluate_order, evaluate_passkey, evaluate_perplexity, evaluate_similarity
from .models import EvaluatedModel, Models, ModelSource, list_candidates
from .report import EvaluationReport
from .results import METRICS, EvaluationStopped, Result, Stopped, from_json
from .settings import DEFAULT_LENGTHS, EvaluationSettings, ProcessGroup, resolve_lengths

METRIC_FUNCTIONS: dict[str, Callable[..., Result]] = {
    "perplexity": evaluate_perplexity,
    "passkey": evaluate_passkey,
    "order": evaluate_order,
    "similarity": evaluate_similarity,
}


def evaluate(
    models: Models,
    data: TextData,
    *,
    lengths: Sequence[int | str] = DEFAULT_LENGTHS,
    metrics: Sequence[str] = ("perplexity",),
    trained_length: int | None = None,
    reference: ModelSource | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    results_path: str | Path | None = None,
    restart: bool = False,
    device: str | None = None,
    split: str = "test",
    text_column: str | None = None,
    revision: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> EvaluationReport:
    """Evaluate one or more models on a text at several lengths.

    A model that cannot process a length gets a result that says why, and the evaluation continues. Works under
    `accelerate launch`, which splits the work across devices.

    Args:
        models: Checkpoint directories, Hub ids or live models: one, a list, or a mapping from names.
        data: A file, directory, pattern or Hub dataset, a list of texts, or token ids.
        lengths: Window lengths in tokens (512) or multiples of the trained length ("2x").
        metrics: Any of "perplexity", "passkey", "order" and "similarity".
        trained_length: What "1x" stands for; by default the number of positions that the models share.
        reference: Model to compare embeddings with for "similarity"; by default the first model.
        tokenizer: Tokenizer for all models; by default the one saved with each model.
        results_path: JSON file that results are saved to as they arrive. Run the same evaluation again to resume.
        restart: Discard what is in `results_path`.
        device: Device to evaluate on, such as "cuda:1". Live models stay where they are.
        split: Split of a dataset.
        text_column: Column that contains the text, if it is not "text".
        revision: Branch, tag or commit of Hub ids.
        progress: Show progress bars.
        **settings: Fields of `hf_posenc.evaluation.EvaluationSettings`.

    Returns:
        The report. Print it for tables.

    Raises:
        PosEncError: If an argument is not valid, a model cannot be loaded, or `results_path` has other results.

    Example:
        >>> report = hf_posenc.evaluate(["./gpt2", "./gpt2-rope"], "test.txt", lengths=["1x", "2x", "4x"])
        >>> print(report)
    """
    unknown = [metric for metric in metrics if metric not in METRICS]
    if unknown or not metrics:
        raise PosEncError(f"Unknown metrics {unknown}; expected some of {list(METRICS)}")
    selected = [metric for metric in METRICS if metric in metrics]
    options = EvaluationSettings(**settings)
    group = ProcessGroup.initialize(device, progress)
    candidates = list_candidates(models, options.task, revision)
    configs = {candidate.name: candidate.config for candidate in candidates}
    num_tokens, base_length = resolve_lengths(lengths, configs, trained_length)
    if isinstance(tokenizer, (str, Path)):
        source, tokenizer = tokenizer, load_tokenizer(tokenizer)
        if tokenizer is None:
            raise PosEncError(f"{source} has no tokenizer files; pass another tokenizer, or leave it out")
    read_tokens = partial(load_token_ids, data, max_tokens=options.max_tokens, split=split, text_column=text_column)
    results: dict[str, list[Result]] = {metric: [] for metric in selected}
    with contextlib.ExitStack() as stack:
        store = ResultStore(None if results_path is None else Path(results_path), group, stack, restart)
        functions, identity = dict(METRIC_FUNCTIONS), {metric: options.for_metric(metric) for metric in selected}
        if "similarity" in selected:
            choices = candidates
            if reference is not None:
                choices = list_candidates({"reference": reference}, options.task, revision)
            reference_model = stack.enter_context(choices[0].load(tokenizer, read_tokens, options, group))
            functions["similarity"] = partial(evaluate_similarity, reference=reference_model)
            identity["similarity"]["reference"] = reference_model.fingerprint()
        for metric in selected:
            store.check("settings", metric, identity[metric])
        for candidate in candidates:
            with candidate.load(tokenizer, read_tokens, options, group) as model:
                store.check("models", model.name, {"weights": model.fingerprint(), "text": text_hash(model.token_ids)})
                for metric in selected:
                    for length in num_tokens:
                        results[metric].append(_evaluate_or_resume(metric, model, length, functions[metric], store))
    by_metric: dict[str, Any] = {metric: tuple(values) for metric, values in results.items()}
    return EvaluationReport(tuple(configs), base_length, options.confidence, group.world_size, **by_metric)


def _evaluate_or_resume(
    metric: str, model: EvaluatedModel, length: int, compute: Callable[..., Result], store: ResultStore
) -> Result:
    result = store.get(metric, model.name, length)
    if result is not None:
        return result
    permanent = True
    try:
        if metric != "similarity" and model.task == "feature-extraction":
            raise EvaluationStopped(
                "The model has no language modelling head: set --task (task=) to causal-lm or masked-lm"
            )
        result = compute(model, length)
    except EvaluationStopped as error:
        permanent = error.permanent
        max_length = model.max_length(length) if error.refused else None
        result = METRICS[metric](model.name, length, Stopped(error.reason, max_length))
    if permanent:
        store.add(metric, result)
    return result


class ResultStore:
    """Results in a JSON file that is rewritten after each of them. Only the main process writes.

    The file is locked until `stack` is closed.
    """

    def __init__(self, path: Path | None, group: ProcessGroup, stack: contextlib.ExitStack, restart: bool) -> None:
        if path is not None and path.is_dir():
            raise PosEncError(f"{path} is a directory: name a file for the results, such as {path / 'eval.json'}")
        self.path = path
        self.is_writer = path is not None and group.rank == 0
        self.contents: dict[str, dict] = {"settings": {}, "models": {}, "results": {}}
        data = None
        if path is not None and self.is_writer:
            check_writable(path)
            if not path.exists() or path.is_file():  # a device has no directory to lock it in
                stack.enter_context(lock_output(path))
            data = path.read_bytes() if path.is_file() and not restart else None
        data = group.broadcast(data)
        if data is None:
            return
        try:
            contents = json.loads(data)
            self.contents = {section: dict(contents[section]) for section in self.contents}
            for metric, records in self.contents["results"].items():
                for record in records:
                    from_json(METRICS[metric], {**record})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise PosEncError(f"{path} exists but does not contain evaluation results: use another file") from None

    def check(self, section: str, name: str, expected: Mapping[str, object]) -> None:
        """Refuse to mix results of different settings, models or texts."""
        saved = self.contents[section].setdefault(name, expected)
        changes = [
            f"{key} was {saved.get(key)!r} and is now {expected.get(key)!r}"
            for key in sorted({*saved, *expected})
            if saved.get(key) != expected.get(key)
        ]
        if changes:
            raise PosEncError(
                f"{self.path} has different results for {name!r}: {'; '.join(changes)}. Repeat the same evaluation to "
                "resume it, use another file, or discard the results with --restart (restart=True)"
            )

    def get(self, metric: str, model: str, length: int) -> Result | None:
        for record in self.contents["results"].get(metric, []):
            if (record["model"], record["length"]) == (model, length):
                return from_json(METRICS[metric], record)
        return None

    def add(self, metric: str, result: Result) -> None:
        self.contents["results"].setdefault(metric, []).append(json.loads(json.dumps(dataclasses.asdict(result))))
        if self.path is None or not self.is_writer:
            return
        write_text(self.path, json.dumps(self.contents, indent=1))
