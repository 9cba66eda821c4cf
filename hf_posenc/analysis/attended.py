"""Where a model looks: attention by distance, for each layer and head, on a text.

Shape legend: B batch, N tokens, H heads, L = 2 N - 1 distances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..patches.variants import PosEncBaseModel
from .subjects import architecture_of, base_of, evaluating, names_of, refuse_foreign


@dataclasses.dataclass(frozen=True)
class Attended:
    """Attention weights added up by the distance from query to key."""

    name: str
    distances: torch.Tensor
    """(L,): key minus query, ascending."""
    share: torch.Tensor
    """(layers, heads, L): of a query's attention that goes to this distance, averaged over queries; sums to 1."""
    mean: torch.Tensor
    """(layers, heads, L): weight of a pair at this distance, averaged over all such pairs."""

    @property
    def reach(self) -> torch.Tensor:
        """(layers, heads): the mean distance that is looked over."""
        return (self.share * self.distances.abs()).sum(-1)

    def binned(self) -> tuple[list[str], torch.Tensor]:
        """(layers, heads, bins) of the share in bins that double in width (0, 1, 2-3, 4-7, ...), both ways together."""
        apart = self.distances.abs()
        names, shares, low = ["0"], [self.share[..., apart == 0].sum(-1)], 1
        while low <= int(apart.max()):
            high = min(2 * low - 1, int(apart.max()))
            names.append(f"{low}" if low == high else f"{low}-{high}")
            shares.append(self.share[..., (apart >= low) & (apart <= high)].sum(-1))
            low = 2 * low
        return names, torch.stack(shares, dim=-1)

    def __str__(self) -> str:
        layers = "; ".join(
            f"layer {number}: {', '.join(f'{far:.1f}' for far in heads)}"
            for number, heads in enumerate(self.reach.tolist())
        )
        return f"{self.name}: mean distance looked over, by head: {layers}"


@torch.no_grad()
def attention_by_distance(model: nn.Module, ids: torch.Tensor, name: str = "") -> Attended:
    """Run token ids, (B, N), without padding, through a model, a row at a time, and add its weights up by distance.

    These are the weights of the model's own eager attention; only those of one row and layer are held at a time.
    """
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"ids must be of shape (rows, tokens), got {tuple(ids.shape)}")
    architecture, base = architecture_of(model), base_of(model)
    refuse_foreign(base, ids)
    length = ids.shape[1]
    places = torch.arange(length)
    by_pair = (places - places[:, None] + length - 1).flatten()
    sums: dict[int, torch.Tensor] = {}

    def watch(layer: int) -> Any:
        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            weights = output[1]
            assert weights is not None, "eager attention returns its weights"
            flat = weights[0].double().flatten(1)
            by_distance = flat.new_zeros(len(flat), 2 * length - 1).index_add_(1, by_pair.to(flat.device), flat)
            sums[layer] = sums[layer] + by_distance if layer in sums else by_distance

        return after

    hooks = [
        module.register_forward_hook(watch(layer), with_kwargs=True) for layer, module in architecture.attentions(base)
    ]
    try:
        with _eager(base):
            for row in ids.to(base.device):
                base(input_ids=row[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    total = torch.stack([sums[layer] for layer in sorted(sums)]).cpu()
    distances = torch.arange(1 - length, length)
    pairs = len(ids) * (length - distances.abs())
    shown = name or (names_of(base) if isinstance(base, PosEncBaseModel) else f"stock {architecture.model_type}")
    kept = distances <= 0 if not total[..., distances > 0].any() else distances < length
    return Attended(shown, distances[kept], total[..., kept] / (len(ids) * length), (total / pairs)[..., kept])


@contextmanager
def _eager(base: Any) -> Iterator[None]:
    """The model with eager attention and without dropout, while this lasts."""
    before = base.config._attn_implementation
    with evaluating(base):
        base.set_attn_implementation("eager")
        try:
            yield
        finally:
            base.set_attn_implementation(before)
