"""Bias, rotation and table schemes against plain loops over their formulas, forward and gradients, with controls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import LayerParameters
from hf_posenc.schemes.fire import HIDDEN_UNITS, piecewise_mlp
from hf_posenc.schemes.functional import sinusoids
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES
from tests.support.oracles import LENGTH, assert_equal_models, assert_equals_stock_with_layers, tolerance
from tests.support.sampling import sampled

by_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def layer_parameters(model: Any) -> list[Any]:
    """The scheme's parameter module in each layer."""
    return [module for module in model.modules() if isinstance(module, LayerParameters)]


@sampled(architecture=ARCHITECTURES, kind=["log", "power"])
def test_kerple_equals_a_loop_over_its_formula(architecture: str, kind: str) -> None:
    """-p ln(1 + a |r|), or -a |r|^p, with a separate a and p per head and layer."""
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, {"type": "kerple", "kind": kind})
    kernels = layer_parameters(model)
    assert len(kernels) == tiny.LAYERS
    theirs = [[number.detach().clone().requires_grad_() for number in (kernel.a, kernel.p)] for kernel in kernels]
    layers = []
    for a, p in theirs:
        rows = []
        for head in range(tiny.HEADS):
            for query in range(LENGTH):
                for key in range(LENGTH):
                    distance = abs(key - query)
                    if kind == "log":
                        rows.append(-p[head] * torch.log(1 + a[head] * distance))
                    else:
                        rows.append(-a[head] * distance ** p[head] if distance else 0 * a[head])
        layers.append(oracles.LayerOracle(bias=torch.stack(rows).view(1, tiny.HEADS, LENGTH, LENGTH)))
    with oracles.stock_with_layers(architecture, layers) as stock:
        mask = oracles.causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).logits
        assert_equal_models(model, stock, expected, ids, tolerance(architecture))
    for kernel, (a, p) in zip(kernels, theirs, strict=True):
        for ours, oracle in ((kernel.a, a), (kernel.p, p)):
            scale = tolerance(architecture) * oracle.grad.abs().max().clamp(min=1).item()
            torch.testing.assert_close(ours.grad, oracle.grad, rtol=0, atol=scale)
            assert oracle.grad.abs().max() > 1e-4
    with torch.no_grad():
        kernels[1].p[2] *= 1.05
    assert (model(ids).logits - expected).abs().max() > 1e-5


@by_architecture
def test_fire_equals_a_plain_mlp(architecture: str) -> None:
    """f(psi(|r|) / psi(max(i, L))) with psi(x) = ln(c x + 1) and f an MLP 1 -> 32 -> heads, with all its units."""
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, "fire")
    networks = layer_parameters(model)
    assert len(networks) == tiny.LAYERS
    theirs = []
    for network in networks:
        torch.nn.init.constant_(network.length, 5.0)  # shorter than the input, so that both cases of the maximum occur
        theirs.append({name: value.detach().clone().requires_grad_() for name, value in network.named_parameters()})
    positions, layers = torch.arange(LENGTH, dtype=torch.float64), []
    for p in theirs:
        reach = torch.maximum(positions, p["length"])[:, None]
        distances = (positions[None, :] - positions[:, None]).abs()
        inputs = torch.log(p["rate"] * distances + 1) / torch.log(p["rate"] * reach + 1)
        units = torch.relu(inputs[..., None] * p["inner_weight"] + p["inner_bias"])
        bias = units @ p["outer_weight"].T + p["outer_bias"]
        layers.append(oracles.LayerOracle(bias=bias.permute(2, 0, 1)[None]))
    with oracles.stock_with_layers(architecture, layers) as stock:
        mask = oracles.causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).logits
        assert_equal_models(model, stock, expected, ids, tolerance(architecture))
    for network, p in zip(networks, theirs, strict=True):
        for name, ours in network.named_parameters():
            if name == "outer_bias":  # the same for all keys, which softmax ignores
                continue
            scale = tolerance(architecture) * p[name].grad.abs().max().clamp(min=1).item()
            torch.testing.assert_close(ours.grad, p[name].grad, rtol=0, atol=scale, msg=lambda t, n=name: f"{n}: {t}")
            assert p[name].grad.abs().max() > 1e-5, name
    with torch.no_grad():
        networks[1].inner_weight *= 1.05
    assert (model(ids).logits - expected).abs().max() > 1e-4


