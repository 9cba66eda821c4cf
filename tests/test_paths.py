"""The fast ways of the engine are taken, in several runs too, and give what the plain way gives, and its gradients."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import tiny
import torch
from cases import ARCHITECTURES, CASES, Case, pairs
from transformers import DynamicCache

from hf_posenc import attention, bands, strided

SCORING = [case for case in CASES if case.scores]
by_pair = pairs(ARCHITECTURES, SCORING)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs so short that the inputs of these tests take several, the last of them not whole."""
    monkeypatch.setattr(strided, "CAUSAL_RUN", 5)
    monkeypatch.setattr(bands, "RUN", 4)


def logits_and_gradients(model: Any, ids: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    output = model(ids, use_cache=False, **inputs).logits
    visible = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.linspace(-1, 1, output[visible].numel(), dtype=output.dtype).view_as(output[visible])
    (output[visible] * weights).sum().backward()
    return output.detach()[visible], {name: parameter.grad for name, parameter in model.named_parameters()}


@by_pair
@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "all of a row"])
@pytest.mark.usefixtures("short_runs")
def test_runs_equal_the_plain_way(case: Case, architecture: str, padding: str) -> None:
    dtype = torch.float32 if architecture == "llama" and padding != "none" else torch.float64  # stock eager's own NaN
    model, ids = tiny.model(architecture, case.scheme, dtype), tiny.tokens(3, 17)
    mask = torch.ones_like(ids)
    mask[1, : 6 if padding in ("left", "both") else 0] = 0
    mask[2, 12 if padding in ("right", "both") else 17 :] = 0
    mask[0, : 17 if padding == "all of a row" else 0] = 0
    inputs = {} if padding == "none" else {"attention_mask": mask}
    atol = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else oracles.tolerance(architecture)}
    found, gradients = logits_and_gradients(model, ids, **inputs)
    with torch.no_grad():  # in place, and by heads, where there is no gradient
        without = model(ids, use_cache=False, **inputs).logits[mask.bool()]
    model.set_attn_implementation("eager")
    expected, plain = logits_and_gradients(model, ids, **inputs)
    torch.testing.assert_close(found, expected, **atol)
    torch.testing.assert_close(without, expected, **atol)
    for name, gradient in plain.items():
        if gradient is not None:
            scale = gradient.abs().max().clamp(min=1)
            torch.testing.assert_close(
                gradients[name] / scale, gradient / scale, **atol, msg=lambda text, n=name: f"{n}: {text}"
            )


@pairs(["gpt2", "llama"], SCORING)
@pytest.mark.usefixtures("short_runs")
def test_runs_behind_a_cache_equal_the_whole(case: Case, architecture: str) -> None:
    """More keys than queries, in several runs."""
    model, ids, cache = tiny.model(architecture, case.scheme), tiny.tokens(2, 23), DynamicCache()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :9], past_key_values=cache).logits
        second = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **tiny.same(architecture))


@pytest.mark.parametrize(
    ("scheme", "inputs", "way"),
    [
        ("alibi", {}, "sdpa_strided"),
        ("t5", {"attention_mask": torch.tensor([[0, 0, *[1] * 10], [1] * 12])}, "sdpa_strided_by_rows"),
        ({"type": "shaw", "values": False}, {}, "sdpa_by_heads"),
        ("deberta", {"attention_mask": torch.tensor([[0, 0, *[1] * 10], [1] * 12])}, "sdpa_by_heads"),
        ("alibi", {"attention_mask": torch.tensor([[1, 0, *[1] * 10], [1] * 12])}, "sdpa_by_heads"),
        ("shaw", {}, "weighted"),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_the_way_that_is_taken(
    architecture: str, scheme: Any, inputs: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, taken = tiny.model(architecture, scheme), []

    def watched(name: str, real: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            taken.append(name)
            return real(*args, **kwargs)

        return run

    for name in ("sdpa_strided", "sdpa_strided_by_rows", "sdpa_by_heads", "weighted"):
        monkeypatch.setattr(attention, name, watched(name, getattr(attention, name)))
    with torch.no_grad():
        model(tiny.tokens(2, 12), use_cache=False, **inputs)
    assert taken == [way] * tiny.LAYERS


def test_bands_put_each_product_at_its_distance() -> None:
    """Against a loop; and the control, rows in the wrong order."""
    generator = torch.Generator().manual_seed(0)
    for queries, keys in ((1, 1), (1, 9), (3, 9), (9, 9), (300, 310), (9, 4)):
        states, others = (torch.randn(2, 2, size, 3, generator=generator) for size in (queries, keys))
        rows = torch.randn(2, queries + keys - 1, 3, generator=generator)
        found = bands.products_by_distance(states, rows, keys)
        of_keys = bands.products_of_keys_by_distance(others, rows, queries)
        for i in {0, queries // 2, queries - 1}:
            for j in {0, keys // 2, keys - 1}:
                row = rows[:, j - i + queries - 1]
                torch.testing.assert_close(found[:, :, i, j], (states[:, :, i] * row).sum(-1))
                torch.testing.assert_close(of_keys[:, :, i, j], (others[:, :, j] * row).sum(-1))
        total = torch.zeros_like(found)
        bands.add_products_by_distance(total, states, rows)
        bands.add_products_of_keys_by_distance(total, others, rows)
        torch.testing.assert_close(total, found + of_keys)
        if queries * keys > 1:
            assert (bands.products_by_distance(states, rows.flip(1), keys) - found).abs().max() > 1e-2


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.usefixtures("short_runs")
def test_the_backward_pass_of_a_trained_bias_is_its_gradient(causal: bool, groups: int) -> None:
    """Numerically, in float64; grouped key heads, an odd number of heads at a time, several runs."""
    generator = torch.Generator().manual_seed(0)
    length, keys = 7, 7 if causal else 9
    shapes = [(2, 4, length, 3), (2, groups, keys, 3), (2, groups, keys, 3), (4, length + keys - 1)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(query: Any, key: Any, value: Any, values: Any) -> torch.Tensor:
        def stock(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(q, k, v, attn_mask=mask, scale=kwargs["scaling"], enable_gqa=True).transpose(1, 2), None

        return strided.sdpa_strided(stock, torch.nn.Module(), query, key, value, values, causal, scaling=0.7)[0]

    assert "_TrainedBias" in attend(*inputs).grad_fn.name()
    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_half_precision_trains_a_bias_as_float32_does(architecture: str) -> None:
    gradients = []
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        model = tiny.model(architecture, "t5", torch.bfloat16).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(tiny.tokens(4, 16), use_cache=False).logits
        output.float().square().mean().backward()
        gradients.append(model.base_model.position_scheme[0].table.weight.grad.float())
    for narrow in gradients[1:]:
        assert narrow.isfinite().all()
        assert (narrow - gradients[0]).norm() < 0.1 * gradients[0].norm()
