"""How much each frequency of a rotation is used: its share of what queries and keys make of each other.

Shape legend: N tokens, H heads, G heads of keys, D width of a head, F pairs of features that turn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..attention.function import apply_rotation
from .subjects import names_of, positioned, refuse_foreign
from .turning import turning, turns_of


@dataclasses.dataclass(frozen=True)
class Frequencies:
    """The logit of query and key is a sum over pairs of features; each has a frequency."""

    name: str
    wavelengths: torch.Tensor
    """(F,): positions for a whole turn, shortest first."""
    share: torch.Tensor
    """(layers, heads, F): of the mean magnitude of all parts of the logits, that of each pair's part."""
    unturned: torch.Tensor
    """(layers, heads): the share of the features that are not turned."""
    layers: tuple[int, ...]
    """The layers that turn anything."""

    def __str__(self) -> str:
        mean = self.share.mean((0, 1))
        slow = self.wavelengths > self.wavelengths.median()
        most = int(mean.argmax())
        return (
            f"{self.name}: of {len(mean)} frequencies the one of wavelength {self.wavelengths[most]:.0f} is used most, "
            f"with {mean[most]:.1%} of the logits' magnitude (even use: {1 / len(mean):.1%}); the slower half has "
            f"{mean[slow].sum():.1%}"
        )


def frequencies(model: nn.Module, ids: torch.Tensor, name: str = "") -> Frequencies:
    """Run token ids, (B, N), without padding, through a model, and take the products of its queries and keys apart."""
    if ids.dim() != 2 or ids.shape[1] < 2 or not len(ids):
        raise ValueError(f"ids must be of shape (rows, tokens), with 2 tokens or more, got {tuple(ids.shape)}")
    with positioned(model) as base:
        refuse_foreign(base, ids)
        ids = ids.to(base.device)
        posenc = base.prepare_inputs({"input_ids": ids[:1]}).positions
        modules = dict(base.architecture.attentions(base))
        layers = [layer for layer in modules if turns_of(posenc, layer)]
        found = turning(posenc, layers[0] if layers else 0, names_of(base))
        sums: dict[int, torch.Tensor] = {}

        def watch(layer: int) -> Any:
            def before(module: Any, args: Any, kwargs: Any) -> None:
                states = args[0] if args else kwargs["hidden_states"]
                seen = kwargs["posenc"]
                parts = _magnitudes(module, states, turns_of(seen, layer), found.pairs, seen.causal)
                sums[layer] = sums[layer] + parts if layer in sums else parts

            return before

        hooks = [modules[layer].register_forward_pre_hook(watch(layer), with_kwargs=True) for layer in layers]
        try:
            for row in ids:
                base(input_ids=row[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        total = torch.stack([sums[layer] for layer in layers]).cpu()
        share = total / total.sum(-1, keepdim=True).clamp(min=1e-30)
        shown = name or names_of(base)
        return Frequencies(shown, found.wavelengths, share[..., :-1], share[..., -1], tuple(layers))


def _magnitudes(module: Any, states: torch.Tensor, turns: Any, pairs: torch.Tensor, causal: bool) -> torch.Tensor:
    """(H, F + 1): the sum over visible pairs of the magnitude of each part; the last is of features not turned."""
    size = turns[0][0].shape.head_size
    query, key = (found.unflatten(-1, (-1, size)).transpose(1, 2) for found in module.projected(states))
    query_HND, key_GND = apply_rotation(query, turns, False)[0].double(), apply_rotation(key, turns, True)[0].double()
    key_HND = key_GND.repeat_interleave(len(query_HND) // len(key_GND), dim=0)
    rest = sorted(set(range(size)) - set(pairs.flatten().tolist()))

    def part(features: list[int]) -> torch.Tensor:
        product = query_HND[..., features].matmul(key_HND[..., features].transpose(-1, -2)).abs()
        return (product.tril() if causal else product).sum((-1, -2))

    return torch.stack([*(part(pair) for pair in pairs.tolist()), part(rest)], dim=-1)
