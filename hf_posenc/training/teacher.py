"""The teacher: a frozen model that a variant learns from. It reads long rows in overlapping windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..patches import architecture_of, max_positions
from ..text_data import ATTENTION_MASK, INPUT_IDS, POSITION_IDS
from .distillation import TeacherOutput, transformer_layers
from .linear_head import LeanForward


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens that begin and end every row of an encoder, such as [CLS] and [SEP]; None if there are none."""

    first: int | None = None
    last: int | None = None


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
        windows = plan_windows(inputs[INPUT_IDS].shape[1], self.max_length, self._causal)
        if len(windows) == 1:
            return [(windows[0], dict(inputs))]
        special, first_position = self.special_tokens, self._first_position
        return [(window, window_inputs(inputs, window, special, first_position)) for window in windows]

    def _read(self, inputs: dict[str, torch.Tensor], lean: bool, hidden_states: bool) -> TeacherOutput:
        """Run the teacher on inputs that it can read at once."""
        layers = self.layers if hidden_states else []
        _, logits, recorded = self._lean_forward(self.model, {**inputs, **self._options}, layers, lean)
        return TeacherOutput(logits, recorded)


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of a row, from `start` to `stop`, and the tokens whose outputs it gives, `keep_from` to `keep_to`."""

    start: int
    stop: int
    keep_from: int
    keep_to: int

    @property
    def kept(self) -> slice:
        """The tokens whose outputs are kept, as slots of the window."""
        return slice(self.keep_from - self.start, self.keep_to - self.start)


def plan_windows(num_tokens: int, size: int, causal: bool) -> list[Window]:
    """Windows that overlap by half, so that each token is read with at least half a window of context.

    The output for a token is taken from the window that gives it the most context: as many tokens before it as possible
    in a causal model, the same number on both sides in others. Rows of at most `size` tokens have a single window.
    """
    stride = max(size // 2, 1)
    last_start = max(num_tokens - size, 0)
    starts = [*range(0, last_start, stride), last_start]
    stops = [min(start + size, num_tokens) for start in starts]
    borders = [
        stop if causal else (stop + next_start) // 2 for stop, next_start in zip(stops[:-1], starts[1:], strict=True)
    ]
    return [
        Window(start, stop, keep_from, keep_to)
        for start, stop, keep_from, keep_to in zip(starts, stops, [0, *borders], [*borders, num_tokens], strict=True)
    ]


def window_inputs(
    inputs: Mapping[str, torch.Tensor], window: Window, special: SpecialTokens, first_position: int = 0
) -> dict[str, torch.Tensor]:
    """The inputs of one window; `first_position` is what the model's `position_ids` call position 0.

    A window that begins inside a row begins with its first special token, and one that ends inside a row ends with its
    last, in place of tokens whose outputs are not kept. Positions begin anew.
    """
    shape = inputs[INPUT_IDS].shape
    selected = {
        name: value[:, window.start : window.stop].clone() if value.shape[:2] == shape else value
        for name, value in inputs.items()
    }
    input_ids_BN, mask_BN = selected[INPUT_IDS], selected.get(ATTENTION_MASK)
    if special.first is not None and window.keep_from > window.start:
        input_ids_BN[:, 0] = special.first
    if special.last is not None and window.keep_to < window.stop:
        input_ids_BN[:, -1] = special.last
    if mask_BN is not None:
        mask_BN[~mask_BN.bool().any(-1)] = 1  # a window of padding only: something must be visible
    if POSITION_IDS in selected:
        positions_BN = selected[POSITION_IDS]
        follows_BN = positions_BN[:, 1:] == positions_BN[:, :-1] + 1
        # Only the document that the window begins in has lost its beginning.
        cut_BN = torch.cat([torch.ones_like(follows_BN[:, :1]), follows_BN.cumprod(-1).bool()], dim=-1)
        positions_BN -= torch.where(cut_BN, positions_BN[:, :1] - first_position, 0)
    return selected
