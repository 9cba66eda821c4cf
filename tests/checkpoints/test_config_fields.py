"""Every command refuses a config.json whose fields replace parts of the config, or choose code or weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import GPT2Config
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.checkpoints import read_config_fields
from hf_posenc.cli import app
from tests.checkpoints.stock_checkpoints import update_json
from tests.support import word_level_tokenizer as word_level
from tests.support.evidence import count_cases

WRONG_FIELDS: list[tuple[str, Any]] = [
    ("architectures", 5),
    ("architectures", [5]),
    ("architectures", "GPT2LMHeadModel"),
    ("attribute_map", {"a": "b"}),
    ("sub_configs", {}),
    ("max_position_embeddings", None),
    ("hidden_size", None),
    ("save_pretrained", None),
    ("to_json_file", 5),
    ("validate", "x"),
    ("_get_generation_parameters", True),
    ("become_stock", 5),  # a method of the variant
    ("stock_class", "x"),
    ("__dict__", {}),
    ("_attn_implementation", 5),
    ("_attn_implementation_internal", [1]),
    ("_experts_implementation", {"": 5}),
    ("_auto_class", [1]),
    ("_attn_implementation_internal", "somebody/kernel"),
    ("layers", [{"attn_implementation": "somebody/kernel"}]),
    ("transformers_weights", "other.safetensors"),
    ("transformers_weights", ["model.safetensors"]),
]
VALID_FIELDS: list[tuple[str, Any]] = [
    ("architectures", None),
    ("attribute_map", dict(GPT2Config.attribute_map)),
    ("_auto_class", None),
    ("_attn_implementation", None),
    ("_attn_implementation", "eager"),
    ("attn_implementation", {"": "sdpa"}),
    ("transformers_weights", None),
    ("transformers_weights", "model.safetensors"),
    ("n_inner", None),
    ("num_labels", 2),
    ("output_attentions", False),
    ("torch_dtype", "float32"),
    ("name_or_path", "somebody/model"),
]
"""Fields that files on the Hub have, or may have."""


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(word_level.text(200))
    return word_level.saved("gpt2", tmp_path / "stock")


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS)
def test_wrong_fields_are_refused(name: str, value: Any, stock: Path, tmp_path: Path) -> None:
    update_json(stock / "config.json", **{name: value})
    for command in (
        ["inspect", stock],
        ["convert", stock, "--scheme", "alibi", "--out", tmp_path / "out"],
        ["eval", stock, "--data", tmp_path / "text.txt", "--lengths", "12", "--no-progress"],
    ):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 2, (command, done.output, done.exception)
        assert "error: " in done.stderr, command
        assert name in done.stderr or "attn_implementation" in done.stderr, command
    assert not (tmp_path / "out").exists()
    count_cases("hostile checkpoints", 1)


@pytest.mark.parametrize("name", ["stock_class", "scheme_origin", "_position_specs", "become_stock"])
def test_wrong_fields_of_a_variant_are_refused(name: str, stock: Path, tmp_path: Path) -> None:
    hf_posenc.convert_checkpoint(stock, "rope", tmp_path / "variant")
    update_json(tmp_path / "variant" / "config.json", **{name: 5})
    for command in (["inspect", tmp_path / "variant"], ["export", tmp_path / "variant", "--out", tmp_path / "out"]):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 2, (command, done.output, done.exception)
        assert name in done.stderr
    count_cases("hostile checkpoints", 1)


@pytest.mark.parametrize(("name", "value"), VALID_FIELDS)
def test_valid_fields_are_accepted(name: str, value: Any, stock: Path, tmp_path: Path) -> None:
    update_json(stock / "config.json", **{name: value})
    assert hf_posenc.inspect_checkpoint(stock).problems == []
    hf_posenc.convert_checkpoint(stock, "alibi", tmp_path / "out")


def test_a_variant_that_returns_attention_weights_is_exported(stock: Path, tmp_path: Path) -> None:
    hf_posenc.convert_checkpoint(stock, "learned", tmp_path / "variant")
    update_json(tmp_path / "variant" / "config.json", output_attentions=True)
    hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "out", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["output_attentions"] is True
    assert not [name for name in config if "_implementation" in name]


def test_unknown_model_types_are_checked_too(tmp_path: Path) -> None:
    for name, value in (("to_dict", 5), ("_attn_implementation", 5), ("architectures", 5)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "stranger", name: value}))
        with pytest.raises(PosEncError, match=name):
            read_config_fields(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "stranger", "hidden_size": None}))
    read_config_fields(tmp_path)


@pytest.mark.parametrize("metadata", [[1], None, "x", 5])
def test_index_with_invalid_metadata(metadata: Any, stock: Path, tmp_path: Path) -> None:
    """Transformers adds entries to the metadata, and cannot load the checkpoint."""
    (stock / "model.safetensors").rename(stock / "model-1.safetensors")
    with safe_open(stock / "model-1.safetensors", framework="pt") as file:
        weight_map = dict.fromkeys(file.keys(), "model-1.safetensors")
    index = stock / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    hf_posenc.convert_checkpoint(stock, "t5", tmp_path / "variant")
    update_json(index, metadata=metadata)
    update_json(tmp_path / "variant" / index.name, metadata=metadata)
    for command in (
        ["convert", stock, "--scheme", "alibi", "--out", tmp_path / "out"],
        ["eval", stock, "--data", tmp_path / "text.txt", "--lengths", "12", "--no-progress"],
        ["inspect", stock],
        ["export", tmp_path / "variant", "--out", tmp_path / "out"],
    ):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 2, (command, done.output, done.exception)
        assert "not an index of shards: its metadata" in done.output, command
    count_cases("hostile checkpoints", 2)
