"""A slow attention for tests of sliding windows: loops decide what is visible, and terms follow their definitions.

It takes the place of the attention function of a stock model whose rotation is turned off.

Shape legend: B batch, H heads, N tokens, D head size, R rows of a table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.patches import ARCHITECTURES
from tests.support import families, oracles
from tests.support import tiny_models as tiny

WINDOW, LENGTH, FIRST_DOCUMENT = 4, 14, 6
MAX_DISTANCE = 3
"""Of shaw and deberta: shorter than the window, so that distances are clipped inside it."""
SCHEMES: dict[str, Any] = {
    "alibi": "alibi",
    "t5": {"type": "t5", "num_buckets": 8, "max_distance": 20},
    "shaw": {"type": "shaw", "max_distance": MAX_DISTANCE},
    "deberta": {"type": "deberta", "max_distance": MAX_DISTANCE},
    "alibi+ssmax": ["alibi", {"type": "temperature", "form": "ssmax"}],
}
FULL, SLIDING = "full_attention", "sliding_attention"
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral": ({"sliding_window": WINDOW}, {"sliding_window": None}),
    "gemma3_text": (
        {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
        {"layer_types": [FULL, FULL, FULL]},
    ),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        {"use_sliding_window": False},
    ),
    "modernbert": (
        {"local_attention": 2 * WINDOW, "layer_types": [FULL, SLIDING, SLIDING]},
        {"layer_types": [FULL, FULL, FULL]},
    ),
}
"""For each model type, config changes with a window and without."""
WINDOWED_LAYERS = {"mistral": [0, 1, 2], "gemma3_text": [0, 2], "qwen2": [1, 2], "modernbert": [1, 2]}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tokens of a batch lie in its rows."""

    positions_BN: torch.Tensor
    documents_BN: torch.Tensor
    real_BN: torch.Tensor
    """False at padding."""
    inputs: dict[str, torch.Tensor]
    """What a user would pass to the model."""


def layout(padding: str, packed: bool, gap: int = 0) -> Layout:
    """A batch of two rows: one padded on a side, both perhaps of two documents, or with a gap in the positions."""
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    if padding == "left":
        real[0, :3] = False
    elif padding == "right":
        real[1, -4:] = False
    slots = torch.arange(LENGTH).expand(2, -1)
    positions = (slots - (~real).sum(-1, keepdim=True) * (padding == "left")).clamp(min=0)
    second = slots >= FIRST_DOCUMENT
    if packed:
        positions = torch.where(second, slots - FIRST_DOCUMENT, positions)
    positions = positions + gap * second
    inputs = {} if padding == "none" else {"attention_mask": real.long()}
    if packed or gap:
        inputs["position_ids"] = positions
    return Layout(positions, second.long() * packed, real, inputs)


def visible_pairs(batch: Layout, causal: bool, window: int | None) -> torch.Tensor:
    """(B, N, N): True where a query may see a key. A window counts slots, as in the stock masks."""
    visible = []
    for documents, real in zip(batch.documents_BN.tolist(), batch.real_BN.tolist(), strict=True):
        for query, key in itertools.product(range(LENGTH), range(LENGTH)):
            same_document = documents[query] == documents[key]
            not_later = key <= query or not causal
            distance = query - key if causal else abs(query - key)
            inside = window is None or distance < window + (not causal)  # bidirectional windows include the edge
            visible.append(real[key] and same_document and not_later and inside)
    return torch.tensor(visible).view(-1, LENGTH, LENGTH)


