"""Learning from the model as it was: its predictions, and the states of its layers.

Shape legend: B batch, N tokens, E width of the model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .fit import architecture_of


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of a model of a known architecture, stock or variant."""
    return list(model.base_model.get_submodule(architecture_of(model).layers).children())


@dataclasses.dataclass(frozen=True)
class Weights:
    """What counts how much in the loss beside a teacher."""

    predictions: float = 1.0
    """Kullback-Leibler from the teacher's predictions, in nats a token."""
    states: float = 5.0
    """Distance of the states behind each layer, as a share of the teacher's own."""
    labels: float = 0.0
    """The loss that there would be without a teacher."""

    def __post_init__(self) -> None:
        for name, weight in dataclasses.asdict(self).items():
            if not (isinstance(weight, (int, float)) and 0 <= weight < math.inf):
                raise ValueError(f"the weight of {name} in the loss must be a number from 0 on, got {weight!r}")


class Teacher:
    """A frozen model, and what it thinks of some inputs."""

    def __init__(self, model: Any, head_is_new: bool = False) -> None:
        self.head_is_new = head_is_new
        """Whether what it predicts is chance, as its checkpoint has no head for the task."""
        self.model = model.eval().requires_grad_(False)
        self.layers = layers_of(model)
        self.longest: int = model.config.max_position_embeddings
        """As many tokens as it can look at, or was trained on."""
        # With a cache, stock models do not tell documents apart by their positions.
        self._without_cache = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}

    @torch.no_grad()
    def look_at(self, inputs: dict[str, Any]) -> Lesson:
        """What it predicts, and the states that go into its first layer and come out of each."""
        with recorded(self.layers) as states:
            outputs = self.model(**inputs, **self._without_cache)
        return Lesson(getattr(outputs, "logits", None), states)


class Lesson:
    """What a teacher found: to be compared with what a student finds on the same inputs."""

    def __init__(self, logits_BNV: torch.Tensor | None, states: list[torch.Tensor]) -> None:
        self.logits_BNV = logits_BNV
        self.states = states

    def parts(
        self,
        weights: Weights,
        logits: torch.Tensor | None,
        states: list[torch.Tensor],
        mask_BN: torch.Tensor | None,
        inside: float = 1.0,
    ) -> dict[str, torch.Tensor]:
        """Of a student's loss, weighed: what its predictions and the states behind its layers are off.

        `inside`: how much the states still count that are not what the model gives. Where there are no predictions,
        those behind the last layer are what it gives: they count in full, and so does their mean over a row, which is
        what most take for an embedding of it.
        """
        found = {}
        if weights.predictions and self.logits_BNV is not None and logits is not None:
            by_token = self.logits_BNV.ndim == 3  # a classifier has one prediction a row
            found["divergence"] = weights.predictions * self.divergence(logits, mask_BN if by_token else None)
        shares = [inside] * (len(states) - 1) + [inside if found else 1.0]
        if weights.states and not found:
            found["pooled"] = weights.states * self.pooled(states[-1], mask_BN)
        if weights.states and any(shares):
            found["distance"] = weights.states * self.distance(states, mask_BN, shares)
        return found

    def divergence(self, logits_BNV: torch.Tensor, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
        """Kullback-Leibler from the teacher's predictions to a student's, in nats a token."""
        assert self.logits_BNV is not None
        known, found = (logits.float().log_softmax(-1) for logits in (self.logits_BNV, logits_BNV))
        return _mean((known.exp() * (known - found)).sum(-1), mask_BN)

    def pooled(self, states_BNE: torch.Tensor, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
        """How far the mean over a row's tokens turns away from the teacher's: 1 - cosine."""
        found_BE, known_BE = (
            (states.float() if mask_BN is None else states.float() * mask_BN[..., None]).sum(1)
            for states in (states_BNE, self.states[-1])
        )
        return (1 - nn.functional.cosine_similarity(found_BE, known_BE)).mean()

    def distance(
        self, states: list[torch.Tensor], mask_BN: torch.Tensor | None = None, shares: list[float] | None = None
    ) -> torch.Tensor:
        """Of the states behind each layer, squared and as a share of the teacher's own; the mean of all, each counted
        as much as `shares` says."""
        shares = shares or [1.0] * len(states)
        off = [
            share * _share_off(found, known, mask_BN)
            for share, found, known in zip(shares, states, self.states[1:], strict=True)
            if share
        ]
        return torch.stack(off).sum() / len(states)


def _share_off(found_BNE: torch.Tensor, known_BNE: torch.Tensor, mask_BN: torch.Tensor | None) -> torch.Tensor:
    """Of each token by itself: some tokens have states a hundred times as large as others, and would be all that
    counts; and so the share of a batch is the mean of those of its parts, whoever computes them."""
    off, size = (difference.float().square().mean(-1) for difference in (found_BNE - known_BNE, known_BNE))
    return _mean(off / size.clamp(min=torch.finfo(torch.float32).tiny), mask_BN)


def _mean(values_BN: torch.Tensor, mask_BN: torch.Tensor | None) -> torch.Tensor:
    if mask_BN is None:
        return values_BN.mean()
    mask_BN = mask_BN.to(values_BN.dtype)
    return (values_BN * mask_BN).sum() / mask_BN.sum().clamp(min=1)


@contextlib.contextmanager
def recorded(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """A list that a forward inside fills: what goes into the first layer, then what comes out of each."""
    states: list[torch.Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
