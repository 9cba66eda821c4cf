"""How good a model is before, during and after a run, on the same held-out text: the table that a run ends with."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer

from ..checkpoints import RECOVERY_FILE, write_text
from ..text_data import ATTENTION_MASK
from .distillation import pooled_cosine
from .objectives import AUTO_CLASSES, Objective, compute_accuracy
from .progress import label_progress_bars
from .sharding import is_sharded
from .trainer import RecoveryTrainer, with_perplexity

if TYPE_CHECKING:
    from .factories import RunBuilder

METRICS = {
    "eval_perplexity": "perplexity",
    "eval_accuracy": "accuracy",
    "eval_cosine": "cosine similarity",
    "eval_loss": "loss",
}
"""The metrics that are kept of an evaluation, with their names. The table shows the first that was measured."""
SELF_PERPLEXITY = "self_generated_perplexity"
"""On text that the original has sampled. It flatters: such text has only what the original expects, so trained models
usually come closer on it than on real text."""
STAGES = {"original": "original", "swapped": "swapped", "started": "after the warm start", "trained": "after training"}


class RecoveryReport:
    """Measures a model at the stages of a run, and writes recovery.json.

    Args:
        builder: The components of the run.
        measured: Measurements from before the run was interrupted.
    """

    def __init__(self, builder: RunBuilder, measured: dict[str, dict[str, float]]) -> None:
        self.builder, self.stages = builder, dict(measured)
        self.rows, self.self_rows = builder.build_eval_rows(), builder.build_self_eval_rows()
        self._has_head = builder.objective is not Objective.FEATURE_EXTRACTION

    def measure(self, stage: str, model: PreTrainedModel) -> None:
        """Evaluate a model; do nothing without evaluation data, and in a run whose models are sharded."""
        if (self.rows is None and self.self_rows is None) or is_sharded(self.builder.arguments):
            return
        arguments = copy.copy(self.builder.arguments)
        arguments.report_to = []
        trainer = Trainer(
            model=model,
            args=arguments,
            eval_dataset=self.rows,
            processing_class=self.builder.tokenizer,
            data_collator=self.builder.data_collator,
            compute_metrics=compute_accuracy if self.builder.labels is not None else None,
        )
        label_progress_bars(trainer)
        self.stages[stage] = self._evaluate(trainer) if self._has_head else self._compare_embeddings(trainer)

    def measure_trained(self, trainer: RecoveryTrainer) -> None:
        """Evaluate the trained model, and the original if it can be compared."""
        if self.rows is None and self.self_rows is None:
            return
        self.stages["trained"] = self._evaluate(trainer)
        if not self._has_head:
            self.stages["trained"] |= self._compare_embeddings(trainer)
        original = self.builder.load_original() if self._has_head else None
        if original is not None:
            self.measure("original", original)

    def _evaluate(self, trainer: Trainer) -> dict[str, float]:
        """The metrics that are kept, on the evaluation data and on text sampled from the original."""
        arguments, values = trainer.args, {}
        with torch.random.fork_rng(devices=[]):  # the same tokens are masked every time
            torch.manual_seed(arguments.seed + arguments.process_index)
            if self.rows is not None:
                metrics = with_perplexity(trainer.evaluate(), self.builder.objective.predicts_tokens)
                values = {name: metrics[name] for name in METRICS if name in metrics}
            if self.self_rows is not None:
                loss = trainer.evaluate(self.self_rows, metric_key_prefix="self_eval")["self_eval_loss"]
                values[SELF_PERPLEXITY] = math.exp(min(loss, 700.0))
        return values

    @torch.no_grad()
    def _compare_embeddings(self, trainer: Trainer) -> dict[str, float]:
        """Cosine similarity between mean hidden states and the teacher's, for models without a head."""
        teacher = self.builder.teacher
        if teacher is None:
            return {}
        if not is_sharded(trainer.args):
            teacher.model.to(trainer.args.device)
        model = trainer.accelerator.unwrap_model(trainer.model).eval()
        similarities = []
        for inputs in trainer.get_eval_dataloader():
            states_BNE, target_BNE = model(**inputs).last_hidden_state, teacher.last_hidden_state(inputs)
            similarity_B = pooled_cosine(states_BNE, target_BNE, inputs[ATTENTION_MASK])
            similarities.append(trainer.accelerator.gather_for_metrics(similarity_B))
        return {"eval_cosine": torch.cat(similarities).mean().item()}

    def write(self, directory: Path, **values: Any) -> None:
        """Write recovery.json: the metrics of the trained model, those of the other stages, and further values."""
        others = {stage: metrics for stage, metrics in self.stages.items() if stage != "trained" and metrics}
        recovery = {**self.stages.get("trained", {}), **others, **values}
        write_text(directory / RECOVERY_FILE, json.dumps(recovery, indent=1))


def format_recovery(recovery: Mapping[str, Any], directory: Path, objective: Objective) -> str:
    """The end of a run as text: a table of stages, tokens and time from recovery.json, and how to load the model."""
    lines = _format_stages(recovery)
    if recovery.get("tokens_seen") is not None:
        unique = f"{recovery['tokens_unique']:,}" if recovery.get("tokens_unique") is not None else "unknown"
        lines.append(
            f"Tokens: {unique} unique, {recovery['tokens_seen']:,} seen. Time: {recovery['train_seconds']:.0f} s."
        )
    auto_class = AUTO_CLASSES[objective]
    lines.append(f"Saved the variant to {directory}. Load it with:")
    lines += ["  import hf_posenc", f"  from transformers import {auto_class}"]
    lines.append(f"  model = {auto_class}.from_pretrained({str(directory)!r})")
    return "\n".join(lines)


def _format_stages(recovery: Mapping[str, Any]) -> list[str]:
    """A line per stage, with a column for held-out text and one for text sampled from the original."""
    by_stage = {stage: recovery if stage == "trained" else recovery.get(stage, {}) for stage in STAGES}
    measured = {name for values in by_stage.values() for name in values}
    metric = next((name for name in METRICS if name in measured), None)
    columns = {} if metric is None else {metric: "held-out text"}
    if SELF_PERPLEXITY in measured:
        columns[SELF_PERPLEXITY] = "own text"
    if not columns:
        return []
    rows = [(METRICS[metric or "eval_perplexity"].capitalize(), *columns.values())]
    for stage, label in STAGES.items():
        values = [by_stage[stage].get(name) for name in columns]
        if any(value is not None for value in values):
            rows.append((f"  {label}", *("" if value is None else f"{value:.4g}" for value in values)))
    lines = ["".join([f"{label:<24}", *(f"{cell:<15}" for cell in cells)]).rstrip() for label, *cells in rows]
    if SELF_PERPLEXITY in columns:
        lines.append("Own text was sampled from the original. It flatters: trained models usually come closer on it.")
    return lines
