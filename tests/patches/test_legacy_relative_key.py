"""BERT checkpoints of transformers 4 with relative positions: the numbers of 4.57.6 (`fixtures/make_bert_v4.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posenc
from hf_posenc.patches.legacy import LEGACY_MODEL_TYPES
from tests.support import tiny_models as tiny

FIXTURES = Path(__file__).parents[1] / "fixtures"
DIRECTORIES = {
    "bert_v4_relative_key": AutoModelForMaskedLM,
    "bert_v4_relative_key_query": AutoModelForMaskedLM,
    "bert_v4_decoder_relative_key_query": AutoModelForCausalLM,
}
by_directory = pytest.mark.parametrize("name", list(DIRECTORIES))
KEY, QUERY = FIXTURES / "bert_v4_relative_key", FIXTURES / "bert_v4_relative_key_query"
LONGEST = 12
SHAW = {"type": "shaw", "values": False, "max_distance": LONGEST - 1}


def load(name: str, **settings: Any) -> Any:
    return DIRECTORIES[name].from_pretrained(FIXTURES / name, dtype=torch.float64, **settings).eval()


@by_directory
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits_are_those_of_transformers_4(name: str, backend: str) -> None:
    model, expected = load(name, attn_implementation=backend), load_file(FIXTURES / name / "expected.safetensors")
    assert model.config.position_scheme == {**SHAW, "query_term": name != "bert_v4_relative_key"}
    ids, mask = expected["input_ids"], expected["attention_mask"]
    no_cache = {"use_cache": False} if "decoder" in name else {}
    with torch.no_grad():
        torch.testing.assert_close(model(ids, **no_cache).logits, expected["logits"], rtol=0, atol=1e-9)
        padded = model(ids, attention_mask=mask, **no_cache).logits[1:]
        torch.testing.assert_close(padded[:, :-4], expected["logits_padded"][:, :-4], rtol=0, atol=1e-9)
        # What transformers 5 makes of it by itself: a BERT with the absolute table that the checkpoint never used.
        silently = load(name, position_scheme="learned")(ids, **no_cache).logits
        assert (silently - expected["logits"]).abs().max() > 1
        assert len(model.bert.encoder.layer) == 2
        model.bert.encoder.layer[1].attention.self.position_scheme["0"].keys[LONGEST] += 0.01
        assert (model(ids, **no_cache).logits - expected["logits"]).abs().max() > 1e-4


def test_a_decoder_gives_the_same_with_a_cache() -> None:
    """4.57.6 does not, for several new tokens in one call: the script that makes the fixtures tells of it."""
    name = "bert_v4_decoder_relative_key_query"
    model, expected = load(name), load_file(FIXTURES / name / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"], use_cache=True).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-9)
    assert (logits[:1] - expected["logits_cached"]).abs().max() > 0.1


@pytest.mark.parametrize("directory", [KEY, QUERY], ids=lambda path: path.name)
def test_past_the_trained_length_by_clipping(directory: Path) -> None:
    """The same as a table that goes on with its last rows."""
    length = 40
    model = AutoModelForMaskedLM.from_pretrained(directory, dtype=torch.float64).eval()
    ids = torch.randint(1, 37, (2, length), generator=torch.Generator().manual_seed(0))
    longer = {**model.config.position_scheme, "max_distance": length}
    other = AutoModelForMaskedLM.from_pretrained(directory, position_scheme=longer, dtype=torch.float64).eval()
    rows = torch.arange(-length, length + 1).clamp(-LONGEST + 1, LONGEST - 1) + LONGEST - 1
    with torch.no_grad():
        for layer, wide in zip(model.bert.encoder.layer, other.bert.encoder.layer, strict=True):
            wide.attention.self.position_scheme["0"].keys.copy_(layer.attention.self.position_scheme["0"].keys[rows])
        logits = model(ids).logits
        torch.testing.assert_close(logits, other(ids).logits, rtol=0, atol=1e-9)
        wide.attention.self.position_scheme["0"].keys[3] += 0.01
        assert (other(ids).logits - logits).abs().max() > 1e-5


@by_directory
def test_saved_again_it_is_a_variant_like_any_other(name: str, tmp_path: Path) -> None:
    auto = DIRECTORIES[name]
    model, info = auto.from_pretrained(FIXTURES / name, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "posenc_bert"
    assert not [field for field in written if "embedding_type" in field or "legacy" in field]
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not [name for name in names if "distance_embedding" in name]
    assert len([name for name in names if name.endswith("position_scheme.0.keys")]) == 2
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids)[0], model.eval()(ids)[0])


@pytest.mark.parametrize(
    "how",
    [
        lambda: AutoModel.from_pretrained(KEY),
        lambda: BertModel.from_pretrained(KEY),
        lambda: BertForMaskedLM.from_pretrained(KEY).bert,
        lambda: AutoModelForSequenceClassification.from_pretrained(KEY).bert,
        lambda: AutoModel.from_pretrained(KEY, config=AutoConfig.from_pretrained(KEY)),
        lambda: AutoModel.from_pretrained(KEY, config=BertConfig.from_pretrained(KEY)),
        lambda: AutoModel.from_pretrained(KEY, device_map="cpu"),
    ],
    ids=["auto", "stock class", "head", "another head", "auto config", "stock config", "device map"],
)
def test_all_ways_in_read_the_tables(how: Any) -> None:
    base = how()
    assert type(base).__name__ == "PosEncBertModel"
    table = load_file(KEY / "model.safetensors")["bert.encoder.layer.1.attention.self.distance_embedding.weight"]
    assert torch.equal(base.encoder.layer[1].attention.self.position_scheme["0"].keys, table)


def test_shards_and_half_precision(tmp_path: Path) -> None:
    weights = load_file(KEY / "model.safetensors")
    names = sorted(weights)
    for number, shard in enumerate((names[::2], names[1::2])):
        save_file(
            {name: weights[name] for name in shard}, tmp_path / f"{number}.safetensors", metadata={"format": "pt"}
        )
    index = {name: f"{place % 2}.safetensors" for place, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    shutil.copy(KEY / "config.json", tmp_path)
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    table = weights["bert.encoder.layer.0.attention.self.distance_embedding.weight"].to(torch.bfloat16)
    assert torch.equal(model.bert.encoder.layer[0].attention.self.position_scheme["0"].keys, table)


def test_a_table_that_is_not_there_is_reported(tmp_path: Path) -> None:
    shutil.copytree(KEY, tmp_path / "damaged")
    weights = load_file(KEY / "model.safetensors")
    del weights["bert.encoder.layer.0.attention.self.distance_embedding.weight"]
    save_file(weights, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    _, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "damaged", output_loading_info=True)
    assert set(info["missing_keys"]) == {"bert.encoder.layer.0.attention.self.position_scheme.0.keys"}


@pytest.mark.parametrize("spelled", [SHAW, [SHAW], {**SHAW, "query_term": False}, {**SHAW, "init": "neutral"}], ids=str)
def test_the_scheme_it_is_can_be_spelled_out(spelled: Any) -> None:
    """However it is written, it names the scheme that the checkpoint holds the tables of."""
    config = AutoConfig.from_pretrained(KEY)
    config.position_scheme = spelled
    for model in (
        AutoModel.from_pretrained(KEY, position_scheme=spelled),
        AutoModel.from_pretrained(KEY, config=config),
    ):
        table = load_file(KEY / "model.safetensors")["bert.encoder.layer.1.attention.self.distance_embedding.weight"]
        assert torch.equal(model.encoder.layer[1].attention.self.position_scheme["0"].keys, table)


def test_another_scheme_can_be_asked_for() -> None:
    model, info = AutoModelForMaskedLM.from_pretrained(KEY, position_scheme="alibi", output_loading_info=True)
    assert model.config.position_scheme == "alibi"
    assert not info["missing_keys"]
    assert {name.rpartition("self.")[2] for name in info["unexpected_keys"]} == {"distance_embedding.weight"}
    with pytest.raises(ValueError, match="already"):
        hf_posenc.retrofit(AutoModelForMaskedLM.from_pretrained(KEY), "alibi")


def test_other_values_and_other_classes_are_left_alone() -> None:
    assert type(BertConfig(position_embedding_type="absolute")) is BertConfig
    assert BertConfig(position_embedding_type="absolute").position_embedding_type == "absolute"
    assert not hasattr(BertConfig(), "position_embedding_type")
    assert "position_embedding_type" not in BertConfig().to_dict()

    class Other(BertConfig):
        """Someone's own config, with a meaning of their own."""

    other = Other(position_embedding_type="relative_key")
    assert type(other) is Other
    assert other.position_embedding_type == "relative_key"
    assert other.position_scheme is None


