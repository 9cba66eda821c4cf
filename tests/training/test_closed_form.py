"""The start without gradients: what each piece computes, and that the stock model's attention is approached."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.training import closed_form_start
from hf_posenc.training.closed_form import HeadOrders
from hf_posenc.training.head_matching import bias_divergence, match_fixed, match_shared
from tests.support import families, oracles
from tests.support import tiny_models as tiny
from tests.support.sampling import some

LENGTH = 24
T5 = {"type": "t5", "num_buckets": 16, "max_distance": 32}


def stock_and_variant(scheme: Any, architecture: str = "llama") -> tuple[Any, Any]:
    """A stock model whose attention depends on positions, and its variant."""
    stock = tiny.model(architecture, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight", "c_attn.weight")):
                parameter.mul_(3)
    return stock, hf_posenc.retrofit(copy.deepcopy(stock), scheme)


def divergence(stock: Any, variant: Any, ids: torch.Tensor, head_orders: HeadOrders | None = None) -> float:
    return hf_posenc.fit(stock, variant, ids, steps=0, rows=2, head_orders=head_orders).before


@some(
    "scheme",
    ["alibi", T5, {**T5, "shared": False}, "kerple", {"type": "alibi", "learned": "per_layer"}, "sandwich", "none"],
    fast=["alibi", {**T5, "shared": False}],
)
def test_attention_comes_closer(scheme: Any) -> None:
    (stock, variant), ids = stock_and_variant(scheme), tiny.tokens(8, LENGTH)
    before = divergence(stock, variant, ids)
    orders = closed_form_start(stock, variant, ids)
    assert divergence(stock, variant, ids, orders) < 0.9 * before


@pytest.mark.parametrize("piece", ["reorder_heads", "fold_rotation", "match_biases"])
def test_each_piece_helps_and_can_be_left_out(piece: str) -> None:
    (stock, variant), ids = stock_and_variant(T5), tiny.tokens(8, LENGTH)
    without = copy.deepcopy(variant)
    orders = closed_form_start(stock, variant, ids)
    other_orders = closed_form_start(stock, without, ids, **{piece: False})
    assert divergence(stock, variant, ids, orders) < divergence(stock, without, ids, other_orders)


def test_progress_bars_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    (stock, variant), ids = stock_and_variant(T5), tiny.tokens(2, LENGTH)
    closed_form_start(stock, copy.deepcopy(variant), ids)
    assert capsys.readouterr().err == ""
    closed_form_start(stock, variant, ids, progress=True)
    shown = capsys.readouterr().err
    assert "Reading attention: 100%" in shown
    assert "Matching biases: 100%" in shown


@torch.no_grad()
def test_nothing_changes_where_the_own_encoding_stays() -> None:
    (stock, variant), ids = stock_and_variant(["rope", T5]), tiny.tokens(8, LENGTH)
    before = {name: weight.clone() for name, weight in variant.state_dict().items()}
    assert closed_form_start(stock, variant, ids) == [{}]
    assert all(torch.equal(weight, before[name]) for name, weight in variant.state_dict().items())


@torch.no_grad()
def test_reordered_heads_compute_the_same_without_biases() -> None:
    """Between layers, nothing depends on the order of heads; the stock model is left alone."""
    (stock, variant), ids = stock_and_variant("alibi"), tiny.tokens(8, LENGTH)
    stock_weights = {name: weight.clone() for name, weight in stock.state_dict().items()}
    (orders,) = closed_form_start(stock, variant, ids, fold_rotation=False)
    assert orders.keys() == set(range(tiny.LAYERS))
    assert any(order.tolist() != sorted(order.tolist()) for order in orders.values())
    for order in orders.values():  # LLaMA's four heads share two keys
        assert {frozenset(pair) for pair in order.view(2, 2).tolist()} == {frozenset({0, 1}), frozenset({2, 3})}
    restored = hf_posenc.restore(variant)
    torch.testing.assert_close(restored(ids).logits, stock(ids).logits, rtol=0, atol=1e-4)
    assert all(torch.equal(weight, stock_weights[name]) for name, weight in stock.state_dict().items())


@torch.no_grad()
def test_only_layers_that_lose_their_rotation_are_changed() -> None:
    (stock, variant), ids = stock_and_variant({"type": "rope", "layers": [0, 2]}), tiny.tokens(8, LENGTH)
    before = {name: weight.clone() for name, weight in variant.state_dict().items()}
    closed_form_start(stock, variant, ids)
    changed = {name for name, weight in variant.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"model.layers.1.self_attn.q_proj.weight"}


@torch.no_grad()
def test_folded_rotation_is_the_mean_over_attention() -> None:
    """Each query is multiplied by the rotation between query and key, averaged over all pairs by their attention."""
    (stock, variant), ids = stock_and_variant("none"), tiny.tokens(2, LENGTH)
    stock.set_attn_implementation("eager")
    weights = stock(ids, output_attentions=True).attentions[0].sum(0)
    basis = torch.eye(8)[None, :, None].expand(1, -1, LENGTH, -1)
    rotations = oracles.llama_rotation(LENGTH)(basis)[0].permute(1, 2, 0).float()
    attention, states = variant.base_model.layers[0].self_attn, torch.randn(1, LENGTH, tiny.WIDTH)
    before = attention.project(states).query_BHND
    closed_form_start(stock, variant, ids)
    after = attention.project(states).query_BHND
    for head in range(tiny.HEADS):
        mean = sum(weights[head, i, j] * rotations[i - j] for i in range(LENGTH) for j in range(i + 1))
        expected = before[:, head] @ (mean / weights[head].sum()).T
        torch.testing.assert_close(after[:, head], expected, rtol=0, atol=1e-4)
        # Control: the folded rotation moves queries a hundred times as far as the comparison above tolerates.
        assert (before[:, head] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_tables_are_replaced_by_biases(architecture: str) -> None:
    (stock, variant), ids = stock_and_variant({**T5, "shared": False}, architecture), tiny.tokens(8, LENGTH)
    before = divergence(stock, variant, ids)
    closed_form_start(stock, variant, ids)
    assert divergence(stock, variant, ids) < before


@some(
    "model_type",
    ["qwen3", "phi", "cohere", "gpt_neox", "gemma2", "nanochat", "gpt_oss"],
    fast=["qwen3", "gpt_neox", "gpt_oss"],
)
def test_every_kind_of_rotation(model_type: str) -> None:
    """Norms after projections, partial, interleaved and reversed rotations, fused weights, softcap, sinks."""
    stock, ids = families.model(model_type), tiny.tokens(8, LENGTH)
    variant = hf_posenc.retrofit(copy.deepcopy(stock), {**T5, "shared": False})
    before = divergence(stock, variant, ids)
    orders = closed_form_start(stock, variant, ids)
    assert divergence(stock, variant, ids, orders) < before


def test_input_must_be_token_ids() -> None:
    stock, variant = stock_and_variant("alibi")
    with pytest.raises(PosEncError, match="integers of shape"):
        closed_form_start(stock, variant, torch.randn(2, 3))


def test_divergence_of_biases_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    bias, wanted, content = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    mass = (content + wanted).softmax(-1)
    expected = (mass * (mass.log() - (content + bias).log_softmax(-1))).sum()
    torch.testing.assert_close(bias_divergence(bias, wanted, mass), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(bias_divergence(wanted + 3, wanted, mass), torch.zeros_like(expected))


@pytest.mark.parametrize("group_size", [1, 2])
def test_fixed_biases_get_the_cheapest_order(group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted, biases, mass = (torch.rand(4, 9, generator=generator) * 4 for _ in range(3))
    cost = bias_divergence(biases[None], wanted[:, None], mass[:, None])
    groups = [range(start, start + group_size) for start in range(0, 4, group_size)]
    allowed = [
        [head for group in order for head in group]
        for outer in itertools.permutations(groups)
        for order in itertools.product(*(itertools.permutations(group) for group in outer))
    ]
    totals = {tuple(order): sum(cost[head, place].item() for place, head in enumerate(order)) for order in allowed}
    assert tuple(match_fixed(wanted, mass, biases, group_size).tolist()) == min(totals, key=totals.__getitem__)


def test_shared_biases_undo_a_shuffle() -> None:
    """Layers that want the same biases in different orders are brought into the same order."""
    generator = torch.Generator().manual_seed(0)
    wanted, mass = torch.randn(6, 20, generator=generator) * 3, torch.rand(6, 20, generator=generator)
    shuffles = [torch.randperm(6, generator=generator) for _ in range(3)]
    orders = match_shared([wanted[shuffle] for shuffle in shuffles], [mass[shuffle] for shuffle in shuffles], 1)
    aligned = [shuffle[order].tolist() for shuffle, order in zip(shuffles, orders, strict=True)]
    assert aligned[0] == aligned[1] == aligned[2]
