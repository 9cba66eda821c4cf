"""`hf_posenc.support`: what it enables, what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertGenerationConfig,
    BertGenerationDecoder,
    BloomConfig,
    GPTJConfig,
    GPTJForCausalLM,
    Lfm2Config,
    Lfm2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import hf_posenc
from hf_posenc.config import auto_class_names
from hf_posenc.model_types import MODEL_TYPES
from hf_posenc.patches import ARCHITECTURES
from hf_posenc.patches.self_test import CHECKS
from tests.support.remote_models import write_remote_code, write_remote_model

TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
UPDATE = "key, value = past_key_values.update(key, value, self.layer_idx)"
INTERFACE = "attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]"
CAUSAL_CONFIG: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "is_decoder": True,
}


@pytest.fixture(autouse=True, scope="module")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformers copies remote code to a cache; to one that does not stay."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        monkeypatch.setattr(sys, "path", [cache, *sys.path])
        yield


def traces(model_type: str, config_class: type) -> list[str]:
    """Where a model type has left something behind."""
    variant = f"posenc_{model_type}"
    places = {
        "architectures": model_type in ARCHITECTURES,
        "model types": model_type in MODEL_TYPES,
        "field": "position_scheme" in vars(config_class),
        "configs": variant in CONFIG_MAPPING,
        "tokenizers": variant in TOKENIZER_MAPPING_NAMES,
        "auto classes": any(cls.model_type == variant for cls in auto_class_names),
        "config class": any(
            getattr(value, "stock_class", None) is config_class
            for value in vars(sys.modules["hf_posenc.config"]).values()
        ),
        "mappings": any(
            variant in mapping._model_mapping or any(cls.model_type == variant for cls in mapping._extra_content)
            for mapping in vars(modeling_auto).values()
            if isinstance(mapping, type(modeling_auto.MODEL_MAPPING))
        ),
    }
    return [place for place, left in places.items() if left]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(TOKENS).logits


def load(path: Path, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, **kwargs)


def support_remote(path: Path) -> Any:
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    return hf_posenc.support(config, trust_remote_code=True)


@pytest.fixture(scope="module")
def supported(modules_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with remote code, of a type that is supported."""
    path = write_remote_model(tmp_path_factory.mktemp("supported"), "own_llama")
    support_remote(path)
    return path


def test_supports_remote_code(supported: Path) -> None:
    report = support_remote(supported)  # the second time
    assert (report.architecture.layers, report.architecture.self_attention) == ("blocks", "mixer")
    assert len(report.checks) == 11
    assert "own_llama is supported (layers blocks, attention mixer, rotary)" in str(report)
    stock = logits(load(supported))
    assert torch.equal(logits(load(supported, position_scheme="rope")), stock)
    variant = load(supported, position_scheme="alibi")
    assert not torch.allclose(logits(variant), stock, atol=1e-4)
    live = hf_posenc.retrofit(load(supported), "alibi")
    assert torch.equal(logits(live), logits(variant))
    assert torch.equal(logits(hf_posenc.restore(live)), stock)
    assert torch.equal(logits(pickle.loads(pickle.dumps(variant))), logits(variant))
    generate = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(variant.generate(TOKENS, **generate), variant.generate(TOKENS, **generate, use_cache=False))


def test_saves_and_loads_variants_of_remote_code(supported: Path, tmp_path: Path) -> None:
    variant = load(supported, position_scheme="alibi")
    variant.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.py")] == ["modeling_hf_posenc.py"]
    for trusted in (False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trusted)
        assert type(loaded).__name__ == "PosEncOwnForCausalLM"
        assert loaded.config.position_scheme == "alibi"
        assert torch.equal(logits(loaded), logits(variant))
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "PosEncOwnModel"


def test_a_process_that_did_not_call_support_is_told_to(supported: Path, tmp_path: Path) -> None:
    load(supported, position_scheme="alibi").save_pretrained(tmp_path)
    for file in (tmp_path / "config.json", tmp_path / "modeling_hf_posenc.py"):  # as if it was another process's
        file.write_text(file.read_text().replace("PosEncOwn", "PosEncOther").replace("own_llama", "other_llama"))
    with pytest.raises(hf_posenc.PosEncError, match=r"call hf_posenc\.support with the stock model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    with pytest.raises(hf_posenc.PosEncError, match=r"call hf_posenc\.support"):
        pickle.loads(b"chf_posenc.models\nPosEncOtherModel\n.")


def test_another_class_of_a_supported_type_is_refused(supported: Path, tmp_path: Path) -> None:
    path = write_remote_code(tmp_path, "own_llama")
    assert support_remote(path)
    with (path / "configuration_own.py").open("a") as file:
        file.write("# changed")
    with pytest.raises(hf_posenc.PosEncError, match=r"a process can support one of them"):
        support_remote(path)


def test_remote_code_needs_trust(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_remote_code(tmp_path, "own_untrusted"), trust_remote_code=True)
    with pytest.raises(hf_posenc.PosEncError, match="pass trust_remote_code=True"):
        hf_posenc.support(config)
    assert traces("own_untrusted", type(config)) == []


@pytest.mark.parametrize(
    ("fault", "replacement", "reason"),
    [
        ("no_cache", (UPDATE, "pass"), "does not update the cache"),
        (
            "no_kwargs",
            ("scaling=self.head_dim**-0.5, **kwargs", "scaling=self.head_dim**-0.5"),
            "does not pass its keyword",
        ),
        ("no_interface", (INTERFACE, "pass"), "attention interface"),
        (
            "no_mask",
            ("attend(\n            self, query, key, value, attention_mask", "attend(\n self, query, key, value, None"),
            "cached equals full",
        ),
        (
            "no_rotation",
            ("query, key = apply_rotary_pos_emb(query, key, *position_embeddings)", "pass"),
            "do not rotate",
        ),
        (
            "one_block",
            ("for block in self.blocks:", "for block in [self.blocks[0]] * 2:"),
            "several times in one forward",
        ),
    ],
)
def test_refuses_a_faulty_model(tmp_path: Path, fault: str, replacement: tuple[str, str], reason: str) -> None:
    path = write_remote_model(tmp_path, f"own_{fault}", replacement)
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    stock = logits(load(path))
    with pytest.raises(hf_posenc.PosEncError, match=reason):
        support_remote(path)
    assert traces(f"own_{fault}", type(config)) == []
    assert torch.equal(logits(load(path)), stock)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gptj", "attention interface"),
        ("bloom", "attention interface"),
        ("falcon", "attention interface"),
        ("mpnet", "attention interface"),
        ("deberta-v2", "attention interface"),
        ("t5", "several stacks of layers"),
        ("deepseek_v3", "multi-head latent attention.*such as"),
        ("lfm2_moe", "layers without attention scores"),
    ],
)
def test_refuses_other_types_of_transformers(model_type: str, reason: str) -> None:
    config_class = CONFIG_MAPPING[model_type]
    with pytest.raises(hf_posenc.PosEncError, match=f"cannot support model type '{model_type}': .*{reason}"):
        hf_posenc.support(model_type)
    assert traces(model_type, config_class) == []
    assert config_class().model_type == model_type


