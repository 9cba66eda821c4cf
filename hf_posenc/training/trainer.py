"""A Trainer that distills from a teacher and has a separate learning rate for position parameters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from ..checkpoints import Companions, is_scheme_parameter
from ..errors import PosEncError
from ..text_data import ATTENTION_MASK, INPUT_IDS, POSITION_IDS
from .argument_checks import translate_construction_errors
from .budget import warmup_steps
from .checkpointing import CheckpointingTrainer
from .data import IGNORE_INDEX
from .distillation import LossWeights, TeacherOutput, predicts_rows, transformer_layers
from .divergence import Logits, TopLogProbs
from .linear_head import LeanForward
from .optimizer import scheme_parameter_ids, split_parameter_group
from .position_collators import DataCollatorWithPositions, PositionEpochCallback, contiguous_positions
from .sharding import check_zero3, shard_teacher
from .teacher import Teacher
from .teacher_cache import TeacherCache

LABELS = "labels"
LOSS_TERMS = ("kl_loss", "pooled_loss", "hidden_loss", "label_loss")
Batch = Mapping[str, torch.Tensor]


class RecoveryTrainer(CheckpointingTrainer):
    """transformers' `Trainer` with a teacher and a learning rate for position parameters.

    The distillation loss is used in training only. Evaluation uses the model's own loss, so that perplexities can be
    compared. Checkpoints are atomic, verified and free of pickles.

    Args:
        *args: As for `Trainer`.
        teacher: The model to distill from; None for plain fine-tuning.
        loss_weights: Weights of the terms of the distillation loss.
        hidden_loss_until: Fraction of the training over which the hidden-state loss fades to zero.
        teacher_cache: Keeps the teacher's predictions. Once the hidden-state loss has faded, the teacher no longer runs
            on rows that it has seen; so let `hidden_loss_until` end within the first epoch.
        position_learning_rate: Learning rate of the position parameters; as for all others if None.
        predicts_tokens: Whether the evaluation loss is a mean over tokens; then its perplexity is logged too.
        train_collator: Collator of the training rows if it chooses positions; `data_collator` is then for evaluation.
            The teacher reads the rows at positions without jumps.
        companions: Files that every checkpoint gets too, such as the modules of a sentence-transformers model.
        has_adapters: Whether the model has LoRA adapters, which are merged into the weights that are saved.
        **kwargs: As for `Trainer`.
    """

    def __init__(
        self,
        *args: Any,
        teacher: Teacher | None = None,
        loss_weights: LossWeights | None = None,
        hidden_loss_until: float = 1.0,
        teacher_cache: TeacherCache | None = None,
        position_learning_rate: float | None = None,
        predicts_tokens: bool = True,
        train_collator: DataCollatorWithPositions | None = None,
        companions: Companions | None = None,
        has_adapters: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher
        self.loss_weights = loss_weights or LossWeights()
        self.hidden_loss_until = hidden_loss_until
        self.teacher_cache = teacher_cache
        self.position_learning_rate = position_learning_rate
        self.predicts_tokens = predicts_tokens
        self.train_collator = train_collator
        if train_collator is not None:
            self.add_callback(PositionEpochCallback(train_collator))
        self.companions, self.has_adapters = companions, has_adapters
        self._is_finite = torch.ones((), dtype=torch.bool, device=self.args.device)
        self._term_sums = torch.zeros(len(LOSS_TERMS), 2, device=self.args.device)  # of the values, and their number
        self._mean_counts: torch.Tensor | None = None
        self._student_forward: LeanForward | None = None
        self._is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        check_zero3(self.model, self.accelerator)
        if teacher is not None:
            self.model_accepts_loss_kwargs = False  # the distillation loss is a mean, not a sum over labels
            if self._is_sharded and teacher_cache is not None:  # all processes must run a sharded teacher together
                raise PosEncError("A teacher cache does not work with FSDP or DeepSpeed: leave one of them out")
            if self._is_sharded:
                teacher.model = shard_teacher(teacher.model, self.accelerator)
            else:
                teacher.model.to(self.args.device)
                teacher.share_frozen_weights(self.model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay would fade a position scheme out."""
        return [name for name in super().get_decay_parameter_names(model) if not is_scheme_parameter(name)]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        with translate_construction_errors(f"--optim {self.args.optim}"):
            optimizer = super().create_optimizer(model)
        if is_new and self.position_learning_rate is not None:
            parameter_ids = scheme_parameter_ids(self.model if model is None else model)
            split_parameter_group(optimizer, parameter_ids, self.position_learning_rate)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """With `warmup_steps` below 1, a fraction of the training, warms up over at least ten steps."""
        fraction = self.args.warmup_steps
        if 0 < fraction < 1:
            self.args.warmup_steps = warmup_steps(fraction, num_training_steps)
        try:
            with translate_construction_errors("--lr-scheduler-kwargs"):
                return super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.warmup_steps = fraction

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if not self._distills(model, inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        hidden_scale = self._hidden_scale()
        target = self._teacher_output(inputs, hidden_scale)
        unwrapped = self.accelerator.unwrap_model(model)
        unwrapped = getattr(unwrapped, "_orig_mod", unwrapped)  # inside a compiled model
        if not self.loss_weights.label:  # with labels, the model would compute its own loss
            inputs = {name: value for name, value in inputs.items() if name != LABELS}
        if self._student_forward is None or self._student_forward.model is not unwrapped:
            self._student_forward = LeanForward(unwrapped)
        layers = transformer_layers(unwrapped) if target.hidden_states else []
        lean = not return_outputs and self._can_skip_logits(model, unwrapped, inputs)
        with self.accelerator.autocast() if lean else contextlib.nullcontext():  # for the dtype of the logits
            outputs, logits, hidden_states = self._student_forward(model, inputs, layers, lean)
        if model.training and hidden_states and not hidden_states[-1].requires_grad:
            raise PosEncError(
                "Reentrant gradient checkpointing hides hidden states from the loss: pass "
                "--gradient-checkpointing-kwargs '{\"use_reentrant\": false}' or --hidden-loss-weight 0"
            )
        terms = target.losses(self.loss_weights, logits, hidden_states, inputs.get(ATTENTION_MASK), hidden_scale)
        loss = self._weighted_sum(terms, inputs, getattr(outputs, "loss", None), logits)
        return (loss, outputs) if return_outputs else loss

    def _teacher_output(self, inputs: Batch, hidden_scale: float) -> TeacherOutput:
        """Run the teacher, or read its predictions from the cache if no hidden states are compared any more."""
        assert self.teacher is not None
        batch = self._teacher_inputs(inputs)
        if self._is_sharded and ATTENTION_MASK in batch and batch[INPUT_IDS].shape[1] > self.teacher.max_length:
            # The processes run a sharded teacher together, but padded rows may have another length in each.
            raise PosEncError(
                f"With FSDP or DeepSpeed, padded rows must not be longer than the {self.teacher.max_length} tokens "
                "that the teacher can read: lower --train-length, or pack rows with --packing"
            )
        weights = self.loss_weights
        cache = self.teacher_cache if weights.kl and torch.is_grad_enabled() else None
        if cache is not None and not (weights.hidden and hidden_scale):
            cached = cache.get(batch)
            if cached is not None:
                return TeacherOutput(cached, [])
        output = self.teacher.forward(batch, lean=not self._is_sharded, hidden_states=bool(weights.hidden))
        if cache is not None and output.logits_BNV is not None:
            assert not isinstance(output.logits_BNV, TopLogProbs)
            if not predicts_rows(output.logits_BNV):
                cache.put(batch, output.logits_BNV)
        return output

    def _teacher_inputs(self, inputs: Batch) -> dict[str, torch.Tensor]:
        """The inputs without labels, and without the jumps that the teacher has not been trained for."""
        batch = {name: value for name, value in inputs.items() if name != LABELS}
        if self.train_collator is not None and POSITION_IDS in batch:
            first, mask = self.train_collator.first_position, batch.get(ATTENTION_MASK)
            real_BN = None if mask is None else mask.bool()
            batch[POSITION_IDS] = contiguous_positions(batch[POSITION_IDS] - first, real_BN) + first
        return batch

    def get_train_dataloader(self) -> DataLoader:
        """With the collator of the training rows."""
        collator: Any = self.data_collator
        self.data_collator: Any = self.train_collator or collator
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        output = super().train(*args, **kwargs)
        if self.teacher_cache is not None:
            self.teacher_cache.flush()
        return output

    def _can_skip_logits(self, model: nn.Module, unwrapped: PreTrainedModel, inputs: Batch) -> bool:
        """Whether nothing but the distillation loss needs the student's logits, and hooks work."""
        is_plain = model is unwrapped or isinstance(model, nn.parallel.DistributedDataParallel)
        return is_plain and not self._is_sharded and LABELS not in inputs

    def _distills(self, model: nn.Module, inputs: Batch) -> bool:
        """In training, unless a classifier cannot read rows this long; in evaluation only if there are no labels."""
        if self.teacher is None or LABELS not in inputs:
            return self.teacher is not None
        labels, input_ids_BN = inputs[LABELS], inputs[INPUT_IDS]
        is_readable = labels.shape == input_ids_BN.shape or input_ids_BN.shape[1] <= self.teacher.max_length
        return model.training and is_readable

    def _hidden_scale(self) -> float:
        """The factor of the hidden-state loss, which fades to zero."""
        if not (torch.is_grad_enabled() and self.hidden_loss_until and self.state.max_steps > 0):
            return 0.0
        return max(1 - self.state.global_step / (self.hidden_loss_until * self.state.max_steps), 0.0)

    def _weighted_sum(
        self, terms: dict[str, torch.Tensor], inputs: Batch, label_loss: torch.Tensor | None, logits: Logits | None
    ) -> torch.Tensor:
        """The total loss of a batch; also keeps the terms for the log."""
        token_weight, label_weight = self._batch_weights(inputs)
        per_row = {"pooled_loss", "kl_loss"} if logits is not None and predicts_rows(logits) else {"pooled_loss"}
        for name in terms.keys() - per_row:
            terms[name] = terms[name] * token_weight
        if self.loss_weights.label and label_loss is not None:
            terms["label_loss"] = self.loss_weights.label * label_loss * label_weight
        if not terms:
            raise PosEncError("There is nothing to learn: all loss weights that apply to this model are 0")
        if torch.is_grad_enabled():
            for name, term in terms.items():
                value = term.detach().float()
                self._term_sums[LOSS_TERMS.index(name)] += torch.stack([value, torch.ones_like(value)])
        return torch.stack(list(terms.values())).sum()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Also counts the tokens and labels in the batches of a step, over all processes, if rows are padded."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._mean_counts = None
        if self.teacher is not None and batches and ATTENTION_MASK in batches[0]:
            counts = torch.stack([self._counts(batch) for batch in batches]).sum(0).to(self.args.device)
            self._mean_counts = self.accelerator.reduce(counts, "sum") / (self.args.world_size * len(batches))
        return batches, num_items

    def _counts(self, batch: Batch) -> torch.Tensor:
        """How many tokens a batch has, and how many labels to predict. A causal model predicts no first token."""
        tokens = batch[ATTENTION_MASK].sum()
        first = 0 if getattr(self.data_collator, "mlm", True) else 1
        labels = (batch[LABELS][..., first:] != IGNORE_INDEX).sum() if LABELS in batch else torch.zeros_like(tokens)
        return torch.stack([tokens, labels])

    def _batch_weights(self, inputs: Batch) -> torch.Tensor:
        """Batches count by their tokens and labels: the loss does not depend on how a step's rows are split up."""
        if self._mean_counts is None or not torch.is_grad_enabled():
            return torch.ones(2, device=self.args.device)
        return self._counts(inputs) / self._mean_counts.clamp(min=torch.finfo(torch.float32).tiny)

    def prediction_step(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        if self.teacher is not None and LABELS not in inputs:
            with torch.no_grad(), self.compute_loss_context_manager():
                return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None
        return super().prediction_step(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._is_finite &= torch.isfinite(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Also logs the terms of the loss and perplexities; stops if the loss is not finite."""
        if "loss" in logs:
            if not self._is_finite:
                raise self.divergence_error("loss")
            if self.teacher is not None:  # some processes may have had no batch with a teacher
                sums = self.accelerator.reduce(self._term_sums, "sum").tolist()
                means = {name: total / count for name, (total, count) in zip(LOSS_TERMS, sums, strict=True) if count}
                logs |= {name: round(mean, 6) for name, mean in means.items()}
                self._term_sums = torch.zeros_like(self._term_sums)
        super().log(with_perplexity(logs, self.predicts_tokens), *args, **kwargs)


def with_perplexity(metrics: dict[str, float], predicts_tokens: bool) -> dict[str, float]:
    """Add the perplexity to the metrics of an evaluation whose loss is a mean over tokens."""
    if predicts_tokens and "eval_loss" in metrics:
        metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    return metrics
