"""Metadata and metrics that others wrote cannot break a model card, or the machine that reads them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import hf_posenc  # noqa: F401
from hf_posenc.errors import PosEncError
from hf_posenc.hub.model_card import list_tags, read_card, write_card
from tests.support.evidence import count_cases
from tests.support.hostile_yaml import HOSTILE_YAML
from tests.support.hub_variants import saved
from tests.support.sampling import some

HOSTILE_METRICS = {
    "recovery.json": [
        '{"eval_loss": 1e400}',
        '{"eval_loss": NaN}',
        f'{{"eval_loss": {"9" * 400}}}',
        f'{{"eval_loss": {"9" * 5000}}}',
        '{"a":' * 900 + "1" + "}" * 900,
        '{"a":' * 5000 + "1" + "}" * 5000,
        json.dumps({f"metric_{number}": 1.0 for number in range(1000)}),
        json.dumps({"<script>alert(1)</script>": 1.0}),
        json.dumps({"x | 1 |\n\n# Title\n": 1.0}),
        json.dumps({"[click](https://example.com)": 1.0}),
        "[1]",
        "{",
    ],
    "length_curve.json": [
        '[{"length": 1e400, "perplexity": 1}]',
        '[{"length": 8, "perplexity": Infinity}]',
        '[{"length": "<b>", "perplexity": 1}]',
        '[{"length": null, "perplexity": 1}]',
        "[1]",
        "{}1",
    ],
}


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    saved(tmp_path / "variant")
    return tmp_path / "variant"


def card_text(directory: Path, **config_fields: Any) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config_fields}))
    write_card(directory, AutoConfig.from_pretrained(directory), "me/variant", [])
    return (directory / "README.md").read_text()


@some("name", HOSTILE_YAML, fast=["aliases", "code"])
def test_hostile_metadata_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"---\n{HOSTILE_YAML[name]}\n---\n\ntext\n")
    with pytest.raises(PosEncError, match=r"The metadata of README\.md") as error:
        read_card(path)
    assert len(str(error.value)) < 1000
    count_cases("hostile cards and metrics", 1)


@pytest.mark.parametrize("tags", ["5", "{a: b}", "[[x, y], {z: 1}]", "null"])
def test_tags_of_any_type_are_read(tags: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\ntags: {tags}\n---\n")
    card = read_card(tmp_path / "README.md")
    assert card is not None
    assert all(isinstance(tag, str) for tag in list_tags(card))


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in HOSTILE_METRICS.items() for text in texts])
def test_hostile_metrics_are_refused(file: str, text: str, variant: Path) -> None:
    (variant / file).write_text(text)
    with pytest.raises(PosEncError, match=f"{file} is damaged") as error:
        card_text(variant)
    assert len(str(error.value)) < 1500
    count_cases("hostile cards and metrics", 1)


def test_the_worst_perplexity_is_shown(variant: Path) -> None:
    (variant / "recovery.json").write_text(json.dumps({"eval_perplexity": math.exp(700)}))
    assert "| held-out perplexity | 1.01423e+304 |" in card_text(variant)


@pytest.mark.parametrize("base_model", ["x](https://example.com) <b>", ["a/b"], {"a": 1}, 5, "../../x"])
def test_base_model_must_be_a_hub_id(base_model: Any, variant: Path) -> None:
    text = card_text(variant, posenc_base_model=base_model)
    assert "converted from" not in text
    assert "example.com" not in text


def test_names_and_options_cannot_leave_their_code_spans(variant: Path) -> None:
    path = variant / "model.safetensors"
    tensors = load_file(path)
    tensors["position_scheme.`\n\n# Title\n<b>"] = tensors["transformer.ln_f.weight"].clone()
    tensors |= {f"position_scheme.{number}.x": tensors["transformer.ln_f.bias"].clone() for number in range(100)}
    save_file(tensors, path, metadata={"format": "pt"})
    scaling = {"rope_type": "`\n\n# Title\n<b>", "factor": 2.0}
    text = card_text(variant, position_scheme={"type": "rope", "scaling": scaling}, architectures=["`\n\n# Title\n<b>"])
    assert "\n# Title" not in text
    for line in re.sub(r"(?s)```.*?\n```", "", text).splitlines():
        assert line.count("`") % 2 == 0, line
        assert "<b>" not in "".join(line.split("`")[::2]), line
        assert len(line) < 3000, line
