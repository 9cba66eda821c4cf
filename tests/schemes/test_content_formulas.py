"""Schemes whose terms depend on the content, against their formulas pair by pair.

The stock model runs with its positions zeroed and an attention function that does everything by hand: logits from the
formula, mask, softmax, weights times values. Logits, and gradients of all stock weights and scheme parameters, are
compared. The second row ends in padding, the input is longer than any `max_distance`, and every layer has different
parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES
from tests.support.oracles import LENGTH, tolerance
from tests.support.sampling import sampled

WIDTH, HEADS, HEAD = tiny.WIDTH, tiny.HEADS, tiny.WIDTH // tiny.HEADS
PADDED = 2
ROOT = math.sqrt(HEAD)


@dataclasses.dataclass
class Layer:
    """What a formula may use in one layer. Keys and values are repeated for the heads that share them."""

    params: dict[str, torch.Tensor]
    shared: dict[str, torch.Tensor]
    query: torch.Tensor
    key: torch.Tensor
    visible: torch.Tensor
    """(B, n, n): True where the query may see the key."""
    attention: Any
    causal: bool

    def product(self, i: int, j: int) -> torch.Tensor:
        """q_i . k_j for each row and head."""
        return (self.query[:, :, i] * self.key[:, :, j]).sum(-1)


def clip(number: int, low: int, high: int) -> int:
    return min(max(number, low), high)


def for_all_pairs(score: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """(B, H, n, n): a function of the query's index and the key's."""
    rows = [torch.stack([score(i, j) for j in range(LENGTH)], -1) for i in range(LENGTH)]
    return torch.stack(rows, -2)


def layer_norm(table: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    rows = []
    for row in table:
        centered = row - row.sum() / len(row)
        rows.append(centered / torch.sqrt((centered**2).sum() / len(row) + epsilon) * weight + bias)
    return torch.stack(rows)


def of_head(matrix: torch.Tensor, head: int) -> torch.Tensor:
    """The rows of a projection (heads x head size, width) that make up one head."""
    return matrix[head * HEAD : (head + 1) * HEAD]


def shaw(layer: Layer, options: dict[str, Any]) -> torch.Tensor:
    """q_i . (k_j + a_ij) / sqrt(d), and with query_term (q_i . k_j + q_i . a_ij + k_j . a_ij) / sqrt(d)."""

    def score(i: int, j: int) -> torch.Tensor:
        vector = shaw_vector(layer.params["keys"], i, j, options)
        total = (layer.query[:, :, i] * (layer.key[:, :, j] + vector)).sum(-1)
        if options.get("query_term"):
            total = total + (layer.key[:, :, j] * vector).sum(-1)
        return total / ROOT

    return for_all_pairs(score)


def shaw_vector(table: torch.Tensor, i: int, j: int, options: dict[str, Any]) -> torch.Tensor:
    limit = options["max_distance"]
    return table[limit + clip(i - j, -limit, limit)]


def transformer_xl(layer: Layer, options: dict[str, Any]) -> torch.Tensor:
    """[(q_i + u) . k_j + (q_i + v) . W R_(i-j)] / sqrt(d), all sines of R before its cosines."""
    biases = {name.removeprefix("biases."): value for name, value in {**layer.params, **layer.shared}.items()}

    def score(i: int, j: int) -> torch.Tensor:
        angles = [(i - j) / 10000 ** (2 * pair / WIDTH) for pair in range(WIDTH // 2)]
        waves = [*map(math.sin, angles), *map(math.cos, angles)]
        position = layer.params["key_projection"] @ torch.tensor(waves, dtype=torch.float64)
        by_content = ((layer.query[:, :, i] + biases["u"]) * layer.key[:, :, j]).sum(-1)
        by_position = ((layer.query[:, :, i] + biases["v"]) * position.view(HEADS, HEAD)).sum(-1)
        return (by_content + by_position) / ROOT

    return for_all_pairs(score)


def tupe(layer: Layer, options: dict[str, Any]) -> torch.Tensor:
    """c q_i . k_j / sqrt(d) + reset_theta((p_i U_Q) . (p_j U_K) / sqrt(2 d) + b_(j-i), i, j), with c = 1 / sqrt(2)."""
    shared = layer.shared
    positions = layer_norm(shared["table"], shared["norm.weight"], shared["norm.bias"], 1e-5)

    def score(i: int, j: int) -> torch.Tensor:
        heads = []
        for head in range(HEADS):
            queries, keys = (of_head(shared[name], head) for name in ("query_projection", "key_projection"))
            position = (queries @ positions[i]) @ (keys @ positions[j]) / math.sqrt(2 * HEAD)
            if "bias.weight" in shared:
                bucket = T5Attention._relative_position_bucket(
                    torch.tensor(j - i), not layer.causal, options["num_buckets"], options["max_distance"]
                )
                position = position + shared["bias.weight"][bucket, head]
            if options.get("untie_cls") and i == 0:
                position = shared["cls_row"][head]
            elif options.get("untie_cls") and j == 0:
                position = shared["cls_column"][head]
            heads.append(position)
        return (1 + layer.params["content_change"]) * layer.product(i, j) / ROOT + torch.stack(heads)

    return for_all_pairs(score)


def stock_projections(module: Any) -> dict[str, torch.Tensor]:
    """The layer's stock query and key projections, each (heads x head size, width)."""
    if hasattr(module, "c_attn"):
        (query, key, _), biases = module.c_attn.weight.T.split(WIDTH), module.c_attn.bias.split(WIDTH)
        return {"query": query, "query_bias": biases[0], "key": key, "key_bias": biases[1]}
    if hasattr(module, "q_proj"):
        assert module.k_proj.weight.shape[0] == WIDTH // 2  # two heads share a key
        return {"query": module.q_proj.weight, "key": module.k_proj.weight}
    query, key = module.query, module.key
    return {"query": query.weight, "query_bias": query.bias, "key": key.weight, "key_bias": key.bias}