def test_piecewise_mlp_equals_the_mlp() -> None:
    """Also at the kinks, and with units that are dead or constant."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"inner_weight": (HIDDEN_UNITS,), "inner_bias": (HIDDEN_UNITS,), "outer_weight": (3, HIDDEN_UNITS)}
    shapes["outer_bias"] = (3,)
    params = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    weight, bias = params["inner_weight"], params["inner_bias"]
    weight[:3] = 0.0
    bias[:3] = torch.tensor([2.0, -2.0, 0.0])
    kinks = -bias[3:] / weight[3:]
    inputs = torch.cat([torch.linspace(-4, 4, 301, dtype=torch.float64), kinks])
    units = torch.relu(inputs[:, None] * weight + bias)
    expected = (units @ params["outer_weight"].T + params["outer_bias"]).T
    torch.testing.assert_close(piecewise_mlp(params, inputs), expected, rtol=0, atol=1e-12)
    assert (piecewise_mlp({**params, "inner_bias": bias + 0.01}, inputs) - expected).abs().max() > 1e-4


@by_architecture
def test_sandwich_equals_a_loop_over_its_formula(architecture: str) -> None:
    """The inner product of two sinusoidal embeddings of width 128, minus its maximum, over 8 h / H for head h."""
    ids, rows = tiny.tokens(2, LENGTH), []
    for head in range(1, tiny.HEADS + 1):
        for query in range(LENGTH):
            for key in range(LENGTH):
                product = sum(math.cos((query - key) / 10000 ** (2 * pair / 128)) for pair in range(1, 65))
                rows.append((product - 64) / (8 * head / tiny.HEADS))
    bias = torch.tensor(rows, dtype=torch.float64).view(1, tiny.HEADS, LENGTH, LENGTH)
    stock, expected = oracles.stock_with_bias(architecture, ids, bias)
    assert_equal_models(tiny.model(architecture, "sandwich"), stock, expected, ids, tolerance(architecture))
    _, perturbed = oracles.stock_with_bias(architecture, ids, bias * 1.01)
    assert (perturbed - expected).abs().max() > 1e-4


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_fire_starts_neutral_and_can_learn(architecture: str) -> None:
    stock, ids = tiny.model(architecture), tiny.tokens(2, LENGTH)
    expected = stock(ids).logits
    model = hf_posenc.retrofit(stock, ["learned", "fire"])
    actual = model(ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    actual.square().mean().backward()
    network = layer_parameters(model)[0]
    assert network.outer_weight.grad.abs().max() > 0
    paper = hf_posenc.retrofit(tiny.model(architecture), {"type": "fire", "init": "paper"})
    network = layer_parameters(paper)[0]
    assert network.outer_weight.abs().max() > 0


@pytest.mark.parametrize("kind", ["log", "power"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_kerple_starts_neutral_and_can_learn(architecture: str, kind: str) -> None:
    """Added to the learned table it changes nothing at first, and the zero factor has a gradient."""
    stock, ids = tiny.model(architecture), tiny.tokens(2, LENGTH)
    expected = stock(ids).logits
    model = hf_posenc.retrofit(stock, ["learned", {"type": "kerple", "kind": kind}])
    actual = model(ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    actual.square().mean().backward()
    kernel = layer_parameters(model)[0]
    assert (kernel.p if kind == "log" else kernel.a).grad.abs().min() > 0
    paper = hf_posenc.retrofit(tiny.model(architecture), {"type": "kerple", "kind": kind, "init": "paper"})
    kernel = layer_parameters(paper)[0]
    assert kernel.a.min() >= 0
    assert 0 <= kernel.p.min() <= kernel.p.max() <= 2


@by_architecture
def test_window_equals_stock_with_both_tables_added(architecture: str) -> None:
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, {"type": "window", "window_size": 5})
    scheme = model.base_model.position_scheme[0]
    assert scheme.windows.shape[0] == 10  # 48 positions in windows of 5
    offsets, windows = (table.detach().clone().requires_grad_() for table in (scheme.offsets, scheme.windows))
    rows = [offsets[position % 5] + windows[position // 5] for position in range(tiny.TRAINED_LENGTH)]
    stock, expected = oracles.stock_with_embeddings(architecture, ids, torch.stack(rows))
    assert_equal_models(model, stock, expected, ids, tolerance(architecture))
    if architecture == "llama":  # elsewhere the oracle copies the table into a stock weight, where gradients end
        for parameter, expected_table in ((scheme.offsets, offsets), (scheme.windows, windows)):
            scale = tolerance(architecture) * expected_table.grad.abs().max().item()
            torch.testing.assert_close(parameter.grad, expected_table.grad, rtol=0, atol=scale)
    far = model(torch.cat([ids] * 5, 1)).logits
    assert far.isfinite().all()
    with torch.no_grad():
        scheme.windows[2, 3] += 0.05
    assert (model(ids).logits - expected).abs().max() > 1e-5


@pytest.mark.parametrize("width", [7, 32, 33])
def test_sinusoids_of_any_width_equal_a_loop(width: int) -> None:
    for layout in ("interleaved", "halves"):
        table = sinusoids(torch.arange(40), width, 10000.0, layout, torch.float64)
        for position in (0, 1, 17, 39):
            angles = [position / 10000 ** (2 * pair / width) for pair in range((width + 1) // 2)]
            expected = torch.zeros(width, dtype=torch.float64)
            for feature in range(width):
                sines = (width + 1) // 2
                if layout == "interleaved":
                    wave, pair = (torch.sin, feature // 2) if feature % 2 == 0 else (torch.cos, feature // 2)
                else:
                    wave, pair = (torch.sin, feature) if feature < sines else (torch.cos, feature - sines)
                expected[feature] = wave(torch.tensor(angles[pair], dtype=torch.float64))
            torch.testing.assert_close(table[position], expected, rtol=0, atol=1e-12)


@sampled(architecture=ARCHITECTURES, share=[1.0, 0.5, 0.25], layout=["halves", "interleaved"])
def test_partial_and_interleaved_rope_equal_the_papers_rotation(architecture: str, share: float, layout: str) -> None:
    ids, turned = tiny.tokens(2, LENGTH), int(8 * share)
    turn = oracles.complex_rotation(LENGTH, 500.0, turned, layout == "interleaved")
    scheme = {"type": "rope", "theta": 500.0, "layout": layout, "partial_rotary_factor": share}
    # Angles are float32 products, like LLaMA's; the oracle's are float64.
    layers = [oracles.LayerOracle(rotation=turn)] * tiny.LAYERS
    expected = assert_equals_stock_with_layers(architecture, scheme, layers, ids, 2e-5)
    if turned > 2:  # with two features both layouts are the same
        other = {**scheme, "layout": "halves" if layout == "interleaved" else "interleaved"}
        assert (tiny.model(architecture, other)(ids).logits - expected).abs().max() > 1e-3


@by_architecture
def test_xpos_equals_a_loop_over_its_formula(architecture: str) -> None:
    """Rotation, then q times zeta^((i - c) / base) and k divided by the same at j, zeta = (2k + 0.4 d) / (1.4 d)."""
    ids, base, center = tiny.tokens(2, LENGTH), 20.0, tiny.TRAINED_LENGTH // 2
    rotation = oracles.complex_rotation(LENGTH, 10000.0, 8, interleaved=False)

    def decayed(states: torch.Tensor, sign: int) -> torch.Tensor:
        result = rotation(states)
        for position in range(LENGTH):
            for pair in range(4):
                factor = ((2 * pair + 0.4 * 8) / (1.4 * 8)) ** (sign * (position - center) / base)
                for feature in (pair, pair + 4):
                    result[:, :, position, feature] = result[:, :, position, feature] * factor
        return result

    layer = oracles.LayerOracle(
        rotation=lambda states: decayed(states, 1), key_rotation=lambda states: decayed(states, -1)
    )
    # Angles and factors are float32, like LLaMA's angles; the oracle's are float64.
    scheme = {"type": "xpos", "scale_base": base}
    expected = assert_equals_stock_with_layers(architecture, scheme, [layer] * tiny.LAYERS, ids, 2e-5)
    assert (tiny.model(architecture, {"type": "rope", "theta": 10000.0})(ids).logits - expected).abs().max() > 1e-3


def test_xpos_refuses_lengths_that_overflow() -> None:
    model = tiny.model("llama", {"type": "xpos", "scale_base": 16.0}, torch.float16)
    assert model(tiny.tokens(1, 60)).logits.isfinite().all()
    with pytest.raises(PosEncError, match=r"xpos: at \d+ positions.*float16.*scale_base"):
        model(tiny.tokens(1, 200))


@by_architecture
def test_learned_slopes_get_the_gradient_of_the_bias(architecture: str) -> None:
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, {"type": "alibi", "learned": True})
    ours = next(parameter for name, parameter in model.named_parameters() if name.endswith("slopes"))
    theirs = ours.detach().clone().requires_grad_()
    positions = torch.arange(LENGTH, dtype=torch.float64)
    bias = -theirs.view(1, -1, 1, 1) * (positions[None, :] - positions[:, None]).abs()
    stock, expected = oracles.stock_with_bias(architecture, ids, bias)
    assert_equal_models(model, stock, expected, ids, tolerance(architecture))
    torch.testing.assert_close(
        ours.grad, theirs.grad, rtol=0, atol=tolerance(architecture) * theirs.grad.abs().max().item()
    )
    assert theirs.grad.abs().min() > 1e-4


@by_architecture
def test_slopes_per_layer_equal_a_bias_per_layer(architecture: str) -> None:
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, {"type": "alibi", "learned": "per_layer"})
    modules = layer_parameters(model)
    assert len(modules) == tiny.LAYERS
    with torch.no_grad():
        for layer, module in enumerate(modules):
            module.slopes.mul_(1 + 0.5 * layer)
    theirs = [module.slopes.detach().clone().requires_grad_() for module in modules]
    positions = torch.arange(LENGTH, dtype=torch.float64)
    distances = (positions[None, :] - positions[:, None]).abs()
    layers = [oracles.LayerOracle(bias=-slopes.view(1, -1, 1, 1) * distances) for slopes in theirs]
    with oracles.stock_with_layers(architecture, layers) as stock:
        mask = oracles.causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).logits
        assert_equal_models(model, stock, expected, ids, tolerance(architecture))
    for module, slopes in zip(modules, theirs, strict=True):
        scale = tolerance(architecture) * slopes.grad.abs().max().clamp(min=1).item()
        torch.testing.assert_close(module.slopes.grad, slopes.grad, rtol=0, atol=scale)
        assert slopes.grad.abs().max() > 1e-4
    with torch.no_grad():
        modules[0].slopes[1] *= 1.05
    assert (model(ids).logits - expected).abs().max() > 1e-5


@pytest.mark.parametrize("extend", ["interpolate", "tile", "hierarchical"])
@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_extended_tables_equal_a_loop(architecture: str, extend: str) -> None:
    model, rows, longer = tiny.model(architecture), tiny.TRAINED_LENGTH, 2 * tiny.TRAINED_LENGTH
    path = "transformer.wpe" if architecture == "gpt2" else "bert.embeddings.position_embeddings"
    stock_table = model.get_submodule(path)
    weight = stock_table.weight.detach().clone()
    expected = torch.zeros(longer, tiny.WIDTH, dtype=torch.float64)
    for position in range(longer):
        if extend == "tile":
            expected[position] = weight[position % rows]
        elif extend == "interpolate":
            scaled = position * (rows - 1) / (longer - 1)
            low, high = int(scaled), min(int(scaled) + 1, rows - 1)
            expected[position] = weight[low] * (1 - (scaled - low)) + weight[high] * (scaled - low)
        else:
            base = [(row - 0.4 * weight[0]) / 0.6 for row in weight]
            expected[position] = 0.4 * base[position // rows] + 0.6 * base[position % rows]
    hf_posenc.retrofit(model, {"type": "learned", "max_positions": longer, "extend": extend})
    actual = model.get_submodule(path)(torch.arange(longer)[None])[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    if extend != "interpolate":
        assert torch.equal(actual[:rows], weight)
    assert model(tiny.tokens(1, longer)).logits.isfinite().all()
    with pytest.raises(ValueError, match=rf"{longer + 1}.*{longer} positions"):
        model(tiny.tokens(1, longer + 1))
    hf_posenc.restore(model)
    assert model.get_submodule(path) is stock_table
    assert torch.equal(stock_table.weight, weight)
