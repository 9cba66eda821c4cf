"""An exported checkpoint is a stock one that computes what the variant computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertForMaskedLM, GPT2LMHeadModel

import hf_posenc
from hf_posenc.config import VariantConfig
from tests.checkpoints.stock_checkpoints import file_hashes
from tests.support import exports, families
from tests.support import tiny_models as tiny
from tests.support.exports import CASES, EQUAL, ExportCase, by_case

LENGTH = 40


@by_case
def test_export_equals_the_variant(case: ExportCase, tmp_path: Path) -> None:
    variant, stock, export = exports.export_of(case, tmp_path)
    assert (stock.config.model_type, export.model_type) == (case.target, case.target)
    assert type(stock).__module__.startswith("transformers.models.")
    assert not isinstance(stock.config, VariantConfig)
    ids, mask = tiny.tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -7:] = 0
    ids[1, -7:] = tiny.PAD
    with torch.no_grad():
        expected = variant(ids, attention_mask=mask).logits[mask.bool()]
        output = stock(ids, attention_mask=mask).logits[mask.bool()]
        other = exports.build(case.architecture, case.other)(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(output, expected, **EQUAL)
    assert (other - expected).abs().max() > 1e-4


def test_files_name_nothing_of_this_package(tmp_path: Path) -> None:
    exports.save(tmp_path / "variant", "llama", exports.rope(theta=500.0))
    hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", verify=False)
    names = {path.name for path in (tmp_path / "stock").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    text = (tmp_path / "stock" / "config.json").read_text()
    assert "posenc" not in text.lower()
    fields = json.loads(text)
    assert "auto_map" not in fields
    assert (fields["hidden_act"], fields["initializer_range"]) == ("silu", 0.02)


LOAD_WITHOUT_PACKAGE = """
import json, sys
from pathlib import Path
sys.modules["hf_posenc"] = None  # importing it fails
import torch, transformers
for directory in map(Path, sys.argv[1:]):
    config = json.loads((directory / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(directory).eval()
    ids = torch.load(directory.parent / "ids.pt")
    with torch.no_grad():
        torch.save(model(ids).logits, directory.parent / "logits.pt")
assert sys.modules["hf_posenc"] is None
"""


@pytest.mark.slow
def test_exports_load_without_this_package(tmp_path: Path) -> None:
    ids, variants = tiny.tokens(2, LENGTH), {}
    for name, case in CASES.items():
        variants[name] = exports.save(tmp_path / name / "variant", case.architecture, case.scheme)
        hf_posenc.export_checkpoint(tmp_path / name / "variant", tmp_path / name / "stock")
        torch.save(ids, tmp_path / name / "ids.pt")
    directories = [str(tmp_path / name / "stock") for name in CASES]
    command = [sys.executable, "-c", LOAD_WITHOUT_PACKAGE, *directories]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
    for name, variant in variants.items():
        with torch.no_grad():
            torch.testing.assert_close(torch.load(tmp_path / name / "logits.pt"), variant(ids).logits, **EQUAL)


ROTARY = [name for name in families.MODEL_TYPES if families.ARCHITECTURES[name].rotary]
NOT_ROTATED_EVERYWHERE = [*families.TRAITS["NoPE layers"], *families.QWEN_VL]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", families.MODEL_TYPES)
def test_every_model_type(model_type: str, tmp_path: Path) -> None:
    """`export_checkpoint` compares the outputs itself; that it would notice a difference is tested below."""
    scheme = exports.rope(theta=500.0) if model_type in ROTARY else "sinusoidal"
    families.model(model_type, scheme, auto=families.auto_class(model_type)).save_pretrained(tmp_path / "variant")
    if model_type in NOT_ROTATED_EVERYWHERE and model_type != "smollm3":
        with pytest.raises(hf_posenc.PosEncError, match="No stock model"):
            hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
        return
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    assert export.model_type == families.ARCHITECTURES[model_type].model_type
    assert export.verification is not None
    assert export.verification.max_difference < 2e-4


HEADS = [
    ("GPT2ForSequenceClassification", "rope", "GPTNeoXForSequenceClassification"),
    ("GPT2ForTokenClassification", "rope", "GPTNeoXForTokenClassification"),
    ("GPT2ForQuestionAnswering", "rope", "GPTNeoXForQuestionAnswering"),
    ("GPT2Model", "rope", "GPTNeoXModel"),
    ("GPT2ForSequenceClassification", "sinusoidal", "GPT2ForSequenceClassification"),
    ("BertForSequenceClassification", ["learned", "t5"], "MPNetForSequenceClassification"),
    ("BertForTokenClassification", ["learned", "t5"], "MPNetForTokenClassification"),
    ("BertForQuestionAnswering", ["learned", "t5"], "MPNetForQuestionAnswering"),
    ("BertModel", ["learned", "t5"], "MPNetModel"),
    ("BertForPreTraining", ["learned", "t5"], "MPNetForMaskedLM"),
    ("BertForSequenceClassification", exports.DEBERTA_V2, "DebertaV2ForSequenceClassification"),
    ("BertForTokenClassification", exports.DEBERTA_V2, "DebertaV2ForTokenClassification"),
    ("BertForQuestionAnswering", exports.DEBERTA_V2, "DebertaV2ForQuestionAnswering"),
    ("BertModel", exports.DEBERTA_V2, "DebertaV2Model"),
    ("BertForTokenClassification", "rope", "RoFormerForTokenClassification"),
    ("BertForQuestionAnswering", "rope", "RoFormerForQuestionAnswering"),
    ("BertModel", "rope", "RoFormerModel"),
    ("BertForPreTraining", "rope", "RoFormerForMaskedLM"),
    ("LlamaForSequenceClassification", "none", "SmolLM3ForSequenceClassification"),
    ("LlamaModel", "none", "SmolLM3Model"),
]


@pytest.mark.parametrize(
    ("stock_class", "scheme", "target"),
    [pytest.param(*head, marks=pytest.mark.slow) for head in HEADS],
)
def test_heads(stock_class: str, scheme: Any, target: str, tmp_path: Path) -> None:
    architecture = stock_class.split("For")[0].removesuffix("Model").lower()
    labels = {"id2label": {0: "red", 1: "green", 2: "blue"}} if "Classification" in stock_class else {}
    config = tiny.config(architecture, **labels)
    model = tiny.randomise(getattr(transformers, stock_class)(config)).eval()
    tiny.randomise_scheme(hf_posenc.retrofit(model, scheme))
    model.save_pretrained(tmp_path / "variant")
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    assert export.architecture == target
    stock = getattr(transformers, target).from_pretrained(tmp_path / "stock").eval()
    ids = tiny.tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids)[0], model(ids)[0], **EQUAL)
    if labels:
        assert stock.config.id2label == labels["id2label"]


def test_shards_are_linked_if_only_the_config_changes(tmp_path: Path) -> None:
    exports.save(tmp_path / "variant", "llama", exports.rope(theta=500.0), max_shard_size="20KB")
    before = file_hashes(tmp_path / "variant")
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", verify=False)
    assert len(export.linked_shards) > 1
    assert export.rewritten_shards == ()
    inodes = {path.stat().st_ino for path in (tmp_path / "variant").glob("*.safetensors")}
    assert {path.stat().st_ino for path in (tmp_path / "stock").glob("*.safetensors")} == inodes
    assert file_hashes(tmp_path / "variant") == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-partial", "bert-deberta-v2", "bert-learned-t5", "qwen2-some-layers"])
def test_several_shards(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    exports.save(tmp_path / "variant", case.architecture, case.scheme, max_shard_size="20KB")
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    index = json.loads((tmp_path / "stock" / "model.safetensors.index.json").read_text())
    stored = {key: path.name for path in (tmp_path / "stock").glob("*.safetensors") for key in load_file(path)}
    assert index["weight_map"] == stored
    assert len(set(stored.values())) == len(export.rewritten_shards) + len(export.linked_shards) + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-extended", "bert-sinusoidal", "bert-deberta-v2", "llama-interleaved"])
def test_half_precision(name: str, tmp_path: Path) -> None:
    """Computed tensors stay in float32; loaded with the dtype of the config, all are bfloat16."""
    case = CASES[name]
    exports.build(case.architecture, case.scheme, torch.bfloat16).save_pretrained(tmp_path / "variant")
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    stock = getattr(transformers, export.architecture).from_pretrained(tmp_path / "stock", dtype="auto")
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_max_positions_of_a_table(tmp_path: Path) -> None:
    """A table for more positions than the variant was trained with, written out; the tokenizer follows."""
    variant = exports.save(tmp_path / "variant", "gpt2", "sinusoidal")
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", max_positions=100)
    stock = GPT2LMHeadModel.from_pretrained(tmp_path / "stock").eval()
    assert (export.max_positions, stock.config.n_positions, len(stock.transformer.wpe.weight)) == (100, 100, 100)
    ids = tiny.tokens(1, 100)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, variant(ids).logits, **EQUAL)


@pytest.mark.slow
def test_max_positions_of_roformer(tmp_path: Path) -> None:
    variant = exports.save(tmp_path / "variant", "bert", "rope")
    hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", max_positions=100)
    stock = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path / "stock").eval()
    ids = tiny.tokens(1, 100)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, variant(ids).logits, **EQUAL)


@pytest.mark.slow
def test_generates_as_the_variant_does(tmp_path: Path) -> None:
    variant, stock, _ = exports.export_of(CASES["gpt2-partial"], tmp_path)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    ids = tiny.tokens(2, 8)
    assert torch.equal(stock.generate(ids, **settings), variant.generate(ids, **settings))


@pytest.mark.slow
def test_checkpoint_of_convert_with_a_pooler_and_old_names(tmp_path: Path) -> None:
    """Published checkpoints have tensors that the model does not use; they are left out, and named."""
    model = tiny.randomise(transformers.BertForPreTraining(tiny.config("bert"))).eval()
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(path.read_text().replace("BertForPreTraining", "BertForMaskedLM"))
    hf_posenc.convert_checkpoint(tmp_path / "source", "rope", tmp_path / "variant")
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", verify=False)
    assert {name.split(".")[1] for name in export.left_out} == {"pooler", "seq_relationship"}
    stock = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path / "stock").eval()
    variant = BertForMaskedLM.from_pretrained(tmp_path / "source", position_scheme="rope").eval()
    ids = tiny.tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, variant(ids).logits, **EQUAL)


def test_older_releases_find_their_rotary_fields(tmp_path: Path) -> None:
    """transformers 4 does not know rope_parameters, and computes the factor of YaRN from two lengths."""
    exports.save(tmp_path / "variant", "llama", exports.scaling("yarn"))
    hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", verify=False)
    fields = json.loads((tmp_path / "stock" / "config.json").read_text())
    original = tiny.TRAINED_LENGTH
    assert fields["rope_theta"] == 10000.0
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    assert fields["rope_scaling"] == scaling
    assert fields["rope_parameters"] == {**scaling, "rope_theta": 10000.0}
    assert fields["max_position_embeddings"] == 4 * original
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").config
    assert config.rope_parameters == fields["rope_parameters"]
