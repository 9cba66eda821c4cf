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
    """Runs a model for a distillation loss, without materializing its logits if its output layer is linear.

    Args:
        model: A model, without any wrapper.

    Example:
        >>> forward = LeanForward(model)
        >>> outputs, logits, hidden_states = forward(model, inputs, transformer_layers(model), lean=True)
        >>> kl_divergence(teacher_logits, logits).backward()
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._head: nn.Linear | None = None
        self._is_head_known = False

    def __call__(
        self, wrapped: nn.Module, inputs: Mapping[str, Any], layers: list[nn.Module], lean: bool
    ) -> tuple[ModelOutput, Logits | None, list[torch.Tensor]]:
        """Run the model and record the outputs of some of its layers.

        Args:
            wrapped: The model to call: the model itself, or a wrapper around it.
            inputs: Its inputs.
            layers: The layers.
            lean: Whether logits may be left out.

        Returns:
            The outputs, with logits for the last token only if the head is linear; the logits of all tokens, None for a
            model without a head; and the outputs of the layers.
        """
        if lean and not self._is_head_known:  # runs the model, so there must be no hooks yet
            self._head, self._is_head_known = find_linear_head(self.model, inputs), True
        head = self._head if lean else None
        with record_hidden_states(layers) as hidden_states:
            if head is None:
                outputs = wrapped(**inputs)
                return outputs, getattr(outputs, "logits", None), hidden_states
            with record_hidden_states([self.model.base_model]) as states:
                outputs = wrapped(**inputs, **{LOGITS_TO_KEEP: 1})
        return outputs, ProjectedLogits.from_head(states[0], head), hidden_states


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
