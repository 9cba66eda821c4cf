"""Models whose layer types rotate differently, such as Gemma 3: `layers` takes types, and options inherit by type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.patches import build_explanation
from tests.support import tiny_models as tiny

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
LENGTH = 12


def gemma(full: dict[str, Any] | None = None, sliding: dict[str, Any] | None = None) -> Gemma3ForCausalLM:
    """A stock Gemma 3 of four layers, with other rotary settings for a type of layers."""
    rotations = {
        FULL: {"rope_type": "default", "rope_theta": 1000.0, **(full or {})},
        SLIDING: {"rope_type": "default", "rope_theta": 50.0, **(sliding or {})},
    }
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3TextConfig(
        vocab_size=tiny.VOCABULARY,
        head_dim=8,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        sliding_window=5,
        max_position_embeddings=tiny.TRAINED_LENGTH,
        rope_parameters=rotations,
        **sizes,
    )
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).double().eval()


@torch.no_grad()
def logits(model: Any, scheme: Any = None) -> torch.Tensor:
    if scheme is not None:
        hf_posenc.retrofit(model, scheme)
    return model(tiny.tokens(2, LENGTH)).logits


@pytest.mark.parametrize(
    ("scheme", "full", "sliding"),
    [
        ([{"type": "rope", "layers": FULL, "scaling": LINEAR}, {"type": "rope", "layers": SLIDING}], LINEAR, None),
        ([{"type": "rope", "layers": FULL}, {"type": "rope", "layers": SLIDING, "scaling": LINEAR}], None, LINEAR),
        ({"type": "rope", "scaling": LINEAR}, LINEAR, LINEAR),
        (
            [{"type": "rope", "except_layers": FULL, "theta": 90.0}, {"type": "rope", "layers": FULL}],
            None,
            {"rope_theta": 90.0},
        ),
    ],
)
def test_rotation_of_a_layer_type_equals_the_stock_settings(scheme: Any, full: Any, sliding: Any) -> None:
    """Also if one rotation acts in layers of both types: each keeps its own theta."""
    expected = logits(gemma(full, sliding))
    torch.testing.assert_close(logits(gemma(), scheme), expected, rtol=0, atol=1e-12)
    assert (logits(gemma()) - expected).abs().max() > 1e-4
    if scheme == {"type": "rope", "scaling": LINEAR}:
        one_theta = logits(gemma({**LINEAR}, {**LINEAR, "rope_theta": 1000.0}))
        assert (one_theta - expected).abs().max() > 1e-4


def test_other_schemes_by_layer_type() -> None:
    by_type, by_index = (
        logits(gemma(), [{"type": "alibi", "layers": full}, {"type": "rope", "layers": sliding}])
        for full, sliding in ((FULL, SLIDING), ([1, 3], "0::2"))
    )
    assert torch.equal(by_type, by_index)
    assert torch.equal(
        logits(gemma(), {"type": "none", "layers": FULL}), logits(gemma(), {"type": "none", "layers": [1, 3]})
    )


def test_parameters_keep_their_names() -> None:
    """A rotation that is split by type takes no index from the schemes after it."""
    model = hf_posenc.retrofit(gemma(), [{"type": "rope", "scaling": LINEAR}, {"type": "t5", "layers": SLIDING}])
    names = [name for name, _ in model.named_parameters() if "position_scheme" in name]
    assert names
    assert all("position_scheme.1." in name for name in names)
    active = [" ".join(layer.active) for layer in build_explanation(model).layers]
    assert ["t5" in layer for layer in active] == [True, False, True, False]
    assert all(layer.count("rope") == 1 for layer in active)


def test_cached_decoding_equals_a_full_forward() -> None:
    model = hf_posenc.retrofit(gemma(), {"type": "rope", "scaling": LINEAR})
    ids = tiny.tokens(2, LENGTH)
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        rest = model(ids[:, 7:], past_key_values=cache).logits
        torch.testing.assert_close(rest, model(ids).logits[:, 7:], rtol=0, atol=1e-9)


def test_saved_and_loaded(tmp_path: Any) -> None:
    model = hf_posenc.retrofit(
        gemma().float(), [{"type": "rope", "layers": FULL, "scaling": LINEAR}, {"type": "alibi", "layers": SLIDING}]
    )
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.models.PosEncGemma3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded.eval()), logits(model))


@pytest.mark.parametrize(
    ("architecture", "layers", "match"),
    [
        ("llama", FULL, "the model has no layers of this type: name them by index"),
        ("llama", "chunked_attention", "or full_attention or sliding_attention; got 'chunked_attention'"),
    ],
)
def test_types_that_a_model_does_not_have(architecture: str, layers: str, match: str) -> None:
    with pytest.raises(PosEncError, match=match):
        tiny.model(architecture, {"type": "rope", "layers": layers})
