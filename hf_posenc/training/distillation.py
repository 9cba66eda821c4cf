"""Distillation: a variant learns from the predictions and hidden states of the stock model.

Shape legend: B batch, N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import PosEncError
from ..patches import architecture_of, max_positions
from .divergence import Logits, ProjectedLogits, Target, kl_divergence
from .hidden_loss import hidden_state_distance
from .linear_head import LeanForward
from .teacher_windows import SpecialTokens, Window, plan_windows, window_inputs


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the terms of the distillation loss.

    Attributes:
        kl: KL divergence from the teacher's predictions, in nats per token.
        hidden: Squared error of the hidden states after each layer, relative to the teacher's; massive activations are
            left out.
        label: The usual loss on the labels.

    Raises:
        PosEncError: If a weight is negative or not finite.
    """

    kl: float = 1.0
    hidden: float = 5.0
    label: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in dataclasses.asdict(self).items():
            if not (isinstance(weight, (int, float)) and 0 <= weight < math.inf):
                raise PosEncError(f"The {name} loss weight must be a finite number, at least 0; got {weight!r}")


class Teacher:
    """A frozen model to distill from.

    Args:
        model: The model, usually the stock one; put in eval mode and frozen in place.
        has_new_head: Whether its head is untrained, so that its predictions mean nothing.
        special_tokens: The tokens that begin and end every row, for rows longer than it can read.
    """

    def __init__(
        self, model: PreTrainedModel, has_new_head: bool = False, special_tokens: SpecialTokens | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.has_new_head = has_new_head
        self.special_tokens = special_tokens or SpecialTokens()
        self.layers = transformer_layers(model)
        self.max_length: int = max_positions(model.config)
        architecture = architecture_of(model)
        self._causal = architecture.shape(model.config).causal
        self._first_position = architecture.first_position(model.config)
        # With a cache, stock models do not separate packed documents by their position_ids.
        self._options: dict[str, Any] = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}
        self._lean_forward = LeanForward(model)

    def share_frozen_weights(self, student: nn.Module) -> int:
        """Use the student's own weights where they are frozen and equal, so that they are in memory only once.

        For a student that trains adapters or positions only. Its frozen weights must stay frozen from then on.

        Args:
            student: The model to train, on the same device.

        Returns:
            The number of parameters shared.
        """
        frozen = {
            name.replace(".base_layer.", "."): weight  # PEFT keeps adapted layers there
            for name, weight in student.named_parameters()
            if not weight.requires_grad
        }
        shared = 0
        for name, parameter in self.model.named_parameters():
            weight = frozen.get(name)
            if weight is not None and weight.dtype == parameter.dtype and torch.equal(weight, parameter):
                parameter.data = weight.data
                shared += parameter.numel()
        return shared

    @torch.no_grad()
    def forward(
        self, inputs: Mapping[str, torch.Tensor], *, lean: bool = False, hidden_states: bool = True
    ) -> TeacherOutput:
        """Run the teacher. Rows longer than it can read are read in overlapping windows.

        Args:
            inputs: The model inputs of a batch, without labels.
            lean: Compute logits only on demand where the model's head allows, to save memory. Not for a sharded model.
            hidden_states: Also return the output of each layer.

        Returns:
            What a student is compared with.
        """
        windows = self._split(inputs)
        return TeacherOutput.concatenate(
            [self._read(batch, lean, hidden_states).tokens(window.kept) for window, batch in windows]
        )

    @torch.no_grad()
    def last_hidden_state(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The output of a teacher without a head, (B, N, E). Long rows are read in overlapping windows."""
        windows = self._split(inputs)
        return torch.cat([self.model(**batch).last_hidden_state[:, window.kept] for window, batch in windows], dim=1)

    def _split(self, inputs: Mapping[str, torch.Tensor]) -> list[tuple[Window, dict[str, torch.Tensor]]]:
        """The windows of a batch with their inputs: the batch itself if it can be read at once."""
        windows = plan_windows(inputs["input_ids"].shape[1], self.max_length, self._causal)
        if len(windows) == 1:
            return [(windows[0], dict(inputs))]
        special, first_position = self.special_tokens, self._first_position
        return [(window, window_inputs(inputs, window, special, first_position)) for window in windows]

    def _read(self, inputs: dict[str, torch.Tensor], lean: bool, hidden_states: bool) -> TeacherOutput:
        """Run the teacher on inputs that it can read at once."""
        arguments: dict[str, Any] = {**inputs, **self._options}
        if lean:
            self._lean_forward.prepare(arguments)
        with record_hidden_states(self.layers if hidden_states else []) as recorded:
            if lean:
                _, logits = self._lean_forward(arguments)
            else:
                logits = getattr(self.model(**arguments), "logits", None)
        return TeacherOutput(logits, recorded)


@dataclasses.dataclass(frozen=True)
class TeacherOutput:
    """A teacher's output for one batch, to compare a student's with.

    Attributes:
        logits_BNV: Its logits, or what is kept of them; None for a model without a head, (B, V) for a classifier.
        hidden_states: The output of each layer; empty if none are compared.
    """

    logits_BNV: Target | None
    hidden_states: list[torch.Tensor]

    def tokens(self, kept: slice) -> TeacherOutput:
        """The output for some tokens of each row; predictions for whole rows stay."""
        logits = self.logits_BNV
        if isinstance(logits, ProjectedLogits):
            logits = dataclasses.replace(logits, hidden_BNE=logits.hidden_BNE[:, kept])
        elif isinstance(logits, torch.Tensor) and not predicts_rows(logits):
            logits = logits[:, kept]
        return TeacherOutput(logits, [states[:, kept] for states in self.hidden_states])

    @staticmethod
    def concatenate(outputs: list[TeacherOutput]) -> TeacherOutput:
        """The output for rows whose tokens were read in several windows."""
        if len(outputs) == 1:
            return outputs[0]
        targets = [output.logits_BNV for output in outputs]
        logits = targets[0]
        if isinstance(logits, ProjectedLogits):
            states = [target.hidden_BNE for target in targets if isinstance(target, ProjectedLogits)]
            logits = dataclasses.replace(logits, hidden_BNE=torch.cat(states, dim=1))
        elif logits is not None:
            logits = torch.cat([target for target in targets if isinstance(target, torch.Tensor)], dim=1)
        hidden_states = zip(*(output.hidden_states for output in outputs), strict=True)
        return TeacherOutput(logits, [torch.cat(layer, dim=1) for layer in hidden_states])

    def losses(
        self,
        weights: LossWeights,
        logits: Logits | None,
        hidden_states: list[torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        hidden_scale: float = 1.0,
    ) -> dict[str, torch.Tensor]:
        """The weighted terms of a student's distillation loss.

        Args:
            weights: The weight of each term.
            logits: The student's logits, if it has a head.
            hidden_states: The output of each of its layers, from `record_hidden_states`.
            attention_mask: 1 at tokens and 0 at padding, (B, N).
            hidden_scale: Further factor for the hidden states. Those of the last layer are the output of a model
                without a head: they count in full, and so does their mean over the tokens, the usual embedding.

        Returns:
            The terms by name; their sum is the loss.
        """
        terms = {}
        if weights.kl and self.logits_BNV is not None and logits is not None:
            terms["kl_loss"] = weights.kl * self.kl_divergence(
                logits, None if predicts_rows(logits) else attention_mask
            )
        layer_scales = [hidden_scale] * (len(hidden_states) - 1) + [hidden_scale if terms else 1.0]
        if weights.hidden and not terms:
            terms["pooled_loss"] = weights.hidden * self.pooled_distance(hidden_states[-1], attention_mask)
        if weights.hidden and any(layer_scales):
            terms["hidden_loss"] = weights.hidden * self.hidden_distance(hidden_states, attention_mask, layer_scales)
        return terms

    def kl_divergence(self, logits_BNV: Logits, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
        """KL divergence from the teacher's predictions to a student's, in nats per token."""
        assert self.logits_BNV is not None
        return kl_divergence(self.logits_BNV, logits_BNV, mask_BN)

    def pooled_distance(self, states_BNE: torch.Tensor, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
        """Cosine distance between the mean hidden states of each row."""
        pooled_BE, target_BE = (
            (states.float() if mask_BN is None else states.float() * mask_BN[..., None]).sum(1)
            for states in (states_BNE, self.hidden_states[-1])
        )
        return (1 - nn.functional.cosine_similarity(pooled_BE, target_BE)).mean()

    def hidden_distance(
        self,
        hidden_states: list[torch.Tensor],
        mask_BN: torch.Tensor | None = None,
        layer_scales: list[float] | None = None,
    ) -> torch.Tensor:
        """Robust relative squared error of the hidden states, averaged over layers."""
        total = hidden_states[0].new_zeros((), dtype=torch.float32)
        scales = layer_scales or [1.0] * len(hidden_states)
        for scale, states_BNE, target_BNE in zip(scales, hidden_states, self.hidden_states, strict=True):
            if scale:
                total = total + scale * hidden_state_distance(states_BNE, target_BNE, mask_BN)
        return total / len(hidden_states)


def predicts_rows(logits: Logits) -> bool:
    """Whether there is one prediction per row, as in a classifier, instead of one per token."""
    return isinstance(logits, torch.Tensor) and logits.ndim == 2


def transformer_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers of a model, stock or variant."""
    architecture = architecture_of(model)
    base = next(module for module in model.modules() if isinstance(module, architecture.base))
    return list(base.get_submodule(architecture.layers).children())


@contextlib.contextmanager
def record_hidden_states(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collect the output of each layer during a forward pass inside the context.

    Example:
        >>> with record_hidden_states(transformer_layers(model)) as hidden_states:
        ...     logits = model(input_ids).logits
    """
    hidden_states: list[torch.Tensor] = []

    def record(module: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden_states.append(output[0] if isinstance(output, tuple) else output)

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(record))
        yield hidden_states
