"""Attention with a bias by distance, by the Triton kernels under the interpreter, and written out in float64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_posenc.attention import triton_bias
from hf_posenc.attention.key_spans import spans_from_mask
from hf_posenc.attention.triton_bias import Tiling, Tilings, attention_with_distance_bias
from tests.gpu_harness import bounds, speed

NAMES = ("query", "key", "value", "bias")
SMALL = Tilings(Tiling(16, 16, 4, 1), Tiling(32, 16, 4, 1), Tiling(16, 32, 4, 1), Tiling(16, 16, 4, 1))
"""Tiles so small that a few tokens need several. Those of the backward pass are not all those of the forward pass."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What attention is computed of.

    Attributes:
        num_queries: the number of queries, which are the last tokens.
        num_keys: the number of keys.
        heads: heads and key heads.
        sizes: the head sizes of queries and values.
        mask: `all`, `causal`, or boolean and of all pairs, (2, 1, Q, K).
        dtype: of queries, keys and values.
        shared_bias: whether all heads share one vector.
    """

    num_queries: int = 37
    num_keys: int = 37
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (16, 16)
    mask: str | torch.Tensor = "causal"
    dtype: torch.dtype = torch.float32
    shared_bias: bool = False

    @property
    def scaling(self) -> float:
        return 0.3

    def tensors(self) -> dict[str, torch.Tensor]:
        """Queries, keys and values, in memory by token first as models have them, and the bias."""
        generator = torch.Generator().manual_seed(1)

        def draw(length: int, num_heads: int, size: int) -> torch.Tensor:
            return torch.randn(2, length, num_heads, size, generator=generator).to(self.dtype).transpose(1, 2)

        num_heads, num_key_heads = self.heads
        num_distances = self.num_queries + self.num_keys - 1
        return {
            "query": draw(self.num_queries, num_heads, self.sizes[0]),
            "key": draw(self.num_keys, num_key_heads, self.sizes[0]),
            "value": draw(self.num_keys, num_key_heads, self.sizes[1]),
            "bias": torch.randn(1 if self.shared_bias else num_heads, num_distances, generator=generator),
        }

    def visible(self) -> torch.Tensor:
        """(B or 1, 1, Q, K): True where a key is visible."""
        if isinstance(self.mask, torch.Tensor):
            return self.mask
        pairs = torch.ones(1, 1, self.num_queries, self.num_keys, dtype=torch.bool)
        return pairs if self.mask == "all" else pairs.tril(self.num_keys - self.num_queries)


def run_kernels(inputs: Inputs, dropout: float = 0.0, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, (B, Q, H, E), and all gradients, by the kernels. `changes` replaces inputs."""
    tensors = {name: tensor.requires_grad_() for name, tensor in {**inputs.tensors(), **changes}.items()}
    spans = spans_from_mask(inputs.mask, 2) if isinstance(inputs.mask, torch.Tensor) else None
    assert spans is not None or isinstance(inputs.mask, str)
    output = attention_with_distance_bias(
        *tensors.values(), scaling=inputs.scaling, causal=inputs.mask == "causal", spans=spans, dropout=dropout
    )
    return _with_gradients(output, tensors, inputs.dtype)


def run_dense(
    inputs: Inputs, factors: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """The same with all scores written out. `factors` multiplies the weights, as dropout does."""
    tensors = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.tensors().items()}
    query, key, value, bias = tensors.values()
    repeats = inputs.heads[0] // inputs.heads[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    index = torch.arange(inputs.num_keys) - torch.arange(inputs.num_queries)[:, None] + inputs.num_queries - 1
    scores = inputs.scaling * query @ key.transpose(-1, -2) + bias[:, index]
    visible = inputs.visible()
    weights = scores.masked_fill(~visible, -1e4).softmax(-1) * visible.any(-1, keepdim=True)
    weights = weights if factors is None else weights * factors
    return _with_gradients((weights @ value).transpose(1, 2), tensors, inputs.dtype)


def _with_gradients(
    output: torch.Tensor, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The output, and the gradients that follow from the same gradient of the output in every run."""
    generator = torch.Generator().manual_seed(2)
    output.backward(torch.randn(output.shape, generator=generator).to(dtype).to(output.dtype))
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    return {"output": output.detach(), **{name: grad for name, grad in gradients.items() if grad is not None}}


def relative_errors(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The distance of each result from what is expected, relative to its norm."""
    assert result.keys() == expected.keys()
    errors = {}
    for name, wanted in expected.items():
        assert result[name].shape == wanted.shape, name
        errors[name] = float((result[name].double() - wanted.double()).norm() / wanted.double().norm())
    return errors


@contextlib.contextmanager
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Small tiles, and every access to memory checked. Yields the names of the kernels that ran."""
    launched: list[str] = []
    launch = triton_bias._launch

    def checked(kernel: Any, num_programs: int, tiling: Tiling, tensors: Any, *args: Any) -> None:
        launched.append(kernel.fn.__name__)
        with bounds.within(tensors), speed.patch_once():
            launch(kernel, num_programs, tiling, tensors, *args)

    with monkeypatch.context() as patch:
        patch.setattr(triton_bias, "_launch", checked)
        patch.setattr(triton_bias, "choose_tilings", lambda head_size, dtype: SMALL)
        yield launched