@pytest.mark.parametrize("given", [GPTJConfig(), GPTJConfig, GPTJForCausalLM])
def test_accepts_configs_and_classes(given: Any) -> None:
    with pytest.raises(hf_posenc.PosEncError, match="'gptj': its attention does not call"):
        hf_posenc.support(given)


def test_a_refusal_after_the_checks_began_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bench: Any) -> None:
        raise RuntimeError("boom")

    path = write_remote_model(tmp_path, "own_late")
    monkeypatch.setitem(CHECKS, "schemes act", fail)
    random_state = torch.get_rng_state()
    with pytest.raises(hf_posenc.PosEncError, match="check 'schemes act' failed: RuntimeError: boom"):
        support_remote(path)
    assert torch.equal(torch.get_rng_state(), random_state)
    model = load(path)
    assert traces("own_late", type(model.config)) == []
    assert type(model.config)(hidden_size=64).hidden_size == 64
    with pytest.raises(hf_posenc.PosEncError, match="not supported"):
        hf_posenc.retrofit(model, "alibi")


@pytest.mark.slow
def test_supports_a_live_model_with_a_table_in_the_mode_that_was_tested() -> None:
    decoder = BertGenerationDecoder(BertGenerationConfig(**CAUSAL_CONFIG)).eval()
    stock = logits(decoder)
    report = hf_posenc.support(decoder)
    assert report.architecture.table == "embeddings.position_embeddings"
    assert torch.equal(logits(hf_posenc.retrofit(decoder, "learned")), stock)
    encoder = AutoModel.from_config(BertGenerationConfig(**{**CAUSAL_CONFIG, "is_decoder": False}))
    with pytest.raises(hf_posenc.PosEncError, match="did not test .* with is_decoder=False"):
        hf_posenc.support(encoder)
    with pytest.raises(hf_posenc.PosEncError, match="did not test BertGenerationConfig with is_decoder=False"):
        hf_posenc.retrofit(encoder, "alibi")


class DerivedConfig(LlamaConfig):
    model_type = "derived_llama"


class DerivedLanguageModel(LlamaForCausalLM):
    config_class = DerivedConfig


class DerivedModel(LlamaModel):
    config_class = DerivedConfig


def test_classes_of_a_supported_type_are_not_shared_with_another() -> None:
    with pytest.raises(hf_posenc.PosEncError, match="in a LlamaModel, whose config_class has the model type 'llama'"):
        hf_posenc.support(DerivedLanguageModel)
    assert traces("derived_llama", DerivedConfig) == []
    assert DerivedConfig(hidden_size=64).hidden_size == 64


@pytest.mark.slow
def test_supports_a_subclass_of_a_supported_model() -> None:
    hf_posenc.support(DerivedModel)
    config = DerivedConfig(**CAUSAL_CONFIG, position_scheme="alibi")
    assert type(DerivedModel(config)).__name__ == "PosEncDerivedModel"
    with pytest.raises(hf_posenc.PosEncError, match="LlamaModel is a class of model type 'llama'"):
        LlamaModel(config)
    assert LlamaModel(LlamaConfig(**CAUSAL_CONFIG, position_scheme="alibi")).architecture.model_type == "llama"


@pytest.mark.slow
def test_kinds_of_layers_that_were_not_tested_are_refused() -> None:
    hf_posenc.support("lfm2")
    layer_types = ["conv", "full_attention"]
    with pytest.raises(hf_posenc.PosEncError, match="did not test Lfm2Config with layer_types"):
        Lfm2Model(Lfm2Config(**CAUSAL_CONFIG, layer_types=layer_types, position_scheme="alibi"))


def test_a_supported_type_returns_at_once() -> None:
    report = hf_posenc.support("gpt2")
    assert (report.checks, str(report)) == ((), "gpt2 is supported by the package")


@pytest.mark.parametrize("given", ["nowhere", BloomConfig.__mro__[1], 3])
def test_refuses_what_is_no_model(given: Any) -> None:
    with pytest.raises(hf_posenc.PosEncError, match="Unknown model type|has no model_type|Expected a model type"):
        hf_posenc.support(given)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["aria_text", "bitnet", "ernie4_5_moe", "flex_olmo"])
def test_supports_more_types_of_transformers(model_type: str) -> None:
    assert len(hf_posenc.support(model_type).checks) == 11
