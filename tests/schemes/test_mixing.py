"""Input schemes and mixes, against a token-by-token computation whose result is fed to the stock model."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numpy.polynomial import chebyshev

import hf_posenc
from hf_posenc.schemes.fixed_functions import project_to_dct_rows, sample_dct_rows
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.oracles import LENGTH, tolerance
from tests.support.sampling import sampled

WIDTH, HEAD = tiny.WIDTH, tiny.WIDTH // tiny.HEADS
STOCK_TABLES = {"gpt2": "transformer.wpe.weight", "bert": "bert.embeddings.position_embeddings.weight"}
SCHEMES: dict[str, dict[str, Any]] = {
    "sinusoidal": {"type": "sinusoidal"},
    "polynomial": {"type": "polynomial", "degree": 5, "max_positions": 9},
    "exponential": {"type": "exponential", "rates": 4},
    "window": {"type": "window", "window_size": 5},
    "learned": {"type": "learned"},
}
FIXED = ["sinusoidal", "polynomial", "exponential"]
MIXES: dict[str, dict[str, Any]] = {
    "add": {},
    "concat": {"mix": "concat"},
    "token": {"mix": "attention"},
    "context": {"mix": "attention", "query": "context"},
}
FAMILIES = ["bert", "gpt2", "llama"]
VisibleTokens = Callable[[int, int], list[int]]
"""Maps a row and a token to the tokens it may see."""


def position_embedding(scheme: Any, p: dict[str, torch.Tensor], position: int) -> torch.Tensor:
    """The embedding of one position by the scheme's formula."""
    width, options, last = scheme.position_size, scheme.options, getattr(scheme, "max_positions", 0)
    if scheme.name == "learned":
        return p["weight"][position]
    if scheme.name == "window":
        size = options.window_size
        return p["offsets"][position % size] + p["windows"][min(position // size, -(-tiny.TRAINED_LENGTH // size) - 1)]
    if scheme.name == "sinusoidal":
        angles = [position / 10000 ** (2 * (feature // 2) / width) for feature in range(width)]
        waves = [math.cos(angle) if feature % 2 else math.sin(angle) for feature, angle in enumerate(angles)]
        return torch.tensor(waves, dtype=torch.float64)
    if scheme.name == "polynomial":
        argument = 2 * min(position, last - 1) / (last - 1) - 1
        values = [math.cos(degree * math.acos(argument)) for degree in range(1, options.degree + 1)]
    else:
        values = [math.exp(-(last ** (k / (options.rates - 1))) * position / last) for k in range(options.rates)]
    directions = [
        [math.sqrt(2 / width) * math.cos(math.pi / width * frequency * (feature + 0.5)) for feature in range(width)]
        for frequency in scheme.dct_rows
    ]
    return torch.tensor(values, dtype=torch.float64) @ torch.tensor(directions, dtype=torch.float64)


def mix(scheme: Any, p: dict[str, torch.Tensor], embeds: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Mix positions into token embeddings (B, n, E), token by token, by the formula of the mix."""
    rows = []
    for row in range(embeds.shape[0]):
        for index in range(embeds.shape[1]):
            token, position = embeds[row, index], position_embedding(scheme, p, index)
            if scheme.options.mix == "add":
                rows.append(token + position)
            elif scheme.options.mix == "concat":
                rows.append(p["mixer.weight"][:, :WIDTH] @ token + p["mixer.weight"][:, WIDTH:] @ position)
            else:
                query = p["mixer.query"] @ (context[row, index] if scheme.options.query == "context" else token)
                keys = p["mixer.token_key"] @ token, p["mixer.position_key"] @ position
                token_weight, position_weight = (torch.exp(query @ key / math.sqrt(HEAD)) for key in keys)
                values = p["mixer.token_value"] @ token, p["mixer.position_value"] @ position
                total = token_weight * values[0] + position_weight * values[1]
                rows.append(total / (token_weight + position_weight))
    return torch.stack(rows).view_as(embeds)


def means(embeds: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
    """The mean embedding of the tokens that each token may see; zero if there are none."""
    rows, tokens = embeds.shape[:2]
    sums = [[embeds[row, visible(row, token)].sum(0) for token in range(tokens)] for row in range(rows)]
    counts = [[max(len(visible(row, token)), 1) for token in range(tokens)] for row in range(rows)]
    return torch.stack([torch.stack(row) for row in sums]) / torch.tensor(counts).unsqueeze(-1)


def check_against_plain_computation(architecture: str, position_scheme: Any) -> tuple[Any, torch.Tensor]:
    """Compare logits, and gradients of stock weights and scheme parameters. Returns the model and its logits."""
    model, ids, padding = tiny.model(architecture, position_scheme), tiny.tokens(2, LENGTH), torch.ones(2, LENGTH)
    padding[1, -3:] = 0
    lengths = [LENGTH, LENGTH - 3]
    stock, schemes = oracles.stock_without_positions(architecture), list(model.base_model.position_scheme)
    leaves: dict[str, torch.Tensor] = {}

    def leaf(name: str) -> torch.Tensor:
        return leaves.setdefault(name, model.get_parameter(name).detach().clone().requires_grad_())

    def visible(row: int, token: int) -> list[int]:
        return list(range(lengths[row] if architecture == "bert" else min(token + 1, lengths[row])))

    embeds = stock.get_input_embeddings()(ids)
    context = means(embeds, visible)
    for index, scheme in enumerate(schemes):
        prefix = f"{model.base_model_prefix}.position_scheme.{index}."
        parameters = {name: leaf(prefix + name) for name, _ in scheme.named_parameters()}
        if scheme.name == "learned" and architecture in STOCK_TABLES:
            parameters["weight"] = leaf(STOCK_TABLES[architecture])
        embeds = mix(scheme, parameters, embeds, context)
    expected = stock(inputs_embeds=embeds, attention_mask=padding).logits
    actual, atol = model(ids, attention_mask=padding).logits, tolerance(architecture)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    expected_gradients, gradients = oracles.gradients(stock, expected), oracles.gradients(model, actual)
    expected_gradients.pop(STOCK_TABLES.get(architecture, ""), None)  # of the zeroed table
    expected_gradients.update({name: value.grad for name, value in leaves.items()})
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = gradient.abs().max().clamp(min=1)
        torch.testing.assert_close(
            gradients[name] / scale, gradient / scale, rtol=0, atol=atol, msg=lambda t, n=name: f"{n}: {t}"
        )
    with torch.no_grad():  # the control: a small change of any parameter is detected
        for name in leaves:
            parameter = model.get_parameter(name)
            original, largest = parameter.clone(), parameter.grad.abs().argmax()
            parameter.view(-1)[largest] += 0.05
            assert (model(ids, attention_mask=padding).logits - expected).abs().max() > 10 * atol, name
            parameter.copy_(original)
    return model, actual


@sampled(architecture=FAMILIES, name=list(SCHEMES), mix=list(MIXES), every=2)
def test_mixes_equal_the_stock_model_given_the_mixture(architecture: str, name: str, mix: str) -> None:
    narrow = mix == "concat" and not (name == "learned" and architecture in STOCK_TABLES)
    size = {"position_size": 10} if narrow else {}
    check_against_plain_computation(architecture, {**SCHEMES[name], **MIXES[mix], **size})


@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "llama"))]
)
def test_schemes_of_a_list_are_applied_in_its_order(architecture: str) -> None:
    """W [token + table; sinusoid] against W [token; sinusoid] + table, with a W far from [I | I]."""
    concat = {"type": "sinusoidal", "mix": "concat"}
    _, actual = check_against_plain_computation(architecture, ["learned", concat])
    model, other = check_against_plain_computation(architecture, [concat, "learned"])
    assert (actual - other).abs().max() > 1e-2
    weight = model.base_model.position_scheme[0].mixer.weight
    assert (weight[:, :WIDTH] - torch.eye(WIDTH)).abs().mean() > 0.1


def freshly_initialized(architecture: str, position_scheme: Any, dtype: torch.dtype) -> Any:
    """A model whose mix has its initial parameters, but whose tables are random."""
    model = hf_posenc.retrofit(tiny.model(architecture, dtype=dtype), position_scheme)
    with torch.no_grad():
        for name, parameter in model.base_model.position_scheme.named_parameters():
            if "mixer" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@sampled(
    architecture=FAMILIES,
    name=list(SCHEMES),
    mix=["concat", "token", "context"],
    dtype=[torch.float64, torch.float32],
    every=2,
)
def test_mixes_start_bit_identical_to_the_sum(architecture: str, name: str, mix: str, dtype: torch.dtype) -> None:
    ids = tiny.tokens(2, LENGTH)
    added = freshly_initialized(architecture, SCHEMES[name], dtype)(ids).logits
    actual = freshly_initialized(architecture, {**SCHEMES[name], **MIXES[mix]}, dtype)(ids).logits
    assert (added - freshly_initialized(architecture, "none", dtype)(ids).logits).abs().max() > 1e-3
    if (architecture, name) == ("bert", "learned"):  # BERT adds its table after the token types, a mix before them
        torch.testing.assert_close(actual, added, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    else:
        assert torch.equal(actual, added)


@pytest.mark.parametrize("size", [10, 40])
def test_concat_of_another_width_starts_with_the_features_that_fit(size: int) -> None:
    scheme, ids = {"type": "sinusoidal", "mix": "concat", "position_size": size}, tiny.tokens(2, LENGTH)
    model, stock = freshly_initialized("gpt2", scheme, torch.float64), oracles.stock_without_positions("gpt2")
    expected = stock.get_input_embeddings()(ids).clone()
    for token in range(LENGTH):
        for feature in range(min(size, WIDTH)):
            wave = math.cos if feature % 2 else math.sin
            expected[:, token, feature] += wave(token / 10000 ** (2 * (feature // 2) / size))
    torch.testing.assert_close(model(ids).logits, stock(inputs_embeds=expected).logits, rtol=0, atol=1e-12)


@sampled(architecture=FAMILIES, name=FIXED, mix=["concat", "token", "context"], every=3)
def test_neutral_mixes_ignore_positions_and_can_learn(architecture: str, name: str, mix: str) -> None:
    ids = tiny.tokens(2, LENGTH)
    model = freshly_initialized(architecture, {**SCHEMES[name], **MIXES[mix], "mix_init": "neutral"}, torch.float64)
    actual = model(ids).logits
    assert torch.equal(actual, freshly_initialized(architecture, "none", torch.float64)(ids).logits)
    actual.square().mean().backward()
    mixer = model.base_model.position_scheme[0].mixer
    position_gradient = mixer.weight.grad[:, WIDTH:] if mix == "concat" else mixer.position_value.grad
    assert position_gradient.abs().max() > 1e-4


def embeddings_of(position_scheme: Any, positions: torch.Tensor, **changes: Any) -> tuple[Any, torch.Tensor]:
    scheme = tiny.model("llama", position_scheme, **changes).base_model.position_scheme[0]
    return scheme, scheme.position_embeddings(types.SimpleNamespace(queries_BQ=positions[None], dtype=torch.float64))[0]


def directions_of(scheme: Any) -> torch.Tensor:
    return project_to_dct_rows(torch.eye(len(scheme.dct_rows), dtype=torch.float64), scheme.dct_rows, WIDTH)


@pytest.mark.parametrize("degree", [1, 3, 31])
def test_polynomials_are_chebyshev_along_orthonormal_directions(degree: int) -> None:
    scheme, actual = embeddings_of({"type": "polynomial", "degree": degree}, torch.arange(5 * tiny.TRAINED_LENGTH))
    rows = directions_of(scheme)
    torch.testing.assert_close(rows @ rows.T, torch.eye(degree, dtype=torch.float64), rtol=0, atol=1e-13)
    arguments = torch.linspace(-1, 1, tiny.TRAINED_LENGTH, dtype=torch.float64)
    values = torch.from_numpy(chebyshev.chebvander(arguments.numpy(), degree)[:, 1:])
    torch.testing.assert_close(actual[: tiny.TRAINED_LENGTH] @ rows.T, values, rtol=0, atol=1e-11)
    torch.testing.assert_close(actual @ rows.T @ rows, actual, rtol=0, atol=1e-12)  # nothing along other directions
    assert torch.equal(
        actual[tiny.TRAINED_LENGTH :], actual[tiny.TRAINED_LENGTH - 1].expand(4 * tiny.TRAINED_LENGTH, -1)
    )
    assert len(set(actual[: tiny.TRAINED_LENGTH, 0].tolist())) > tiny.TRAINED_LENGTH // 2


@pytest.mark.parametrize("rates", [1, 2, 8])
def test_exponentials_decay_at_their_rates(rates: int) -> None:
    positions = torch.tensor([0, 1, 2, 7, 47, 48, 100, 10**6])
    scheme, actual = embeddings_of({"type": "exponential", "rates": rates}, positions)
    values = actual @ directions_of(scheme).T
    for row, position in enumerate(positions.tolist()):
        for number in range(rates):
            rate = tiny.TRAINED_LENGTH ** (number / (rates - 1)) if rates > 1 else 1.0
            expected = math.exp(-rate * position / tiny.TRAINED_LENGTH)
            assert abs(values[row, number].item() - expected) < 1e-13
    assert (actual.norm(dim=-1) <= math.sqrt(rates) + 1e-12).all()
    torch.testing.assert_close(values[5, 0].item(), math.exp(-1))  # the slowest rate over max_positions
    if rates > 1:
        torch.testing.assert_close(values[1, -1].item(), math.exp(-1))  # the fastest rate over one position


def test_projection_directions_never_change() -> None:
    """Checkpoints do not store them, so other directions would silently change the model."""
    assert sample_dct_rows(5, 32) == [26, 16, 4, 13, 8]
    assert sample_dct_rows(3, 768) == [403, 41, 187]
    assert sorted(sample_dct_rows(31, 32)) == list(range(1, 32))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("mix", ["concat", "attention"])
def test_autocast_does_not_narrow_hidden_states(architecture: str, mix: str) -> None:
    """Products under autocast are bfloat16, but the stock model's embeddings are not, and neither may a mix's be."""
    model = tiny.model(architecture, {"type": "sinusoidal", "mix": mix}, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model(tiny.tokens(2, 10), output_hidden_states=True).hidden_states
    assert {state.dtype for state in states} == {torch.float32}
