"""A Trainer that learns from the model as it was."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from .parameters import is_of_scheme
from .rates import learns_faster, set_apart
from .rows import IGNORED
from .saving import NotFinite, WholeCheckpoints, checkpoints_in
from .stages import Staged
from .teacher import Lesson, Teacher, Weights, layers_of, recorded

LABELS = "labels"
DIVERGENCE, POOLED, TOKENS = "divergence", "pooled", "tokens"
PARTS = (DIVERGENCE, POOLED, "distance", LABELS)
"""What a loss beside a teacher is made of."""


def with_perplexity(logs: dict[str, float], predicts_tokens: bool) -> dict[str, float]:
    """The same logs, with the perplexity that a loss of tokens means."""
    if predicts_tokens and "eval_loss" in logs:
        logs["eval_perplexity"] = math.exp(min(logs["eval_loss"], 700.0))
    return logs


class RecoveryTrainer(WholeCheckpoints, Trainer):
    """transformers' Trainer, with a teacher (None for plain fine-tuning) and a rate for the parameters of positions.

    While it trains, the loss is what `weights` says; evaluation is as ever, so that perplexity stays perplexity.
    """

    def __init__(
        self,
        *args: Any,
        teacher: Teacher | None = None,
        weights: Weights | None = None,
        states_until: float = 1.0,
        position_learning_rate: float | None = None,
        predicts_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.predicts_tokens = predicts_tokens
        self._sound: torch.Tensor | None = None
        self.teacher = teacher
        self.weights = weights or Weights()
        self.states_until = states_until
        self.position_learning_rate = position_learning_rate
        self._parts: dict[str, tuple[float, int]] = {}
        self._in_a_step: dict[str, float] = {}
        if teacher is not None:
            self.model_accepts_loss_kwargs = False  # what a teacher says is a mean, not a sum over labels
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                teacher.model = self.accelerator.prepare_model(teacher.model, evaluation_mode=True)
            else:
                teacher.model.to(self.args.device)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Not those of position schemes: decay would fade them."""
        return [name for name in super().get_decay_parameter_names(model) if not is_of_scheme(name)]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.position_learning_rate is not None:
            super().create_optimizer(model)
            own = learns_faster(self.model if model is None else model)
            set_apart(self.optimizer, own, self.position_learning_rate)
        return super().create_optimizer(model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, Staged):
            return torch.utils.data.SequentialSampler(dataset)
        return super()._get_train_sampler(train_dataset)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.teacher is None or not (model.training or LABELS not in inputs) or self._is_too_long(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        lesson = self.teacher.look_at({name: value for name, value in inputs.items() if name != LABELS})
        bare = self.accelerator.unwrap_model(model)
        with recorded(layers_of(getattr(bare, "_orig_mod", bare))) as states:  # of a compiled model
            outputs = model(**inputs)
        if model.training and self.weights.states and not states[-1].requires_grad:
            raise ValueError(
                "gradient checkpointing of the old kind hides the states of layers from the loss: pass "
                "--gradient-checkpointing-kwargs '{\"use_reentrant\": false}', or --state-weight 0"
            )
        loss = self._weighed(lesson, outputs, states[1:], inputs)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.teacher is not None and LABELS not in inputs:
            with torch.no_grad(), self.compute_loss_context_manager():
                return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None
        return super().prediction_step(model, inputs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Also: how many tokens and labels the batches of a step have in all processes, where rows are padded."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._in_a_step = {}
        if self.teacher is not None and batches and "attention_mask" in batches[0]:
            sums = torch.stack([torch.stack(list(self._counts(batch).values())) for batch in batches]).sum(0)
            sums = sums.to(self.args.device)
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(sums)
            means = sums / (self.args.world_size * len(batches))
            self._in_a_step = dict(zip(self._counts(batches[0]), means.tolist(), strict=True))
        return batches, items

    def _counts(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Tokens that are looked at, and labels that are to be predicted: of a causal model, none for the first."""
        tokens = batch["attention_mask"].sum()
        first = 0 if getattr(self.data_collator, "mlm", True) else 1
        labels = (batch[LABELS][..., first:] != IGNORED).sum() if LABELS in batch else torch.zeros_like(tokens)
        return {TOKENS: tokens, LABELS: labels}

    def _share(self, kind: str, inputs: dict[str, Any]) -> float:
        """A batch with more tokens than others of its step counts more, so that the loss is the mean over tokens
        however the rows of a step are split among processes and accumulated batches."""
        mean = self._in_a_step.get(kind) if torch.is_grad_enabled() else None
        return float(self._counts(inputs)[kind]) / mean if mean else 1.0

    def evaluate_teacher(self) -> dict[str, float]:
        """What the teacher gets on the text that the model is evaluated on; nothing where it lies in pieces."""
        if self.teacher is None or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return {}
        quietly = copy.copy(self.args)
        quietly.report_to = []
        plain = Trainer(
            model=self.teacher.model,
            args=quietly,
            eval_dataset=self.eval_dataset,
            processing_class=self.processing_class,
            data_collator=self.data_collator,
            compute_metrics=self.compute_metrics,
        )
        return with_perplexity(plain.evaluate(), self.predicts_tokens)

    def _is_too_long(self, inputs: dict[str, Any]) -> bool:
        """Where the teacher cannot follow, there is the text to learn from."""
        assert self.teacher is not None
        return LABELS in inputs and inputs["input_ids"].shape[-1] > self.teacher.longest

    def _weighed(self, lesson: Lesson, outputs: Any, states: list[torch.Tensor], inputs: dict[str, Any]) -> Any:
        mask, inside = inputs.get("attention_mask"), self._share_of_states() if torch.is_grad_enabled() else 0.0
        parts = lesson.parts(self.weights, getattr(outputs, "logits", None), states, mask, inside)
        by_row = lesson.logits_BNV is not None and lesson.logits_BNV.ndim == 2  # of a classifier
        for name in parts:
            parts[name] = parts[name] * (
                1.0 if (by_row and name == DIVERGENCE) or name == POOLED else self._share(TOKENS, inputs)
            )
        if self.weights.labels and LABELS in inputs:
            parts[LABELS] = self.weights.labels * outputs.loss * self._share(LABELS, inputs)
        if not parts:
            raise ValueError("nothing is learnt: the teacher's predictions and states, and the labels, all weigh 0")
        if torch.is_grad_enabled():
            self._count(parts)
        return torch.stack(list(parts.values())).sum()

    def _share_of_states(self) -> float:
        """Falls to nothing over the share of the training that they lead the way for."""
        if not self.states_until or self.state.max_steps <= 0:
            return 0.0
        return max(1 - self.state.global_step / (self.states_until * self.state.max_steps), 0.0)

    def _count(self, parts: dict[str, torch.Tensor]) -> None:
        for name, value in parts.items():
            total, count = self._parts.get(name, (0.0, 0))
            self._parts[name] = (total + value.detach().float(), count + 1)  # type: ignore[assignment]

    def _means_of_parts(self) -> dict[str, float]:
        """Over all processes, as the loss beside them is; one of them may have had no batch with a teacher."""
        found = [self._parts.get(name, (0.0, 0)) for name in PARTS]
        sums = torch.tensor([[float(total), count] for total, count in found], device=self.args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        return {
            name: round(total / count, 6) for name, (total, count) in zip(PARTS, sums.tolist(), strict=True) if count
        }

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._sound = torch.isfinite(loss) if self._sound is None else self._sound & torch.isfinite(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Beside the loss, what it is made of; and the perplexity that a loss of tokens means."""
        if "loss" in logs:
            if self._sound is not None and not self._sound:
                raise NotFinite("the loss", self.state, checkpoints_in(Path(self.args.output_dir)))
            logs |= self._means_of_parts() if self.teacher is not None else {}
            self._parts = {}
        with_perplexity(logs, self.predicts_tokens)
        super().log(logs, *args, **kwargs)
