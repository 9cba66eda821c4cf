"""`retrofit` and `restore` change a model as a whole or not at all, and give it its own config back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import EncoderDecoderModel

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny


class Injected(Exception):
    """The failure of one step."""


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that changing a model could leave behind, by identity."""
    seen: list[Any] = []
    for path, module in model.named_modules():
        attributes = {name: id(value) for name, value in vars(module).items() if not name.startswith("_")}
        parts = [(name, id(value)) for name, value in (*module._parameters.items(), *module._modules.items())]
        config = getattr(module, "config", None)
        values = {name: id(value) for name, value in vars(config).items()} if config is not None else None
        seen.append((path, type(module), attributes, parts, type(config), values))
    return seen


def fail_at(step: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run an action whose change number `step` of any module's attribute fails; False if it has fewer steps."""
    count, stock = itertools.count(), nn.Module.__setattr__

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if next(count) == step:
            raise Injected
        stock(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__setattr__", __setattr__)
        try:
            action()
        except Injected:
            return True
    return False


def encoder_decoder() -> Any:
    return EncoderDecoderModel(tiny.composite_config())


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tiny.model("gpt2", dtype=torch.float32, n_layer=2),
    "llama": lambda: tiny.model("llama", dtype=torch.float32, num_hidden_layers=2),
    "bert-decoder": lambda: tiny.model("bert-decoder", dtype=torch.float32, num_hidden_layers=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_failure_at_any_step_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = MODELS[name](), tiny.tokens()
    before, logits = snapshot(model), model(ids).logits
    step = 0
    while fail_at(step, lambda: hf_posenc.retrofit(model, ["t5", "alibi"]), monkeypatch):
        assert snapshot(model) == before, f"step {step} of retrofit"
        step += 1
    assert step > 10, "too few steps for this test to mean anything"
    assert snapshot(model) != before  # control: it has succeeded now
    with torch.no_grad():
        changed = model(ids).logits
    during, step = snapshot(model), 0
    while fail_at(step, lambda: hf_posenc.restore(model), monkeypatch):
        assert snapshot(model) == during, f"step {step} of restore"
        step += 1
    assert step > 10
    assert not torch.equal(changed, logits)
    assert torch.equal(model(ids).logits, logits)


def test_failures_inside_functions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only where attributes are set: planning, initialization, and the classes of variants."""
    from hf_posenc.patches import live_models

    model = MODELS["gpt2"]()
    before = snapshot(model)
    for step in ("plan_schemes", "replace_configs", "keep_source_name", "init_live_weights", "attach", "swap_class"):
        with monkeypatch.context() as patch:
            stock = getattr(live_models, step)

            def fail(*args: Any, stock: Any = stock, **kwargs: Any) -> None:
                stock(*args, **kwargs)
                raise Injected

            patch.setattr(live_models, step, fail)
            with pytest.raises(Injected):
                hf_posenc.retrofit(model, "t5")
        assert snapshot(model) == before, step
    with pytest.raises(PosEncError):
        hf_posenc.retrofit(model, {"type": "t5", "num_buckets": 0})
    assert snapshot(model) == before


@pytest.mark.parametrize("name", MODELS)
def test_restore_gives_the_config_object_back(name: str) -> None:
    model = MODELS[name]()
    config, values = model.config, model.config.to_dict()
    hf_posenc.restore(hf_posenc.retrofit(model, "alibi"))
    assert all(module.config is config for module in model.modules() if hasattr(module, "config"))
    assert config.to_dict() == values


def test_restore_gives_nested_configs_back() -> None:
    model = encoder_decoder()
    configs = [model.config, model.config.encoder, model.config.decoder]
    hf_posenc.retrofit(model.encoder, "alibi")
    hf_posenc.restore(model.encoder)
    assert [model.config, model.encoder.config, model.decoder.config] == configs
    assert model.encoder.config is configs[1]


def test_restore_keeps_changes_of_the_config() -> None:
    model = MODELS["gpt2"]()
    config = model.config
    hf_posenc.retrofit(model, "alibi")
    model.resize_token_embeddings(70)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    config.summary_type = "mean"  # by another model that shares it
    hf_posenc.restore(model)
    assert model.config is config
    changed = (config.vocab_size, config.use_cache, config.summary_type, config._attn_implementation)
    assert changed == (70, False, "mean", "eager")
    assert model(tiny.tokens()).logits.shape[-1] == 70


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_pass_in_the_other_direction_is_refused(architecture: str) -> None:
    """Terms of the scores are built for one direction: buckets, masks by document, padding."""
    model, ids = tiny.model(architecture, "t5"), tiny.tokens()
    expected = model(ids).logits
    with pytest.raises(PosEncError, match="is_causal=True.*asked for is_causal=False"):
        model(ids, is_causal=False)
    model.config.is_causal = False
    with pytest.raises(PosEncError, match="is_causal"):
        model(ids)
    del model.config.is_causal
    attention = hf_posenc.patches.base_models(model)[0].architecture.self_attentions(model.base_model)[0]
    attention.is_causal = False
    with pytest.raises(PosEncError, match="is_causal"):
        model(ids)
    attention.is_causal = True
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("padded", [False, True])
def test_rotations_follow_the_direction_of_a_call(padded: bool) -> None:
    stock, ids = tiny.model("llama"), tiny.tokens()
    inputs = {"attention_mask": tiny.padding_mask(ids, [0, 3])} if padded else {}
    expected = [stock(ids, is_causal=is_causal, **inputs).logits for is_causal in (True, False)]
    model = hf_posenc.retrofit(stock, "rope")
    for is_causal, logits in zip((True, False), expected, strict=True):
        outputs = model(ids, is_causal=is_causal, **inputs).logits
        rows = inputs["attention_mask"].bool() if padded else torch.ones_like(ids, dtype=torch.bool)
        torch.testing.assert_close(outputs[rows], logits[rows], **tiny.tolerances("llama"))
    assert not torch.allclose(*expected, atol=1e-3)  # control