@pytest.mark.slow
def test_a_relative_bert_config_can_be_made_absolute() -> None:
    config = BertConfig(position_embedding_type="relative_key_query")
    assert config.position_embedding_type == "relative_key_query"
    config.position_embedding_type = "absolute"
    assert type(config) is BertConfig
    assert type(AutoModel.from_config(config)) is BertModel


@pytest.mark.parametrize("field", ["relative_key", "relative_key_query"])
@pytest.mark.parametrize(
    "model_type",
    [
        name if name in ("albert", "roberta") else pytest.param(name, marks=pytest.mark.slow)
        for name in LEGACY_MODEL_TYPES
    ],
)
def test_other_encoders_match_the_formula_of_transformers_4(model_type: str, field: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 20, "max_position_embeddings": 16, "embedding_size": 12, "pad_token_id": 1}
    stock = AutoModelForMaskedLM.from_config(AutoConfig.for_model(model_type, **sizes)).double().eval()
    tiny.randomise(stock)
    stock.save_pretrained(tmp_path)
    generator, weights = torch.Generator().manual_seed(1), load_file(tmp_path / "model.safetensors")
    projections = [name for name in weights if name.endswith(".query.weight")]
    assert len(projections) == (1 if model_type == "albert" else 2)
    tables = {
        name.replace("query", "distance_embedding"): torch.randn(31, 8, generator=generator, dtype=torch.float64)
        for name in projections
    }
    save_file({**weights, **tables}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": field}))
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    assert hf_posenc.inspect_checkpoint(tmp_path).problems == []
    modules = {
        id(stock.get_submodule(name.removesuffix(".distance_embedding.weight"))): t for name, t in tables.items()
    }

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        positions = torch.arange(query.shape[2])
        rows = modules[id(module)][positions[:, None] - positions + 15]
        relative = torch.einsum("bhld,lrd->bhlr", query, rows)
        if field == "relative_key_query":
            relative = relative + torch.einsum("bhrd,lrd->bhlr", key, rows)
        # ALBERT did not scale the relative scores.
        scores = (query @ key.transpose(-1, -2) + relative * (8**0.5 if model_type == "albert" else 1)) / 8**0.5
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("relative_of_v4", attention)
    AttentionMaskInterface.register("relative_of_v4", lambda *args, **kwargs: None)
    ids = torch.randint(2, 37, (2, 12), generator=generator)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith("position_embeddings.weight"):
                parameter.zero_()
        stock.set_attn_implementation("relative_of_v4")
        expected = stock(ids).logits
        torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=0, atol=1e-9)
        model.save_pretrained(tmp_path / "saved")
        again = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
        assert torch.equal(again(ids).logits, model(ids).logits)
        next(iter(tables.values()))[15] += 0.1
        assert (stock(ids).logits - expected).abs().max() > 1e-4
