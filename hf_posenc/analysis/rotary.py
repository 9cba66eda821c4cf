"""Rotary encodings: decay of similarity with distance, and how much attention uses each frequency.

Shape legend: H heads, N tokens, D head size, F rotated pairs of features.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

from ..attention import apply_rotation
from ..errors import PosEncError
from .inspection import ModelInspector, inspect_model


class NoRotationError(PosEncError):
    """The model does not rotate queries and keys."""


@dataclasses.dataclass(frozen=True)
class RotaryDecay:
    """Similarity of a query and a key with equal features, by distance; for RoPE, the mean cosine of all angles."""

    name: str
    similarity: torch.Tensor
    """(N,): by distance from query back to key, relative to unrotated vectors."""
    similarity_by_pair: torch.Tensor
    """(F, N): for each rotated pair of features, highest frequency first."""
    wavelengths: torch.Tensor
    """(F,): positions per full rotation."""

    def __str__(self) -> str:
        length, below = len(self.similarity), (self.similarity < 0.5).nonzero()
        half = f"falls below 0.5 at distance {int(below[0])}" if len(below) else "stays above 0.5"
        slow = int((self.wavelengths > length).sum())
        return (
            f"{self.name}: similarity {half}, {self.similarity[-1]:.3f} at distance {length - 1}; {slow} of "
            f"{len(self.wavelengths)} pairs complete no rotation within {length} positions"
        )


def rotary_decay(model: nn.Module, length: int = 512, layer: int = 0) -> RotaryDecay:
    """Measure how the similarity of equal query and key vectors decays with distance.

    Args:
        model: A stock or converted model, with or without a head.
        length: Number of positions.
        layer: The layer whose rotation to measure.

    Returns:
        Similarity by distance, in total and by pair of features.

    Raises:
        NoRotationError: If the layer does not rotate queries and keys.

    Example:
        >>> rotary_decay(build_model("rope"), 512).similarity[0]
        tensor(1., dtype=torch.float64)
    """
    with inspect_model(model, length) as inspector:
        pairs, wavelengths = _rotary_pairs(inspector, layer)
        ones = torch.ones(1, 1, length, inspector.shape.head_size, device=inspector.base.device)
        rotations = inspector.rotations(layer)
        query_ND, key_ND = (apply_rotation(ones, rotations, keys)[0, 0].double().cpu() for keys in (False, True))
    products = (query_ND[-1] * key_ND).flip(0)
    return RotaryDecay(inspector.name, products.mean(-1), products[:, pairs].mean(-1).T.clone(), wavelengths)


@dataclasses.dataclass(frozen=True)
class RotaryFrequencies:
    """Contribution of each rotary frequency to the attention scores, which are sums over pairs of features."""

    name: str
    wavelengths: torch.Tensor
    """(F,): positions per full rotation, shortest first."""
    share: torch.Tensor
    """(layers, heads, F): share of each pair in the mean magnitude of all contributions."""
    unrotated_share: torch.Tensor
    """(layers, heads): share of the features that are not rotated."""
    layers: tuple[int, ...]
    """The layers that rotate."""

    def __str__(self) -> str:
        mean = self.share.mean((0, 1))
        top, slow = int(mean.argmax()), self.wavelengths > self.wavelengths.median()
        return (
            f"{self.name}: of {len(mean)} frequencies, wavelength {self.wavelengths[top]:.0f} contributes most with "
            f"{mean[top]:.1%} (uniform: {1 / len(mean):.1%}); the slower half contributes {mean[slow].sum():.1%}"
        )


def rotary_frequencies(model: nn.Module, input_ids: torch.Tensor, name: str = "") -> RotaryFrequencies:
    """Measure how much each rotary frequency contributes to the attention scores on a text.

    Args:
        model: A stock or converted model, with or without a head.
        input_ids: Token ids of shape (rows, tokens), without padding.
        name: Label for plots; by default the name of the scheme.

    Returns:
        Shares by layer, head and frequency.

    Raises:
        NoRotationError: If no layer rotates queries and keys.
        PosEncError: If `input_ids` do not fit the model.
    """
    with inspect_model(model, input_ids.shape[-1]) as inspector:
        layers = [layer for layer in range(len(inspector.attentions)) if inspector.rotations(layer)]
        pairs, wavelengths = _rotary_pairs(inspector, layers[0] if layers else 0)
        unrotated = sorted(set(range(inspector.shape.head_size)) - set(pairs.flatten().tolist()))
        features = (*pairs.tolist(), unrotated)
        totals = torch.zeros(len(inspector.attentions), inspector.shape.num_heads, len(features), dtype=torch.float64)

        def add_magnitudes(layer: int, hidden_states_NE: torch.Tensor, weights_HNN: torch.Tensor) -> None:
            rotations = inspector.rotations(layer)
            if not rotations:
                return
            query, key = inspector.attentions[layer].project_rows(hidden_states_NE)
            query, key = (
                apply_rotation(states[None], rotations, keys)[0].double()
                for states, keys in ((query, False), (key, True))
            )
            for number, pair in enumerate(features):
                scores_HNN = (query[..., pair] @ key[..., pair].mT).abs()
                scores_HNN = scores_HNN.tril() if inspector.positions.causal else scores_HNN
                totals[layer, :, number] += scores_HNN.sum((-1, -2)).cpu()

        inspector.run(input_ids, add_magnitudes)
    share = totals[layers] / totals[layers].sum(-1, keepdim=True).clamp(min=1e-30)
    return RotaryFrequencies(name or inspector.name, wavelengths, share[..., :-1], share[..., -1], tuple(layers))


def _rotary_pairs(inspector: ModelInspector, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(F, 2) features that rotate together and (F,) wavelengths, found by rotating unit vectors to position 1."""
    rotations = inspector.rotations(layer)
    if not rotations:
        raise NoRotationError(f"{inspector.name} does not rotate queries and keys in layer {layer}; rope and xpos do")
    size, length = inspector.shape.head_size, inspector.positions.key_length
    units_BHND = torch.eye(size, device=inspector.base.device)[None, :, None].expand(1, size, length, size)
    rotated = apply_rotation(units_BHND, rotations, False)[0, :, 1].double().cpu()
    first, second = rotated.triu(1).nonzero(as_tuple=True)
    if len(torch.cat([first, second]).unique()) < 2 * len(first):
        raise PosEncError(f"{inspector.name} combines rotations of different layouts: features do not rotate in pairs")
    angles, order = torch.atan2(rotated[first, second].abs(), rotated[first, first]).sort(descending=True, stable=True)
    return torch.stack([first, second], dim=1)[order], 2 * math.pi / angles
