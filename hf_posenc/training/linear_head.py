"""Forward passes that leave out the logits, for models whose logits are a linear layer of the last hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..checkpoints import eval_mode
from .distillation import record_hidden_states
from .divergence import Logits, ProjectedLogits

LOGITS_TO_KEEP = "logits_to_keep"
"""The argument of a forward pass that limits logits to the last tokens."""
CHECKED_POSITIONS, PROBE_SCALE = 8, 64.0
"""Softcaps hardly change small logits, so the check is made on larger ones."""


class LeanForward:
    """Runs a model without materializing its logits, if its output layer is linear; else as usual.

    Args:
        model: A model, without any wrapper.

    Example:
        >>> forward = LeanForward(model)
        >>> forward.prepare(inputs)
        >>> outputs, logits = forward(inputs)
        >>> kl_divergence(teacher_logits, logits).backward()
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._head: nn.Linear | None = None
        self._is_prepared = False

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Look for a linear head. The first time, this runs the model, so call it before registering any hooks."""
        if not self._is_prepared:
            self._head, self._is_prepared = find_linear_head(self.model, inputs), True

    def __call__(
        self, inputs: Mapping[str, Any], wrapped: nn.Module | None = None
    ) -> tuple[ModelOutput, Logits | None]:
        """Run the model, or a wrapper around it.

        Returns:
            The outputs, with logits for the last token only if the head is linear; and the logits of all tokens, None
            for a model without a head.
        """
        assert self._is_prepared, "call prepare() first"
        call = self.model if wrapped is None else wrapped
        if self._head is None:
            outputs = call(**inputs)
            return outputs, getattr(outputs, "logits", None)
        with record_hidden_states([self.model.base_model]) as states:
            outputs = call(**inputs, **{LOGITS_TO_KEEP: 1})
        return outputs, ProjectedLogits.from_head(states[0], self._head)


def find_linear_head(model: PreTrainedModel, inputs: Mapping[str, Any]) -> nn.Linear | None:
    """The output layer of a model, if its logits are nothing but this layer applied to the last hidden states.

    Softcaps and logit scales are hidden in the code of a model, so it runs on the first row of the inputs to find out.
    None if there is more to the logits, or the model always computes all of them.
    """
    head = model.get_output_embeddings()
    if (
        type(head) is not nn.Linear  # a subclass may compute something else
        or head._forward_hooks
        or head._forward_pre_hooks
        or model.base_model is model
        or LOGITS_TO_KEEP not in inspect.signature(type(model).forward).parameters
    ):
        return None
    row = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with (
        torch.no_grad(),
        eval_mode(model),  # dropout would advance the random state, so that a resumed run would differ
        head.register_forward_hook(lambda module, args, output: output * PROBE_SCALE),
        record_hidden_states([model.base_model]) as states,
    ):
        logits = model(**row, **{LOGITS_TO_KEEP: CHECKED_POSITIONS}).logits
    if len(states) != 1 or states[0].shape[:-1] != row["input_ids"].shape:
        return None
    projection = ProjectedLogits.from_head(states[0][:, -CHECKED_POSITIONS:], head)
    expected = PROBE_SCALE * projection.dense()
    tolerance = max(1e-5, 2 * torch.finfo(projection.dtype).eps)
    is_linear = logits.shape == expected.shape and (logits - expected).abs().max() <= tolerance * expected.abs().max()
    return head if is_linear else None
