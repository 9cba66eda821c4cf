"""The length that a variant's config names for other tools, next to the one that its modules are built for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

import hf_posenc
from hf_posenc.config import STOCK_LENGTH_KEY
from hf_posenc.errors import PosEncError
from hf_posenc.patches import max_positions, saving
from tests.support import families
from tests.support import tiny_models as tiny

LONGER = 4 * tiny.TRAINED_LENGTH
EXTENDED = {"type": "learned", "max_positions": LONGER, "extend": "interpolate"}
SCALED: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24},
}


def scaled_llama(rope_type: str, scheme: Any) -> Any:
    parameters = {**SCALED[rope_type], "rope_theta": 10000.0}
    return hf_posenc.retrofit(tiny.model("llama", None, torch.float32, rope_parameters=parameters), scheme)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2", "opt", "gpt_bigcode"])
def test_an_extended_table_is_built_at_the_stock_length(model_type: str, tmp_path: Path) -> None:
    """Its config names the longer length; the same scheme with the stock length is the control."""
    model = hf_posenc.retrofit(families.model(model_type), EXTENDED)
    ids = tiny.tokens(2, LONGER)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    stock_length = model.config.max_position_embeddings
    hf_posenc.set_max_length(model, LONGER)
    assert model.config.max_position_embeddings == stock_length + LONGER - max_positions(model.config)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).last_hidden_state, expected)
    assert type(loaded)(loaded.config).eval()(ids).last_hidden_state.shape == expected.shape
    assert max_positions(loaded.config) == max_positions(model.config) < LONGER


@pytest.mark.parametrize("scheme", ["rope", "alibi", "none", {"type": "rope", "theta": 500.0}], ids=str)
@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_rotations_that_do_not_depend_on_the_length(rope_type: str, scheme: Any, tmp_path: Path) -> None:
    model, ids = scaled_llama(rope_type, scheme), tiny.tokens(1, 60)
    with torch.no_grad():
        expected = model(ids).logits
    hf_posenc.set_max_length(model, LONGER)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.max_position_embeddings == LONGER
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)


def test_a_length_that_cannot_be_set_is_refused() -> None:
    with pytest.raises(PosEncError, match="BertForMaskedLM has no position scheme, so its length is fixed"):
        hf_posenc.set_max_length(tiny.model("bert", None, torch.float32), LONGER)
    with pytest.raises(PosEncError, match=f"longer than the {tiny.TRAINED_LENGTH} positions of learned"):
        hf_posenc.set_max_length(tiny.model("bert", "learned", torch.float32), LONGER)
    for length in (0, 2**70, 80.5, "80"):
        with pytest.raises(PosEncError, match="max_length must be between 1 and 16,777,216"):
            hf_posenc.set_max_length(tiny.model("bert", "alibi", torch.float32), length)  # type: ignore[arg-type]
    with pytest.raises(PosEncError, match="decides the angles of the model's own dynamic rotation"):
        hf_posenc.set_max_length(scaled_llama("dynamic", "rope"), LONGER)
    hf_posenc.set_max_length(scaled_llama("dynamic", "alibi"), LONGER)  # which does not rotate


def test_another_scheme_ends_the_length(tmp_path: Path) -> None:
    model = tiny.model("bert", "alibi", torch.float32)
    hf_posenc.set_max_length(model, LONGER)
    model.save_pretrained(tmp_path)
    other = AutoModel.from_pretrained(tmp_path, position_scheme="kerple")
    assert other.config.max_position_embeddings == tiny.TRAINED_LENGTH
    assert not hasattr(other.config, STOCK_LENGTH_KEY)
    same = AutoModel.from_pretrained(tmp_path, position_scheme="alibi")
    assert same.config.max_position_embeddings == LONGER


def test_threads_may_build_from_one_config() -> None:
    config = tiny.config("gpt2", position_scheme=EXTENDED)
    hf_posenc.patches.set_config_length([], config, LONGER)
    models: list[Any] = []
    threads = [threading.Thread(target=lambda: models.append(AutoModel.from_config(config))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert config.max_position_embeddings == LONGER
    assert [model.wpe.weight.shape[0] for model in models] == [tiny.TRAINED_LENGTH] * 6


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(saving.logger, "warning_once", messages.append)
    return messages


def test_saving_warns_of_a_length_that_would_be_lost(warnings: list[str], tmp_path: Path) -> None:
    model = tiny.model("bert", "alibi", torch.float32)
    model(tiny.tokens(1, tiny.TRAINED_LENGTH))
    mask = (torch.arange(LONGER) >= LONGER - tiny.TRAINED_LENGTH).long()[None]
    model(tiny.tokens(1, LONGER), attention_mask=mask)  # left padding is not read
    model.save_pretrained(tmp_path)
    assert not warnings
    model(tiny.tokens(1, LONGER))
    model.save_pretrained(tmp_path)
    assert len(warnings) == 1
    assert f"hf_posenc.set_max_length(model, {LONGER})" in warnings[0]
    hf_posenc.set_max_length(model, LONGER)
    model.save_pretrained(tmp_path)
    assert len(warnings) == 1


def test_cached_tokens_count_and_packed_documents_do_not(warnings: list[str], tmp_path: Path) -> None:
    length = tiny.TRAINED_LENGTH
    packed = tiny.model("gpt2", "learned", torch.float32)
    packed(tiny.tokens(1, 2 * length), position_ids=torch.arange(length).repeat(2)[None])
    packed.save_pretrained(tmp_path)
    assert not warnings
    model, cache = tiny.model("gpt2", "alibi", torch.float32), DynamicCache()
    for _ in range(3):
        model(tiny.tokens(1, length // 2), past_key_values=cache, use_cache=True)
    model.save_pretrained(tmp_path)
    assert f"inputs of {3 * (length // 2)} tokens" in warnings[0]
