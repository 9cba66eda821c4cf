"""The package's own Triton kernels, against attention with all scores written out in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

from hf_posenc.attention import triton_kernels
from tests.gpu_harness.interpreted.distance_bias import (
    Inputs,
    relative_errors,
    run_dense,
    run_kernels,
    small_tiles,
)

FLOAT32_TOLERANCE = 2e-6
"""Some dozens of terms are summed in another order, each with a rounding error of 6e-8."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
DROPOUT = 0.3
KERNELS = ["forward_kernel", "backward_query_kernel", "backward_key_kernel", "backward_bias_kernel"]
TRIANGLE = torch.ones(37, 37, dtype=torch.bool).tril()


def packed(*rows: list[int], num_padded: int = 0) -> torch.Tensor:
    """(2, 1, 37, 37): documents of these lengths in each row, the last ones hidden as padding."""
    documents = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in rows])
    visible = documents[:, :, None] == documents[:, None, :]
    visible[1, :, 37 - num_padded :] = False
    return visible[:, None]


DOCUMENTS = packed([11, 19, 7], [16, 21])
PADDING = torch.ones(2, 1, 37, 37, dtype=torch.bool)
PADDING[0, :, :, :18] = False
PADDING[1, :, :, 30:] = False
CASES = {
    "causal": Inputs(),
    "bidirectional": Inputs(21, 21, mask="all", heads=(2, 1)),
    "grouped heads": Inputs(21, 21, heads=(4, 2)),
    "one bias for all heads": Inputs(21, 21, shared_bias=True),
    "padded": Inputs(mask=PADDING),
    "padded, causal": Inputs(mask=PADDING & TRIANGLE, heads=(2, 1)),
    "documents": Inputs(mask=DOCUMENTS),
    "documents, causal, padded": Inputs(mask=packed([11, 26], [16, 21], num_padded=4) & TRIANGLE, heads=(4, 2)),
    "window": Inputs(mask=(TRIANGLE & ~TRIANGLE.tril(-9)).expand(2, 1, -1, -1)),
    "one query": Inputs(num_queries=1),
    "cached": Inputs(num_queries=5, heads=(2, 1)),
    "cached, padded": Inputs(num_queries=5, mask=(PADDING & TRIANGLE)[:, :, -5:]),
    "odd head sizes": Inputs(18, 18, sizes=(24, 20)),
}
TWO_TILES = Inputs(21, 21)
MISTAKES: dict[str, tuple[str, str, Inputs, list[str]]] = {
    "softmax across tiles": ("total = total * rescaled +", "total = total +", TWO_TILES, ["output"]),
    "one key too many": ("stop = queries + 1 +", "stop = queries + 2 +", TWO_TILES, ["output"]),
    "softmax backward": (
        "kept, weights * (d_weights - delta[:, None])",
        "kept, weights * d_weights",
        TWO_TILES,
        ["query", "key", "bias"],
    ),
    "deltas": ("delta + excess", "delta - 0.1", TWO_TILES, ["key", "bias"]),
    "lost diagonals": ("add_to_bias(d_bias, upper,", "add_to_bias(d_bias, 0 * upper,", TWO_TILES, ["bias"]),
    "lost rows": ("for row in range(batch_size):", "for row in range(1):", TWO_TILES, ["bias"]),
    "lost tiles": (
        "begin, end = tl.load(band_ranges + range_offset),",
        "begin, end = 1 + tl.load(band_ranges + range_offset),",
        CASES["window"],
        ["bias"],
    ),
    "other diagonals": ("shifted % BLOCK", "(shifted + 1) % BLOCK", TWO_TILES, ["bias"]),
    "bias of another head": (
        "bias_head = bias + head * bias_stride",
        "bias_head = bias",
        CASES["grouped heads"],
        ["key", "value"],
    ),
    "gradient of another head": ("d_bias += head_64 * num_distances", "", TWO_TILES, ["bias"]),
    "query of another head": ("query + head * query_strides[1]", "query", CASES["grouped heads"], ["key"]),
    "queries skipped": (
        "begin, end = tl.load(query_ranges",
        "end, begin = tl.load(query_ranges",
        CASES["padded"],
        ["key"],
    ),
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with small_tiles(monkeypatch) as names:
        yield names


def use_changed_kernels(old: str, new: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by a copy with a change in its source, which must apply."""
    source = Path(triton_kernels.__file__).read_text(encoding="utf-8")
    assert old in source, f"no kernel has {old!r}"
    path = directory / "changed_kernels.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, triton_kernels.__name__, module)


@pytest.mark.parametrize("inputs", CASES.values(), ids=CASES)
def test_kernels_match_written_out_attention(inputs: Inputs, launched: list[str]) -> None:
    errors = relative_errors(run_kernels(inputs), run_dense(inputs))
    assert launched == KERNELS
    assert max(errors.values()) < FLOAT32_TOLERANCE, errors


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", ["causal", "documents, causal, padded"])
def test_half_precision_is_as_good_as_written_out(case: str, dtype: torch.dtype) -> None:
    given = CASES[case]
    inputs = Inputs(heads=given.heads, mask=given.mask, dtype=dtype)
    expected = run_dense(inputs)
    limits = relative_errors(run_dense(inputs, dtype=dtype), expected)
    errors = relative_errors(run_kernels(inputs), expected)
    assert all(error < 2 * limits[name] + ROUNDING[dtype] for name, error in errors.items()), (errors, limits)


@triton.jit
def write_dropout(seed: Any, factors: Any, dropout: Any, NUM_HEADS: tl.constexpr) -> None:
    """The factors of 64 queries and keys, as one tile of each head."""
    for batch_head in range(2 * NUM_HEADS):
        drawn = triton_kernels.dropout_factors(seed, batch_head, tl.arange(0, 64), 0, dropout, 64)
        offsets = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(factors + batch_head * 64 * 64 + offsets, drawn)


def draw_factors(seed: int, num_heads: int) -> torch.Tensor:
    """(2, H, 64, 64): what weights are multiplied by."""
    torch.manual_seed(seed)
    factors = torch.empty(2, num_heads, 64, 64)
    write_dropout[(1,)](torch.randint(2**62, (1,)), factors, DROPOUT, num_heads)
    return factors


@pytest.mark.parametrize("case", ["grouped heads", "documents"])
def test_dropout_drops_the_same_weights_in_all_kernels(case: str) -> None:
    inputs = CASES[case]
    factors = draw_factors(5, inputs.heads[0])[:, :, : inputs.num_queries, : inputs.num_keys]
    torch.manual_seed(5)
    errors = relative_errors(run_kernels(inputs, DROPOUT), run_dense(inputs, factors))
    assert max(errors.values()) < FLOAT32_TOLERANCE, errors


def test_dropout_draws_independent_numbers() -> None:
    factors = draw_factors(5, 4)
    kept = factors > 0
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / (1 - DROPOUT)))
    assert abs(kept.float().mean() - (1 - DROPOUT)) < 0.01  # 32,768 draws: four standard deviations
    flat = kept.flatten(0, 1)
    pairs = [(flat[0], flat[1]), (flat[:, 1:], flat[:, :-1]), (flat[..., 1:], flat[..., :-1])]
    pairs.append((kept, draw_factors(6, 4) > 0))
    for one, other in pairs:
        both = (one & other).float().mean()
        assert abs(both - (1 - DROPOUT) ** 2) < 0.04, "heads, queries, keys and seeds are drawn independently"


@pytest.mark.parametrize(("old", "new", "inputs", "caught"), MISTAKES.values(), ids=MISTAKES)
def test_a_kernel_made_wrong_is_caught(
    old: str, new: str, inputs: Inputs, caught: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_changed_kernels(old, new, tmp_path, monkeypatch)
    errors = relative_errors(run_kernels(inputs), run_dense(inputs))
    assert all(not errors[name] < 100 * FLOAT32_TOLERANCE for name in caught), errors


def test_other_dropout_in_the_backward_pass_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_changed_kernels("queries, first_key, dropout", "queries, first_key + 4, dropout", tmp_path, monkeypatch)
    inputs = CASES["grouped heads"]
    factors = draw_factors(5, inputs.heads[0])[:, :, : inputs.num_queries, : inputs.num_keys]
    torch.manual_seed(5)
    errors = relative_errors(run_kernels(inputs, DROPOUT), run_dense(inputs, factors))
    assert errors["output"] < FLOAT32_TOLERANCE
    assert min(errors["key"], errors["value"]) > 0.01


def test_another_bias_is_caught() -> None:
    inputs = TWO_TILES
    bias = inputs.tensors()["bias"]
    bias[1, 18] += 0.1
    assert relative_errors(run_kernels(inputs, bias=bias), run_dense(inputs))["output"] > 100 * FLOAT32_TOLERANCE


def test_an_access_outside_of_the_bias_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_changed_kernels("(positions >= 0) & ", "", tmp_path, monkeypatch)
    with pytest.raises(InterpreterError, match="OutOfBoundsError"):
        run_kernels(TWO_TILES)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradient_of_the_bias_is_exact_in_half_precision(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas from rounded outputs would shift all gradients of a query's scores in the same direction."""
    inputs = Inputs(21, 21, dtype=dtype)
    expected = run_dense(inputs)
    assert relative_errors(run_kernels(inputs), expected)["bias"] < FLOAT32_TOLERANCE
    use_changed_kernels("delta + excess", "delta", tmp_path, monkeypatch)
    assert relative_errors(run_kernels(inputs), expected)["bias"] > ROUNDING[dtype] / 8


def test_the_gradient_of_the_bias_is_the_same_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs programs in any order: here, from the last to the first."""
    inputs = CASES["one bias for all heads"]
    result = run_kernels(inputs)["bias"]
    set_index = InterpreterBuilder.set_grid_idx
    order: list[int] = []

    def backwards(self: Any, x: int, y: int, z: int) -> None:
        order.append(self.grid_dim[0] - 1 - x)
        set_index(self, order[-1], y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    assert torch.equal(run_kernels(inputs)["bias"], result)
    assert order[0] > 0
