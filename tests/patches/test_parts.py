"""Retrofitting the text model of a multimodal one, which is saved and loaded with the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
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
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.patches import base_models
from tests.support import families
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


def qwen_vl() -> PreTrainedModel:
    if hasattr(modeling_qwen2_5_vl, "apply_multimodal_rotary_pos_emb"):
        pytest.skip(f"Qwen-VL of transformers {transformers.__version__} rotates outside the attention interface")
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rotary},
        vision_config={**vision, "patch_size": 14, "window_size": 28, "fullatt_block_indexes": [0]},
        image_token_id=IMAGE,
        vision_start_token_id=59,
    )
    return tiny.randomise(Qwen2_5_VLForConditionalGeneration(config)).eval()


def image_inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """An image of 4 x 4 patches for Qwen-VL, which merges 2 x 2 of them into a token."""
    patches = torch.rand(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0))
    types = {"mm_token_type_ids": (ids == IMAGE).int()}
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]]), **types}


@torch.no_grad()
def output(model: PreTrainedModel) -> torch.Tensor:
    ids = tiny.tokens(1, 14).clamp(max=IMAGE - 2)
    ids[:, 3:7] = IMAGE
    if isinstance(model, Qwen2_5_VLForConditionalGeneration):
        ids[:, 2] = 59
        return model(ids, **image_inputs(ids)).logits
    types = {"token_type_ids": (ids == IMAGE).long()} if isinstance(model, Gemma3ForConditionalGeneration) else {}
    return model(ids, pixel_values=PIXELS, **types).logits


@pytest.mark.parametrize("build", [gemma3, llava, qwen_vl])
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


@pytest.mark.parametrize("scheme", ["rope", "alibi"])
@torch.no_grad()
def test_generation_after_an_image(scheme: str) -> None:
    """Qwen-VL counts the positions of an image on three axes; schemes of our own see the tokens one after the other."""
    model = qwen_vl()
    ids = tiny.tokens(1, 14).clamp(max=IMAGE - 2)
    ids[:, 2], ids[:, 3:7] = 59, IMAGE
    inputs = image_inputs(ids)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    stock = model.generate(ids, **inputs, **options)
    hf_posenc.retrofit(model.model.language_model, scheme)
    generated = model.generate(ids, **inputs, **options)
    assert torch.equal(generated, stock) == (scheme == "rope")
    assert torch.equal(model.generate(ids, **inputs, **options, use_cache=False), generated)


@pytest.mark.parametrize("model_type", families.QWEN_VL)
def test_stock_rotations_keep_their_axes(model_type: str) -> None:
    stock, ids = families.model(model_type), tiny.tokens(2, 14)
    axes = torch.arange(14).expand(3, 2, -1).clone()
    axes[:, :, 3:7] = torch.tensor([[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]])[:, None]
    with_text = torch.cat([torch.arange(14).expand(1, 2, -1), axes])
    expected = families.output(stock, ids, position_ids=axes)
    assert families.differ(expected, families.output(stock, ids))
    variant = families.model(model_type, "rope")
    for position_ids in (axes, with_text):
        assert torch.equal(families.output(variant, ids, position_ids=position_ids), expected)
    combined = families.model(model_type, ["rope", "t5"])
    assert families.differ(families.output(combined, ids, position_ids=axes), families.output(combined, ids))
    by_distance = families.model(model_type, "alibi")
    torch.testing.assert_close(
        families.output(by_distance, ids, position_ids=axes), families.output(by_distance, ids), rtol=0, atol=1e-5
    )


def test_the_whole_names_its_supported_part() -> None:
    with pytest.raises(PosEncError, match=r"model\.model\.language_model is: pass that"):
        hf_posenc.retrofit(gemma3(), "alibi")


def test_one_of_two_alike_parts_cannot_be_saved(tmp_path: Path) -> None:
    """Which of the two configs it belongs to is not recorded."""
    model = EncoderDecoderModel(tiny.composite_config())
    hf_posenc.retrofit(model.encoder, "alibi")
    with pytest.raises(PosEncError, match="does not name it"):
        model.save_pretrained(tmp_path)
