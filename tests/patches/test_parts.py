"""Retrofitting the text model of a multimodal one, which is saved and loaded with the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    EncoderDecoderModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.patches import base_models
from tests.support import tiny_models as tiny

TEXT = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE = 60
PIXELS = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))


def gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config={**TEXT, "layer_types": layers, "sliding_window": 6},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return tiny.randomise(Gemma3ForConditionalGeneration(config)).eval()


def llava() -> PreTrainedModel:
    vision = {"model_type": "clip_vision_model", **VISION}
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT}, vision_config=vision, image_token_index=IMAGE, image_seq_length=4
    )
    return tiny.randomise(LlavaForConditionalGeneration(config)).eval()


@torch.no_grad()
def output(model: PreTrainedModel) -> torch.Tensor:
    ids = tiny.tokens(1, 14).clamp(max=IMAGE - 1)
    ids[:, 3:7] = IMAGE
    types = {"token_type_ids": (ids == IMAGE).long()} if isinstance(model, Gemma3ForConditionalGeneration) else {}
    return model(ids, pixel_values=PIXELS, **types).logits


@pytest.mark.parametrize("build", [gemma3, llava])
@pytest.mark.parametrize("scheme", ["rope", "alibi", {"type": "t5", "init": "paper"}], ids=str)
def test_text_model_is_saved_with_the_whole(build: Any, scheme: Any, tmp_path: Path) -> None:
    model = build()
    expected = output(model)
    config = model.config
    hf_posenc.retrofit(model.model.language_model, scheme)
    logits = output(model)
    assert torch.equal(logits, expected) == (scheme == "rope")
    model.save_pretrained(tmp_path)
    assert model.config is config
    nested = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "hf_posenc" in nested["initializer_range"], "stock classes must refuse it"
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert [base.config.position_scheme for base in base_models(loaded)] == [scheme]
    assert loaded.config.text_config.initializer_range == 0.02
    assert torch.equal(output(loaded.eval()), logits)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(output(type(model).from_pretrained(tmp_path / "again").eval()), logits)
    hf_posenc.restore(model.model.language_model)
    assert torch.equal(output(model), expected)


def test_the_whole_names_its_supported_part() -> None:
    with pytest.raises(PosEncError, match=r"model\.model\.language_model is: pass that"):
        hf_posenc.retrofit(gemma3(), "alibi")


def test_positions_in_three_dimensions_are_refused() -> None:
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    config = Qwen2_5_VLConfig(text_config=text, vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2})
    model = Qwen2_5_VLForConditionalGeneration(config)
    for part in (model, model.model.language_model):
        with pytest.raises(PosEncError, match="qwen2_5_vl"):
            hf_posenc.retrofit(part, "alibi")


def test_one_of_two_alike_parts_cannot_be_saved(tmp_path: Path) -> None:
    """Which of the two configs it belongs to is not recorded."""
    model = EncoderDecoderModel(tiny.composite_config())
    hf_posenc.retrofit(model.encoder, "alibi")
    with pytest.raises(PosEncError, match="does not name it"):
        model.save_pretrained(tmp_path)