def project_rows(module: Any, rows_RE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a position table through the query and key projections of a layer, two of (H, R, D)."""
    if hasattr(module, "Wqkv"):
        query, key, _ = module.Wqkv(rows_RE).view(len(rows_RE), 3, tiny.HEADS, -1).unbind(1)
    else:
        query = module.q_proj(rows_RE).view(len(rows_RE), tiny.HEADS, -1)
        key = module.k_proj(rows_RE).view(len(rows_RE), 2, -1)
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        key = key.repeat_interleave(tiny.HEADS // 2, dim=1)
    return query.transpose(0, 1), key.transpose(0, 1)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Computes attention under a scheme, with the parameters of a variant."""

    name: str
    parameters: dict[str, torch.Tensor]
    batch: Layout
    causal: bool
    windowed_layers: list[int]

    def layer_parameter(self, layer: int, name: str) -> torch.Tensor:
        (parameter,) = (
            value for path, value in self.parameters.items() if f"layers.{layer}." in path and path.endswith(f".{name}")
        )
        return parameter

    def scheme_parameter(self, name: str) -> torch.Tensor:
        (parameter,) = (
            value for path, value in self.parameters.items() if "layers." not in path and path.endswith(f"0.{name}")
        )
        return parameter

    def distances_BNN(self) -> torch.Tensor:
        """Key position minus query position."""
        return self.batch.positions_BN[:, None, :] - self.batch.positions_BN[:, :, None]

    def clipped_BNN(self) -> torch.Tensor:
        """The row of shaw's tables for each pair."""
        return MAX_DISTANCE - self.distances_BNN().clamp(-MAX_DISTANCE, MAX_DISTANCE)

    def scores(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, scaling: float, visible: torch.Tensor
    ) -> torch.Tensor:
        layer, distances = module.layer_idx, self.distances_BNN()
        content = scaling * query @ key.mT
        if self.name == "none":
            return content
        if self.name == "alibi+ssmax":
            slope, change = (self.layer_parameter(layer, name)[:, None, None] for name in ("slope", "content_change"))
            counts = visible.sum(-1, keepdim=True).clamp(min=1).to(query.dtype)
            content = content * (slope * counts.log() + 1 + change)
        if self.name.startswith("alibi"):
            slopes = torch.tensor([2.0 ** (-8 * (head + 1) / tiny.HEADS) for head in range(tiny.HEADS)])
            return content - slopes[:, None, None] * distances[:, None].abs()
        if self.name == "t5":
            buckets = T5Attention._relative_position_bucket(distances, not self.causal, 8, 20)
            return content + self.scheme_parameter("table.weight")[buckets].movedim(-1, 1)
        if self.name == "shaw":
            vectors = self.layer_parameter(layer, "keys")[self.clipped_BNN()]
            return content + scaling * torch.einsum("bhqd,bqkd->bhqk", query, vectors)
        table = self.scheme_parameter("table")
        norm = (self.scheme_parameter("norm.weight"), self.scheme_parameter("norm.bias"))
        table = nn.functional.layer_norm(table, table.shape[-1:], *norm, eps=1e-7)
        query_rows, key_rows = project_rows(module, table)
        rows = (MAX_DISTANCE - distances).clamp(0, 2 * MAX_DISTANCE - 1)
        positional = torch.einsum("bhqd,hbqkd->bhqk", query, key_rows[:, rows])
        positional = positional + torch.einsum("bhkd,hbqkd->bhqk", key, query_rows[:, rows])
        change, gain = (self.layer_parameter(layer, name) for name in ("content_change", "position_gain"))
        return content * (1 + change)[:, None, None] + gain[:, None, None] * scaling / math.sqrt(3) * positional

    def attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        key, value = (states.repeat_interleave(tiny.HEADS // states.shape[1], dim=1) for states in (key, value))
        window = WINDOW if module.layer_idx in self.windowed_layers else None
        visible = visible_pairs(self.batch, self.causal, window)[:, None]
        scores = self.scores(module, query, key, kwargs.get("scaling") or query.shape[-1] ** -0.5, visible)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # padding sees nothing
        states = weights @ value
        if self.name == "shaw":
            vectors = self.layer_parameter(module.layer_idx, "values")[self.clipped_BNN()]
            states = states + torch.einsum("bhqk,bqkd->bhqd", weights, vectors)
        return states.transpose(1, 2), weights


@contextlib.contextmanager
def without_rotation(model: Any) -> Iterator[None]:
    """Turn off the rotary code of a stock model."""
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[type(model).__module__]
        patch.setattr(module, "apply_rotary_pos_emb", lambda query, key, *args, **kwargs: (query, key))
        yield


def reference_output(
    model_type: str, name: str, variant: Any, batch: Layout, ids: torch.Tensor, in_window: bool
) -> torch.Tensor:
    """The hidden states of the stock model with the reference attention."""
    changes = SETTINGS[model_type][0 if in_window else 1]
    stock = families.model(model_type, **changes)
    causal = ARCHITECTURES[model_type].is_causal(stock.config)
    windowed_layers = WINDOWED_LAYERS[model_type] if in_window else []
    reference = Reference(name, dict(variant.named_parameters()), batch, causal, windowed_layers)
    with without_rotation(stock), oracles.attention_function(stock, reference.attention):
        return families.output(stock, ids, **({"use_cache": False} if causal else {}))