def deberta(layer: Layer, options: dict[str, Any]) -> torch.Tensor:
    """c q_i . k_j / sqrt(d) + g (q_i . K_r + Q_r . k_j) / sqrt(d (1 + terms)), with c = 1 / sqrt(1 + terms), g = 1.

    r is the row of i - j in both, as in DeBERTa's code; the paper has j - i in the second.
    """
    params, terms = layer.params, options.get("terms", ["c2p", "p2c"])
    span = options.get("buckets") or options["max_distance"]
    table = layer.shared["table"]
    if "norm.weight" in layer.shared:
        table = layer_norm(table, layer.shared["norm.weight"], layer.shared["norm.bias"], 1e-7)
    if options.get("share_projections", True):
        maps = stock_projections(layer.attention)
    else:
        maps = {name.removesuffix("_projection"): weight for name, weight in params.items()}

    def projected(name: str, row: torch.Tensor) -> torch.Tensor:
        states = maps[name] @ row + maps.get(f"{name}_bias", 0)
        group_size = WIDTH // len(states)
        return torch.stack([of_head(states, head // group_size) for head in range(HEADS)])

    def score(i: int, j: int) -> torch.Tensor:
        relative = i - j
        if options.get("buckets"):
            relative = int(make_log_bucket_position(torch.tensor(relative), span, options["max_distance"]))
        row = table[clip(relative + span, 0, 2 * span - 1)]
        positional = torch.zeros((), dtype=torch.float64)
        if "c2p" in terms:
            positional = positional + (layer.query[:, :, i] * projected("key", row)).sum(-1)
        if "p2c" in terms:
            positional = positional + (layer.key[:, :, j] * projected("query", row)).sum(-1)
        positional = params["position_gain"] * positional / math.sqrt(HEAD * (1 + len(terms)))
        return (1 + params["content_change"]) * layer.product(i, j) / ROOT + positional

    return for_all_pairs(score)


def cope(layer: Layer, options: dict[str, Any]) -> torch.Tensor:
    """q_i . k_j / sqrt(d) + q_i . e[p_ij], p_ij the sum over visible t >= j of sigma(q_i . k_t / sqrt(d)), clamped.

    If p_ij is fractional, the product is interpolated between its two neighbors.
    """
    table, highest = layer.params["table"], options["max_positions"] - 1
    logits = for_all_pairs(layer.product) / ROOT
    rows = []
    for row in range(logits.shape[0]):
        for head in range(HEADS):
            for i in range(LENGTH):
                count, by_key = torch.zeros((), dtype=torch.float64), []
                for j in reversed(range(LENGTH)):
                    if layer.visible[row, i, j]:
                        count = count + 1 / (1 + torch.exp(-logits[row, head, i, j]))
                    position = count if count < highest else torch.full_like(count, highest)
                    below = math.floor(position.item())
                    fraction, above = position - below, math.ceil(position.item())
                    low, high = (layer.query[row, head, i] @ table[count] for count in (below, above))
                    by_key.append(logits[row, head, i, j] + (1 - fraction) * low + fraction * high)
                rows.append(torch.stack(by_key[::-1]))
    return torch.stack(rows).view_as(logits)


SHAW = {"type": "shaw", "max_distance": 4}
TUPE_A = {"type": "tupe", "relative": False}
TUPE_R = {"type": "tupe", "num_buckets": 8, "max_distance": 6}
DEBERTA = {"type": "deberta", "max_distance": 5}
FORMULAS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shaw": (shaw, SHAW),
    "shaw-query-term": (shaw, {**SHAW, "values": False, "query_term": True}),
    "transformer_xl": (transformer_xl, {"type": "transformer_xl"}),
    "transformer_xl-shared": (transformer_xl, {"type": "transformer_xl", "shared_bias": True}),
    "tupe-a": (tupe, TUPE_A),
    "tupe-r": (tupe, TUPE_R),
    "tupe-r-untied": (tupe, {**TUPE_R, "untie_cls": True}),
    "tupe-a-untied": (tupe, {**TUPE_A, "untie_cls": True}),
    "deberta": (deberta, DEBERTA),
    "deberta-buckets": (deberta, {**DEBERTA, "max_distance": 12, "buckets": 6}),
    "deberta-p2c": (deberta, {**DEBERTA, "terms": ["p2c"], "norm": None}),
    "deberta-own": (deberta, {**DEBERTA, "share_projections": False, "norm": None}),
    "cope": (cope, {"type": "cope", "max_positions": 4}),
}
NO_EFFECT, STOCK_TABLES = ("cls_row",), ("wpe.weight", "position_embeddings.weight")
"""A parameter that is the same for all keys of a query, which softmax ignores; weights only the stock model has."""


def leaves(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}


FAST = ["shaw", "transformer_xl", "tupe-r-untied", "deberta-buckets", "cope"]


@sampled(
    architecture=ARCHITECTURES,
    case=list(FORMULAS),
    exclude=[("bert", "cope")],
    slow=[c for c in FORMULAS if c not in FAST],
)
def test_equals_the_formula_pair_by_pair(architecture: str, case: str) -> None:
    formula, options = FORMULAS[case]
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, options)
    causal, atol = architecture != "bert", tolerance(architecture)  # LLaMA computes its norms in float32
    layer_modules = [module["0"] for module in model.modules() if isinstance(module, torch.nn.ModuleDict)]
    scheme = model.base_model.position_scheme[0]
    assert len(layer_modules) == tiny.LAYERS
    params, shared = [leaves(module) for module in layer_modules], leaves(scheme)
    seen_layers = []

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        groups = [head * key.shape[1] // HEADS for head in range(HEADS)]
        key, value = key[:, groups], value[:, groups]
        visible, index = mask[:, 0] > -1, module.layer_idx
        seen_layers.append(index)
        logits = formula(Layer(params[index], shared, query, key, visible, module, causal), options)
        weights = logits.exp() * visible[:, None]
        weights = weights / weights.sum(-1, keepdim=True)
        results = []
        for i in range(LENGTH):
            total = torch.zeros_like(query[:, :, i])
            for j in range(LENGTH):
                vector = value[:, :, j]
                if "values" in params[index]:
                    vector = vector + shaw_vector(params[index]["values"], i, j, options)
                total = total + weights[:, :, i, j, None] * vector
            results.append(total)
        return torch.stack(results, 1), None

    padding = torch.ones_like(ids)
    padding[1, -PADDED:] = 0
    visible = padding[:, None, None, :].bool().expand(-1, 1, LENGTH, -1)
    with oracles.stock_with_attention(architecture, attention) as stock:
        expected = stock(ids, attention_mask=tiny.additive_mask(visible.tril() if causal else visible)).logits
        expected_gradients = oracles.gradients(stock, expected)
    assert seen_layers == list(range(tiny.LAYERS))
    actual = model(ids, attention_mask=padding).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    gradients = oracles.gradients(model, actual)
    pairs = {name: (gradients[name], gradient) for name, gradient in expected_gradients.items() if name in gradients}
    assert all(name.endswith(STOCK_TABLES) for name in expected_gradients.keys() - pairs.keys())
    named = [(f"layer {i}: ", module, params[i]) for i, module in enumerate(layer_modules)] + [("", scheme, shared)]
    for prefix, module, cloned in named:
        for name, parameter in module.named_parameters():
            pairs[prefix + name] = (parameter.grad, cloned[name].grad)
    for name, (gradient, expected_gradient) in pairs.items():
        scale = expected_gradient.abs().max().clamp(min=1)
        torch.testing.assert_close(
            gradient / scale, expected_gradient / scale, rtol=0, atol=atol, msg=lambda t, n=name: f"{n}: {t}"
        )
    with torch.no_grad():
        check_controls(named, lambda: (model(ids, attention_mask=padding).logits - expected).abs().max(), atol)


def check_controls(named: list[Any], difference: Callable[[], torch.Tensor], atol: float) -> None:
    """A small change of any parameter is detected, and so are two layers with swapped parameters."""
    for prefix, module, _ in named:
        for name, parameter in module.named_parameters():
            if name in NO_EFFECT:
                assert parameter.grad.abs().max() < atol
                continue
            original, largest = parameter.clone(), parameter.grad.abs().argmax()
            parameter.view(-1)[largest] += 0.05
            assert difference() > 10 * atol, prefix + name
            parameter.copy_(original)
    assert difference() < atol
    first, last = (list(named[number][1].parameters()) for number in (0, tiny.LAYERS - 1))
    for parameter, other in zip(first, last, strict=True):
        original = parameter.clone()
        parameter.copy_(other)
        other.copy_(original)
    assert difference() > 1e-3


@pytest.mark.parametrize(("name", "terms"), [("tupe", 1), ("deberta", 2)])
def test_content_scales_start_at_the_papers_values(name: str, terms: int) -> None:
    """The formulas above take the content's scale from a parameter; with init="paper" it is the paper's."""
    model = hf_posenc.retrofit(tiny.model("bert"), {"type": name, "init": "paper"})
    scales = {
        key: value for key, value in model.named_parameters() if key.endswith(("content_change", "position_gain"))
    }
    assert len(scales) == tiny.LAYERS * terms
    for key, scale in scales.items():
        expected = (1 + terms) ** -0.5 - 1 if key.endswith("content_change") else 1.0
        torch.testing.assert_close(scale, torch.full_like(scale, expected), rtol=0, atol=1e-7)
