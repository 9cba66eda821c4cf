"""`none` with `layers`: no positions in these layers, and the other schemes or the model's own encoding elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny

MIDDLE = {"type": "none", "layers": "1::3"}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny.tokens()).logits


def smollm3(use_rope: list[int], position_scheme: Any = None) -> Any:
    """SmolLM3 is LLaMA with a list of the layers that rotate."""
    llama = tiny.config("llama").to_dict()
    sizes = {key: llama[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    sizes |= {key: llama[key] for key in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
    sizes |= {"rope_parameters": llama["rope_parameters"], "pad_token_id": 0, "tie_word_embeddings": False}
    config = SmolLM3Config(**sizes, no_rope_layers=use_rope, position_scheme=position_scheme, use_sliding_window=False)
    model = SmolLM3ForCausalLM(config).double().eval()
    model.load_state_dict(tiny.model("llama").state_dict())
    return model


@pytest.mark.parametrize(
    "scheme",
    [
        MIDDLE,
        ["rope", MIDDLE],
        [MIDDLE, "rope"],
        {"type": "none", "except_layers": [0, 2]},
        {"type": "rope", "except_layers": [1]},
        ["rope", {"type": "none", "layers": ":", "except_layers": [0, 2]}],
    ],
    ids=str,
)
def test_own_encoding_stays_in_the_other_layers(scheme: Any) -> None:
    expected = logits(smollm3([1, 0, 1]))
    torch.testing.assert_close(logits(tiny.model("llama", scheme)), expected, rtol=0, atol=1e-12)
    for control in ([1, 1, 1], [0, 0, 0], [0, 1, 0]):
        assert (logits(smollm3(control)) - expected).abs().max() > 1e-3


def test_layers_that_never_had_positions_stay_without() -> None:
    expected = logits(smollm3([0, 0, 1]))
    torch.testing.assert_close(logits(smollm3([1, 0, 1], {"type": "none", "layers": [0]})), expected, rtol=0, atol=0)


def test_none_in_every_layer_is_none() -> None:
    for architecture in ("llama", "gpt2"):
        everywhere = tiny.model(architecture, {"type": "none", "layers": ":"})
        assert torch.equal(logits(everywhere), logits(tiny.model(architecture, "none")))


def test_other_schemes_leave_the_layers(tmp_path: Path) -> None:
    t5 = {"type": "t5", "num_buckets": 8, "shared": False}
    for architecture in ("gpt2", "llama", "bert"):
        model = tiny.model(architecture, [t5, MIDDLE])
        same = tiny.model(architecture, {**t5, "layers": [0, 2]})
        assert torch.equal(logits(model), logits(same))
        names = [name for name, _ in model.named_parameters() if "position_scheme" in name]
        assert names == [name for name, _ in same.named_parameters() if "position_scheme" in name]
        assert not any(".1." in name.split("position_scheme")[0] for name in names)


def test_saved_and_loaded(tmp_path: Path) -> None:
    stock = tiny.model("llama", dtype=torch.float32)
    stock.save_pretrained(tmp_path / "stock")
    expected = logits(hf_posenc.retrofit(stock, MIDDLE))
    variant = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", position_scheme=MIDDLE)
    assert torch.equal(logits(variant), expected)
    variant.save_pretrained(tmp_path / "variant")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    assert loaded.config.position_scheme == MIDDLE
    assert torch.equal(logits(loaded), expected)
    cache = loaded(tiny.tokens()[:, :7]).past_key_values
    cached = loaded(tiny.tokens()[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(cached, expected[:, 7:], rtol=0, atol=1e-5)
    assert "rope: " in str(hf_posenc.explain(loaded))
    restored = hf_posenc.restore(stock)
    assert torch.equal(logits(restored), logits(LlamaForCausalLM.from_pretrained(tmp_path / "stock")))


@pytest.mark.parametrize(
    ("architecture", "scheme", "match"),
    [
        ("gpt2", MIDDLE, r"own encoding \(learned\).*reaches every layer.*\"rope\""),
        ("bert", {"type": "none", "except_layers": [0]}, "reaches every layer"),
        ("llama", [{"type": "rope", "layers": [1]}, MIDDLE], "rope has no layers left"),
        ("llama", {"type": "none", "layers": [7]}, "layers has no layer 7"),
    ],
)
def test_contradictions_are_refused(architecture: str, scheme: Any, match: str) -> None:
    with pytest.raises(PosEncError, match=match):
        tiny.model(architecture, scheme)
