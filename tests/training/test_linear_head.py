"""Training without materialized logits gives the loss and gradients of training with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_posenc.training import LossWeights, RecoveryTrainer, Teacher, divergence, linear_head
from hf_posenc.training.linear_head import LOGITS_TO_KEEP, find_linear_head
from tests.support import tiny_models as tiny
from tests.support.training_runs import settings

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.VOCABULARY, "pad_token_id": 0}
Gradients = dict[str, torch.Tensor]


@pytest.mark.parametrize("scheme", [None, "t5"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_linear_heads_are_found(architecture: str, scheme: str | None) -> None:
    model = tiny.model(architecture, scheme)
    assert find_linear_head(model, {"input_ids": tiny.tokens()}) is model.lm_head


@pytest.mark.parametrize(
    ("model_class", "config", "is_linear"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=30.0), False),
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=None), True),
        (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=2.0), False),
    ],
)
def test_softcaps_and_scales_are_noticed(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, is_linear: bool
) -> None:
    """Even if the logits are so small that a softcap hardly matters, and in half precision."""
    for dtype in (torch.float32, torch.bfloat16):
        model = model_class(config).to(dtype)
        state = torch.get_rng_state()
        assert (find_linear_head(model, {"input_ids": tiny.tokens()}) is not None) == is_linear
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training


def test_other_heads_compute_all_logits() -> None:
    assert find_linear_head(tiny.model("bert"), {"input_ids": tiny.tokens()}) is None
    model = tiny.model("gpt2")
    model.lm_head.register_forward_hook(lambda *args: None)
    assert find_linear_head(model, {"input_ids": tiny.tokens()}) is None


def gradients(
    directory: Path,
    architecture: str = "llama",
    dtype: torch.dtype = torch.float64,
    weights: LossWeights | None = None,
    tied: bool = False,
    **changes: Any,
) -> tuple[float, Gradients, set[str]]:
    """Loss and gradients of two accumulated batches, and the names of the arguments passed to the student."""
    config = {} if architecture == "bert" else {"tie_word_embeddings": tied}
    model = tiny.model(architecture, "t5", dtype, **config).train()
    trainer = RecoveryTrainer(
        model=model,
        args=settings(directory, gradient_accumulation_steps=2, **changes),
        teacher=Teacher(tiny.model(architecture, None, dtype, **config)),
        loss_weights=weights,
    )
    trainer.state.max_steps = 6
    names: set[str] = set()
    model.register_forward_pre_hook(lambda module, args, kwargs: names.update(kwargs), with_kwargs=True)
    prepared = trainer.accelerator.prepare_model(model)
    if changes.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    total = 0.0
    for seed in range(2):
        ids = tiny.tokens(seed=seed)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        loss = trainer.compute_loss(prepared, batch)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, names


@pytest.mark.parametrize(
    ("architecture", "options", "tolerance"),
    [
        ("gpt2", {"tied": True}, 1e-9),
        ("llama", {}, 3e-6),  # LLaMA's norms are in float32
        ("llama", {"gradient_checkpointing": True}, 3e-6),
        ("llama", {"bf16": True, "dtype": torch.float32}, 2e-2),
    ],
)
def test_same_loss_and_gradients(
    architecture: str, options: dict[str, Any], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 5 * tiny.VOCABULARY)
    loss, lean, names = gradients(tmp_path, architecture, **options)
    assert LOGITS_TO_KEEP in names
    monkeypatch.setattr(linear_head, "find_linear_head", lambda *args: None)
    expected_loss, expected, names = gradients(tmp_path, architecture, **options)
    assert LOGITS_TO_KEEP not in names
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert set(lean) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(lean[name], gradient, rtol=0, atol=tolerance * gradient.abs().max().item(), msg=name)
    _, other, _ = gradients(tmp_path, architecture, weights=LossWeights(kl=0.8), **options)
    difference = max((other[name] - gradient).abs().max() / gradient.abs().max() for name, gradient in expected.items())
    assert difference > 2 * tolerance, "control: another weight of the divergence"


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_labels_are_passed_only_for_a_label_loss(architecture: str, tmp_path: Path) -> None:
    _, _, names = gradients(tmp_path, architecture)
    assert "labels" not in names
    _, _, names = gradients(tmp_path, architecture, weights=LossWeights(label=0.5))
    assert "labels" in names
    assert LOGITS_TO_KEEP not in names
