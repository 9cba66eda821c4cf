"""`load_model` remembers where a checkpoint came from, although it loads a copy in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_posenc
from hf_posenc.checkpoints import load_model, loading
from tests.checkpoints.stock_checkpoints import save_stock

HEAD = "AutoModelForCausalLM"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy of the Hub's `somebody/gpt2`."""
    source = save_stock(tmp_path / "models--somebody--gpt2" / "snapshots" / "0123")
    monkeypatch.setattr(loading, "find_checkpoint", lambda *_, **__: source)
    return source


def test_a_hub_id_is_the_base_model(cached: Path) -> None:
    stock, missing = load_model("somebody/gpt2", HEAD)
    assert (stock.name_or_path, stock.config.name_or_path, missing) == ("somebody/gpt2", "somebody/gpt2", [])
    variant, missing = load_model("somebody/gpt2", HEAD, position_scheme="t5")
    assert variant.config.base_model == "somebody/gpt2"
    assert not missing
    assert not variant.name_or_path, "an adapter would be loaded onto the stock model"


def test_a_directory_is_not_recorded(tmp_path: Path) -> None:
    save_stock(tmp_path / "stock")
    variant, _ = load_model(tmp_path / "stock", HEAD, position_scheme="rope")
    assert variant.config.base_model is None
    assert load_model(tmp_path / "stock", HEAD)[0].name_or_path == str(tmp_path / "stock")


def test_a_variant_keeps_its_base_model(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, _ = load_model("somebody/gpt2", HEAD, position_scheme="alibi")
    variant.save_pretrained(tmp_path / "variant")
    monkeypatch.setattr(loading, "find_checkpoint", lambda *_, **__: tmp_path / "variant")
    again, _ = load_model("me/variant", HEAD)
    assert again.config.base_model == "somebody/gpt2"
    assert hf_posenc.inspect_checkpoint(tmp_path / "variant").base_model == "somebody/gpt2"
