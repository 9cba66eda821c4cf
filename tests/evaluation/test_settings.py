"""Settings and lengths."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posenc.errors import PosEncError
from hf_posenc.evaluation.settings import EvaluationSettings, resolve_lengths
from tests.support import tiny_models as tiny


def test_lengths_are_tokens_or_multiples_of_the_trained_length() -> None:
    assert resolve_lengths(["0.5x", "1x", 100, "16X"], {}, 48) == ((24, 48, 100, 768), 48)
    assert resolve_lengths(["1x", 48], {}, 48) == ((48,), 48)
    for wrong in ("2y", "x", "1.5", "nanx", ""):
        with pytest.raises(PosEncError, match="Invalid length"):
            resolve_lengths([wrong], {}, 48)
    with pytest.raises(PosEncError, match="below 2"):
        resolve_lengths([1], {}, 48)
    with pytest.raises(PosEncError, match="at least one"):
        resolve_lengths([], {}, 48)


def test_trained_length_must_be_shared_or_set() -> None:
    configs = {"a": tiny.config("gpt2"), "b": tiny.config("llama", max_position_embeddings=64)}
    with pytest.raises(PosEncError, match="a: 48, b: 64.*--trained-length"):
        resolve_lengths(["1x"], configs)
    assert resolve_lengths([20], configs) == ((20,), None)
    assert resolve_lengths(["1x"], configs, 64) == ((64,), 64)
    assert resolve_lengths(["1x"], {"a": configs["a"]}) == ((48,), 48)
    with pytest.raises(PosEncError, match="0"):
        resolve_lengths(["1x"], configs, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stride": 0},
        {"batch_tokens": 0},
        {"confidence": 95},
        {"mlm_probability": 1.0},
        {"passkey_depths": [2]},
        {"shuffle_blocks": [1]},
        {"dtype": "int3"},
        {"task": "dance"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_invalid_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(PosEncError, match=next(iter(wrong))):
        EvaluationSettings(**wrong)
