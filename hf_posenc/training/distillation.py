"""The distillation loss: how far a student's predictions and hidden states are from a teacher's.

Shape legend: B batch, N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..errors import PosEncError
from ..patches import architecture_of
from .divergence import Logits, ProjectedLogits, Target, kl_divergence

MASSIVE_RATIO = 10.0
"""Tokens whose hidden states are this many times larger than the row's median are left out."""
SCALE_FLOOR = 0.1
"""Lower bound of a channel's mean square, relative to the median channel: short rows have channels close to zero."""


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
        return (1 - pooled_cosine(states_BNE, self.hidden_states[-1], mask_BN)).mean()

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


def pooled_cosine(
    states_BNE: torch.Tensor, target_BNE: torch.Tensor, mask_BN: torch.Tensor | None = None
) -> torch.Tensor:
    """Cosine similarity between the mean hidden states of each row, (B,)."""
    pooled_BE, target_BE = (
        (states.float() if mask_BN is None else states.float() * mask_BN[..., None]).sum(1)
        for states in (states_BNE, target_BNE)
    )
    return nn.functional.cosine_similarity(pooled_BE, target_BE)


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

    def record(module: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...] | ModelOutput) -> None:
        hidden_states.append(output if isinstance(output, torch.Tensor) else output[0])

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(record))
        yield hidden_states


def hidden_state_distance(
    states_BNE: torch.Tensor, target_BNE: torch.Tensor, mask_BN: torch.Tensor | None = None
) -> torch.Tensor:
    """Relative squared error of one layer's hidden states, which massive activations cannot dominate.

    In large language models a few tokens, such as the first, have hidden states a hundred times larger than all others,
    and a student with another position encoding may grow them at other tokens. So the error is measured channel by
    channel in units of the teacher's ordinary tokens, the teacher's massive tokens are left out, and beyond an error of
    about 1 the loss of a token only grows with its logarithm. Scales are taken per row, so that the loss does not
    depend on how rows are split into batches.
    """
    states_BNE, target_BNE = states_BNE.float(), target_BNE.detach().float()
    is_token_BN = torch.ones_like(target_BNE[..., 0], dtype=torch.bool) if mask_BN is None else mask_BN.bool()
    square_BNE = target_BNE.square()
    norm_BN = square_BNE.mean(-1)
    median_B1 = norm_BN.masked_fill(~is_token_BN, torch.nan).nanmedian(-1, keepdim=True).values
    is_ordinary_BN = is_token_BN & (norm_BN <= MASSIVE_RATIO**2 * median_B1)
    weights_BN1 = is_ordinary_BN[..., None].float()
    scale_B1E = (square_BNE * weights_BN1).sum(1, keepdim=True) / weights_BN1.sum(1, keepdim=True).clamp(min=1)
    floor_B11 = SCALE_FLOOR * scale_B1E.median(-1, keepdim=True).values
    scale_B1E = torch.maximum(scale_B1E, floor_B11).clamp(min=torch.finfo(torch.float32).eps ** 2)
    error_BN = ((states_BNE - target_BNE).square() / scale_B1E).mean(-1).log1p()
    # The mean over all tokens: the weight of a batch is its number of tokens, massive or not.
    return error_BN.masked_fill(~is_ordinary_BN, 0.0).sum() / is_token_BN.sum().clamp(min=1)
