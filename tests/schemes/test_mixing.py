"""Schemes at the input embedding and the ways of mixing them in, against a plain computation fed to the stock model."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numpy.polynomial import chebyshev

import hf_posenc
from hf_posenc.schemes.functional import cosine_rows, sample_frequencies
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.oracles import LENGTH, tolerance

WIDTH, HEAD = tiny.WIDTH, tiny.WIDTH // tiny.HEADS
OWN_TABLES = {"gpt2": "transformer.wpe.weight", "bert": "bert.embeddings.position_embeddings.weight"}
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
by_architecture = pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
by_scheme = pytest.mark.parametrize("name", SCHEMES)
Known = Callable[[int, int], list[int]]
"""Row and token to the tokens that it may know of."""


def vector(scheme: Any, p: dict[str, torch.Tensor], position: int) -> torch.Tensor:
    """The vector of one position by the formula of a scheme."""
    width, options, last = scheme.position_size, scheme.options, getattr(scheme, "max_positions", 0)
    if scheme.name == "learned":
        return p["weight"][position]
    if scheme.name == "window":
        size = options.window_size
        return p["places"][position % size] + p["windows"][min(position // size, -(-tiny.TRAINED_LENGTH // size) - 1)]
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
        [math.sqrt(2 / width) * math.cos(math.pi / width * wave * (feature + 0.5)) for feature in range(width)]
        for wave in scheme.waves
    ]
    return torch.tensor(values, dtype=torch.float64) @ torch.tensor(directions, dtype=torch.float64)


def mixed(scheme: Any, p: dict[str, torch.Tensor], words: torch.Tensor, asking: torch.Tensor) -> torch.Tensor:
    """What one scheme makes of the words (B, n, E), token by token. `asking`: what asks if it is the context."""
    rows = []
    for row in range(words.shape[0]):
        for token in range(words.shape[1]):
            word, place = words[row, token], vector(scheme, p, token)
            if scheme.options.mix == "add":
                rows.append(word + place)
            elif scheme.options.mix == "concat":
                rows.append(p["mixer.weight"][:, :WIDTH] @ word + p["mixer.weight"][:, WIDTH:] @ place)
            else:
                query = p["mixer.query"] @ (asking[row, token] if scheme.options.query == "context" else word)
                keys = p["mixer.word_key"] @ word, p["mixer.position_key"] @ place
                of_word, of_place = (torch.exp(query @ key / math.sqrt(HEAD)) for key in keys)
                values = of_word * (p["mixer.word_value"] @ word) + of_place * (p["mixer.position_value"] @ place)
                rows.append(values / (of_word + of_place))
    return torch.stack(rows).view_as(words)


def means(words: torch.Tensor, known: Known) -> torch.Tensor:
    """The mean of the words that each token may know of; zero where it knows of none."""
    rows, tokens = words.shape[:2]
    found = [[words[row, known(row, token)].sum(0) for token in range(tokens)] for row in range(rows)]
    counts = [[max(len(known(row, token)), 1) for token in range(tokens)] for row in range(rows)]
    return torch.stack([torch.stack(row) for row in found]) / torch.tensor(counts).unsqueeze(-1)


def equals_the_plain_computation(architecture: str, position_scheme: Any) -> tuple[Any, torch.Tensor]:
    """Logits, gradients of stock weights and of all parameters of the schemes. Returns the model and its logits."""
    model, ids, padding = tiny.model(architecture, position_scheme), tiny.tokens(2, LENGTH), torch.ones(2, LENGTH)
    padding[1, -3:] = 0
    real = [LENGTH, LENGTH - 3]
    stock, schemes = oracles.silent_stock(architecture), list(model.base_model.position_scheme)
    theirs: dict[str, torch.Tensor] = {}

    def leaf(name: str) -> torch.Tensor:
        return theirs.setdefault(name, model.get_parameter(name).detach().clone().requires_grad_())

    def known(row: int, token: int) -> list[int]:
        return list(range(real[row] if architecture == "bert" else min(token + 1, real[row])))

    embeds = stock.get_input_embeddings()(ids)
    asking = means(embeds, known)
    for place, scheme in enumerate(schemes):
        prefix = f"{model.base_model_prefix}.position_scheme.{place}."
        parameters = {name: leaf(prefix + name) for name, _ in scheme.named_parameters()}
        if scheme.name == "learned" and architecture in OWN_TABLES:
            parameters["weight"] = leaf(OWN_TABLES[architecture])
        embeds = mixed(scheme, parameters, embeds, asking)
    expected = stock(inputs_embeds=embeds, attention_mask=padding).logits
    found, atol = model(ids, attention_mask=padding).logits, tolerance(architecture)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    expected_gradients, gradients = oracles.gradients(stock, expected), oracles.gradients(model, found)
    expected_gradients.pop(OWN_TABLES.get(architecture, ""), None)  # of the silenced table
    expected_gradients.update({name: value.grad for name, value in theirs.items()})
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = gradient.abs().max().clamp(min=1)
        torch.testing.assert_close(
            gradients[name] / scale, gradient / scale, rtol=0, atol=atol, msg=lambda t, n=name: f"{n}: {t}"
        )
    with torch.no_grad():  # the control: each of the parameters is seen
        for name in theirs:
            parameter = model.get_parameter(name)
            kept, place = parameter.clone(), parameter.grad.abs().argmax()
            parameter.view(-1)[place] += 0.05
            assert (model(ids, attention_mask=padding).logits - expected).abs().max() > 10 * atol, name
            parameter.copy_(kept)
    return model, found


@by_architecture
@by_scheme
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_equal_the_stock_model_given_the_mixture(architecture: str, name: str, mix: str) -> None:
    narrow = mix == "concat" and not (name == "learned" and architecture in OWN_TABLES)
    size = {"position_size": 10} if narrow else {}
    equals_the_plain_computation(architecture, {**SCHEMES[name], **MIXES[mix], **size})


@by_architecture
def test_schemes_of_a_list_are_applied_in_its_order(architecture: str) -> None:
    """W [word + table; wave], and the other way round W [word; wave] + table, with a W that is far from [I | I]."""
    concat = {"type": "sinusoidal", "mix": "concat"}
    _, found = equals_the_plain_computation(architecture, ["learned", concat])
    model, other = equals_the_plain_computation(architecture, [concat, "learned"])
    assert (found - other).abs().max() > 1e-2
    weight = model.base_model.position_scheme[0].mixer.weight
    assert (weight[:, :WIDTH] - torch.eye(WIDTH)).abs().mean() > 0.1


def fresh(architecture: str, position_scheme: Any, dtype: torch.dtype) -> Any:
    """A mix as it begins, beside tables that are not zero."""
    model = hf_posenc.retrofit(tiny.model(architecture, dtype=dtype), position_scheme)
    with torch.no_grad():
        for name, parameter in model.base_model.position_scheme.named_parameters():
            if "mixer" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@by_architecture
@by_scheme
@pytest.mark.parametrize("mix", ["concat", "token", "context"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_mix_begins_as_the_sum_to_the_bit(architecture: str, name: str, mix: str, dtype: torch.dtype) -> None:
    ids = tiny.tokens(2, LENGTH)
    added = fresh(architecture, SCHEMES[name], dtype)(ids).logits
    found = fresh(architecture, {**SCHEMES[name], **MIXES[mix]}, dtype)(ids).logits
    assert (added - fresh(architecture, "none", dtype)(ids).logits).abs().max() > 1e-3
    if (architecture, name) == ("bert", "learned"):  # BERT adds its own table after the token types, a mix before them
        torch.testing.assert_close(found, added, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    else:
        assert torch.equal(found, added)


@pytest.mark.parametrize("size", [10, 40])
def test_a_narrow_or_wide_concat_begins_with_what_fits(size: int) -> None:
    scheme, ids = {"type": "sinusoidal", "mix": "concat", "position_size": size}, tiny.tokens(2, LENGTH)
    model, stock = fresh("gpt2", scheme, torch.float64), oracles.silent_stock("gpt2")
    expected = stock.get_input_embeddings()(ids).clone()
    for token in range(LENGTH):
        for feature in range(min(size, WIDTH)):
            wave = math.cos if feature % 2 else math.sin
            expected[:, token, feature] += wave(token / 10000 ** (2 * (feature // 2) / size))
    torch.testing.assert_close(model(ids).logits, stock(inputs_embeds=expected).logits, rtol=0, atol=1e-12)


@by_architecture
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("mix", ["concat", "token", "context"])
def test_a_neutral_mix_leaves_the_words_alone_and_can_learn(architecture: str, name: str, mix: str) -> None:
    ids = tiny.tokens(2, LENGTH)
    model = fresh(architecture, {**SCHEMES[name], **MIXES[mix], "mix_init": "neutral"}, torch.float64)
    found = model(ids).logits
    assert torch.equal(found, fresh(architecture, "none", torch.float64)(ids).logits)
    found.square().mean().backward()
    mixer = model.base_model.position_scheme[0].mixer
    of_positions = mixer.weight.grad[:, WIDTH:] if mix == "concat" else mixer.position_value.grad
    assert of_positions.abs().max() > 1e-4


def vectors_of(position_scheme: Any, positions: torch.Tensor, **changes: Any) -> tuple[Any, torch.Tensor]:
    scheme = tiny.model("llama", position_scheme, **changes).base_model.position_scheme[0]
    return scheme, scheme.position_embeddings(types.SimpleNamespace(queries_BQ=positions[None], dtype=torch.float64))[0]


@pytest.mark.parametrize("degree", [1, 3, 31])
def test_polynomials_are_chebyshevs_along_orthonormal_directions(degree: int) -> None:
    scheme, found = vectors_of({"type": "polynomial", "degree": degree}, torch.arange(5 * tiny.TRAINED_LENGTH))
    rows = cosine_rows(scheme.waves, WIDTH, torch.device("cpu"), torch.float64)
    torch.testing.assert_close(rows @ rows.T, torch.eye(degree, dtype=torch.float64), rtol=0, atol=1e-13)
    arguments = torch.linspace(-1, 1, tiny.TRAINED_LENGTH, dtype=torch.float64)
    values = torch.from_numpy(chebyshev.chebvander(arguments.numpy(), degree)[:, 1:])
    torch.testing.assert_close(found[: tiny.TRAINED_LENGTH] @ rows.T, values, rtol=0, atol=1e-11)
    torch.testing.assert_close(found @ rows.T @ rows, found, rtol=0, atol=1e-12)  # nothing along other directions
    assert torch.equal(found[tiny.TRAINED_LENGTH :], found[tiny.TRAINED_LENGTH - 1].expand(4 * tiny.TRAINED_LENGTH, -1))
    assert len(set(found[: tiny.TRAINED_LENGTH, 0].tolist())) > tiny.TRAINED_LENGTH // 2


@pytest.mark.parametrize("rates", [1, 2, 8])
def test_exponentials_fade_at_their_rates(rates: int) -> None:
    positions = torch.tensor([0, 1, 2, 7, 47, 48, 100, 10**6])
    scheme, found = vectors_of({"type": "exponential", "rates": rates}, positions)
    values = found @ cosine_rows(scheme.waves, WIDTH, torch.device("cpu"), torch.float64).T
    for place, position in enumerate(positions.tolist()):
        for number in range(rates):
            rate = tiny.TRAINED_LENGTH ** (number / (rates - 1)) if rates > 1 else 1.0
            expected = math.exp(-rate * position / tiny.TRAINED_LENGTH)
            assert abs(values[place, number].item() - expected) < 1e-13
    assert (found.norm(dim=-1) <= math.sqrt(rates) + 1e-12).all()
    torch.testing.assert_close(values[5, 0].item(), math.exp(-1))  # the slowest over max_positions
    if rates > 1:
        torch.testing.assert_close(values[1, -1].item(), math.exp(-1))  # the fastest over one position


def test_directions_are_the_same_in_every_release() -> None:
    """No checkpoint holds them: other ones would silently be another model."""
    assert sample_frequencies(5, 32) == [26, 16, 4, 13, 8]
    assert sample_frequencies(3, 768) == [403, 41, 187]
    assert sorted(sample_frequencies(31, 32)) == list(range(1, 32))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("mix", ["concat", "attention"])
def test_autocast_does_not_narrow_what_goes_through_the_layers(architecture: str, mix: str) -> None:
    """A product under autocast is bfloat16; the stock model's word embeddings are not, nor is what is added to them."""
    model = tiny.model(architecture, {"type": "sinusoidal", "mix": mix}, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model(tiny.tokens(2, 10), output_hidden_states=True).hidden_states
    assert {state.dtype for state in states} == {torch.float32}
