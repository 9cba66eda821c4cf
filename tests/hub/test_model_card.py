"""Model cards of pushed variants: their content, and that cards somebody wrote are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hub_client import Client, Failed
from tests.support.hub_server import Hub
from tests.support.hub_variants import saved


def test_card_content(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    saved(tmp_path, ["learned", {"type": "t5", "num_buckets": 16, "shared": False}])
    (tmp_path / "recovery.json").write_text('{"eval_perplexity": 23.456, "before": {"eval_loss": 9.5}}')
    (tmp_path / "length_curve.json").write_text('[{"length": 2048, "perplexity": 31.5}]')
    owner.push(tmp_path, "me/variant", base_model="openai-community/gpt2")
    card = other.card("me/variant")
    assert card["metadata"] == {
        "base_model": "openai-community/gpt2",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_posenc", "positional-encoding", "gpt2", "learned", "t5"],
    }
    for expected in ("`num_buckets` = `16`", "kept (`transformer.wpe.weight`)", "| 2,048 | 31.5 |", "| 23.456 |"):
        assert expected in card["text"], expected
    assert "positional encoding, converted from [openai-community/gpt2]" in card["text"]
    assert "before: held-out loss | 9.5" in card["text"]
    assert "`transformer.h.*.attn.position_scheme.1.weight`" in card["text"]
    assert 'AutoModelForCausalLM.from_pretrained("me/variant")' in card["text"]
    assert str(tmp_path) not in json.dumps(card)
    (tmp_path / "length_curve.json").write_text('[{"length": "long"}]')
    with pytest.raises(Failed, match="length_curve.json") as failed:
        owner.push(tmp_path, "me/variant")
    assert failed.value.is_value_error


@pytest.mark.parametrize(("architecture", "task"), [("bert", "fill-mask"), ("llama", "text-generation")])
def test_cards_of_other_architectures(architecture: str, task: str, hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path, "alibi", architecture=architecture)
    owner.push(tmp_path, "me/variant")
    card = owner.card("me/variant")
    assert card["metadata"]["pipeline_tag"] == task
    assert "base_model" not in card["metadata"]
    assert "positional encoding, made with `hf_posenc`" in card["text"]
    assert "No measurements" in card["text"]
    stock_encoding = "position table" if architecture == "bert" else "rotary embedding"
    assert f"{stock_encoding} is removed" in card["text"]


def test_edited_cards_are_kept(hub: Hub, owner: Client, tmp_path: Path) -> None:
    """A generated card is replaced, but fields added to its metadata are kept."""
    saved(tmp_path, "alibi")
    readme = tmp_path / "README.md"
    assert owner.push(tmp_path, "me/variant")["card"] == "generated"
    readme.write_text(readme.read_text().replace("---\n", "---\nlicense: mit\n", 1))
    saved(tmp_path, "t5")
    assert owner.push(tmp_path, "me/variant")["card"] == "generated"
    card = owner.card("me/variant")
    assert card["metadata"]["license"] == "mit"
    assert "`t5`" in card["text"]
    assert "alibi" not in card["text"]
    edited = readme.read_text().replace("# variant", "# My words")
    readme.write_text(edited)
    assert owner.push(tmp_path, "me/variant")["card"] == "local"
    assert (readme.read_text(), hub.files("me/variant")["README.md"].decode()) == (edited, edited)
    readme.unlink()
    assert owner.push(tmp_path, "me/variant")["card"] == "remote"
    owner.push_model(tmp_path, "me/variant", seed=3, tags=["more"])
    assert "# My words" in owner.card("me/variant")["text"]
    assert "more" in owner.card("me/variant")["metadata"]["tags"]
