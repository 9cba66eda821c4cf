"""Frequencies of rope: Resonance RoPE, FoPE and LongRoPE factors equal loops over positions and pairs of features."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosEncError
from hf_posenc.schemes.frequencies import _normal_numbers, round_wavelengths
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.oracles import LENGTH, assert_equal_models, assert_equals_stock_with_layers

PAIRS = tiny.WIDTH // tiny.HEADS // 2
ANGLE_TOLERANCE = 2e-5
"""Angles have float32 precision, as in LLaMA; the loops have float64."""


def loop_rotation(mix: Callable[[int, int], tuple[float, float]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rotate states by the cosine and sine that a function returns for a position and a pair of features."""

    def rotate(states: torch.Tensor) -> torch.Tensor:
        result = states.clone()
        for position in range(states.shape[2]):
            for pair in range(PAIRS):
                cos, sin = mix(position, pair)
                first, second = states[:, :, position, pair], states[:, :, position, pair + PAIRS]
                result[:, :, position, pair] = cos * first - sin * second
                result[:, :, position, pair + PAIRS] = sin * first + cos * second
        return result

    return rotate


def by_angle(frequencies: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    return loop_rotation(
        lambda position, pair: (math.cos(position * frequencies[pair]), math.sin(position * frequencies[pair]))
    )


def plain_frequencies(theta: float) -> list[float]:
    return [theta ** (-pair / PAIRS) for pair in range(PAIRS)]


@pytest.mark.parametrize("architecture", ["llama", pytest.param("bert", marks=pytest.mark.slow), "gpt2"])
def test_resonance_equals_a_loop_over_whole_wavelengths(architecture: str) -> None:
    ids, theta = tiny.tokens(2, LENGTH), 50.0
    wavelengths = [round(2 * math.pi / frequency) for frequency in plain_frequencies(theta)]
    assert wavelengths == [6, 17, 44, 118]
    layer = oracles.LayerOracle(rotation=by_angle([2 * math.pi / wavelength for wavelength in wavelengths]))
    scheme = {"type": "rope", "theta": theta, "resonance": True}
    expected = assert_equals_stock_with_layers(architecture, scheme, [layer] * tiny.LAYERS, ids, ANGLE_TOLERANCE)
    other = tiny.model(architecture, {"type": "rope", "theta": theta})(ids).logits
    assert (other - expected).abs().max() > 1e-3


def test_resonance_rounds_after_scaling_and_keeps_dropped_frequencies() -> None:
    scaling = {"rope_type": "linear", "factor": 1.5}
    scheme = {"type": "rope", "theta": 50.0, "scaling": scaling, "resonance": True, "frequency_fraction": 0.75}
    frequencies = tiny.model("llama", scheme).model.position_scheme[0].frequencies
    scaled = [2 * math.pi * 1.5 / frequency for frequency in plain_frequencies(50.0)]
    assert frequencies == pytest.approx([2 * math.pi / round(wavelength) for wavelength in scaled[:3]] + [0.0])
    fastest = round_wavelengths(torch.tensor([6.0, 5.0, 0.0]))
    assert fastest.tolist() == pytest.approx([math.pi, math.pi, 0.0]), "at a wavelength of 1, nothing would rotate"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("bert", marks=pytest.mark.slow), "gpt2"])
@pytest.mark.parametrize("gain", [0.5, 0.0])
def test_fourier_equals_a_loop_over_frequencies(architecture: str, gain: float) -> None:
    """Of the frequencies 1, 0.47, 0.22 and 0.11, the last completes no turn within the trained length of 48."""
    ids, theta, kept = tiny.tokens(2, LENGTH), 20.0, 3
    frequencies = plain_frequencies(theta)
    assert frequencies[kept] < 2 * math.pi / tiny.TRAINED_LENGTH < frequencies[kept - 1]
    cos_weights, sin_weights = _normal_numbers(PAIRS)

    def mix(position: int, pair: int) -> tuple[float, float]:
        if pair >= kept:
            return 1.0, 0.0
        cos, sin = math.cos(position * frequencies[pair]), math.sin(position * frequencies[pair])
        for other in range(kept):
            angle, scale = position * frequencies[other], gain / math.sqrt(kept)
            cos += scale * cos_weights[other][pair] * math.cos(angle)
            sin += scale * sin_weights[other][pair] * math.sin(angle)
        return cos, sin

    layers = [oracles.LayerOracle(rotation=loop_rotation(mix))] * tiny.LAYERS
    scheme = {"type": "rope", "theta": theta, "fourier": gain}
    expected = assert_equals_stock_with_layers(architecture, scheme, layers, ids, ANGLE_TOLERANCE)
    for control in ({"fourier": gain + 0.01}, {"frequency_fraction": 0.5}):
        other = tiny.model(architecture, {"type": "rope", "theta": theta, **control})(ids).logits
        assert (other - expected).abs().max() > 1e-4


def test_fourier_coefficients_never_change() -> None:
    """Checkpoints do not contain them."""
    cos_weights, sin_weights = (list(itertools.chain(*rows)) for rows in _normal_numbers(32))
    assert [round(number, 6) for number in cos_weights[:3] + sin_weights[:2]] == [
        -1.816801,
        1.681152,
        0.384656,
        -0.648419,
        -0.104811,
    ]
    for numbers in (cos_weights, sin_weights):
        assert abs(statistics.fmean(numbers)) < 0.1
        assert statistics.pstdev(numbers) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fourier": 0.3, "extend": {"method": "rerope"}}, "leave out extend or fourier"),
        ({"fourier": -1.0}, "fourier must be at least 0"),
        ({"fourier": True}, "fourier must be a finite number or None"),
        (
            {"fourier": 0.3, "scaling": {"rope_type": "linear", "factor": 100.0}},
            "no frequency completes a turn within 48",
        ),
        ({"resonance": 1}, "resonance must be true or false"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(PosEncError, match=match):
        tiny.model("llama", {"type": "rope", **options})


def test_longrope_factors_by_frequency() -> None:
    """LongRoPE2: the original angles up to the original length, and searched factors for longer inputs."""
    factors = [1.0, 1.5, 3.0, 5.0]
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": factors, "attention_factor": 1.0}
    model = tiny.model("llama", {"type": "rope", "scaling": {**scaling, "original_max_position_embeddings": 48}})
    short, long = tiny.tokens(2, 48), tiny.tokens(1, 49)
    torch.testing.assert_close(model(short).logits, tiny.model("llama")(short).logits, rtol=0, atol=1e-12)
    stock = tiny.model("llama")
    stock.model.rotary_emb.inv_freq.div_(torch.tensor(factors))
    assert_equal_models(model, stock, stock(long).logits, long, oracles.tolerance("llama"))
    assert (tiny.model("llama")(long).logits - stock(long).logits).abs().max() > 1e-4
