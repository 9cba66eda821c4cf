"""Embedders of sentence-transformers: their modules and lengths after a conversion, a training, and saving again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, RobertaConfig, XLMRobertaConfig
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.checkpoints import verify_manifest
from hf_posenc.checkpoints.files import MANIFEST_FILE
from hf_posenc.cli import app
from hf_posenc.errors import PosEncError
from hf_posenc.patches import max_positions
from tests.support import tiny_models as tiny
from tests.support.word_level_tokenizer import saved, text, tokenizer

needs_sentence_transformers = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="sentence-transformers is not installed: it is in the extra embeddings",
)
LONGER = 4 * tiny.TRAINED_LENGTH
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
MODULE_FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
PROMPTS = {"query": "w5 w6"}


def save_embedder(directory: Path, model_type: str = "bert") -> Path:
    """A stock embedder with max pooling, which is not the default, normalization and prompts."""
    torch.manual_seed(0)
    config = tiny.config("bert")
    if model_type.endswith("roberta"):
        sizes = {key: getattr(config, key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
        config = RobertaConfig(**sizes, max_position_embeddings=tiny.TRAINED_LENGTH + 1)
    if model_type == "xlm-roberta":
        config = XLMRobertaConfig(**config.to_dict())
    model_class: Any = type(AutoModel.from_config(config))
    tiny.randomise(model_class(config)).float().save_pretrained(directory)
    words = tokenizer(encoder=True)
    words.model_max_length = tiny.TRAINED_LENGTH
    words.save_pretrained(directory)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(MODULES)
    ]
    pooling = {
        "word_embedding_dimension": tiny.WIDTH,
        "pooling_mode_max_tokens": True,
        "pooling_mode_mean_tokens": False,
    }
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": tiny.TRAINED_LENGTH, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        "1_Pooling/config.json": pooling,
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text(encoding="utf-8"))


def train(source: Path, output: Path, length: int, *options: str) -> None:
    (output.parent / "text.txt").write_text(text(3000))
    line = [
        "train",
        "--model",
        source,
        "--scheme",
        "alibi",
        "--data",
        output.parent / "text.txt",
        "--train-length",
        length,
    ]
    line += ["--output-dir", output, "--max-steps", 1, "--per-device-train-batch-size", 2, "--report-to", "none"]
    line += ["--use-cpu", "--disable-tqdm", "true", *options]
    result = CliRunner().invoke(app, list(map(str, line)), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def assert_lengths(directory: Path, length: int) -> None:
    assert AutoTokenizer.from_pretrained(directory).model_max_length == length
    assert read(directory, "sentence_bert_config.json")["max_seq_length"] == length
    config = AutoConfig.from_pretrained(directory)
    first_row = 1 if config.model_type.endswith("roberta") else 0
    assert config.max_position_embeddings == length + first_row
    assert max_positions(config) == tiny.TRAINED_LENGTH, "schemes are built for the trained length"


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("scheme", ["alibi", {"type": "polynomial"}], ids=["alibi", "polynomial"])
def test_a_conversion_names_its_length(model_type: str, scheme: Any, tmp_path: Path) -> None:
    """`polynomial` is a function of the trained length, which must stay what it was."""
    source = save_embedder(tmp_path / "stock", model_type)
    hf_posenc.convert_checkpoint(source, scheme, tmp_path / "plain")
    hf_posenc.convert_checkpoint(source, scheme, tmp_path / "long", max_length=LONGER)
    assert_lengths(tmp_path / "plain", tiny.TRAINED_LENGTH)
    assert_lengths(tmp_path / "long", LONGER)
    plain, long = (AutoModel.from_pretrained(tmp_path / name).eval() for name in ("plain", "long"))
    ids = tiny.tokens(2, tiny.TRAINED_LENGTH + 20)
    with torch.no_grad():
        assert torch.equal(long(ids).last_hidden_state, plain(ids).last_hidden_state)
        assert long(tiny.tokens(1, LONGER)).last_hidden_state.isfinite().all()
    long.save_pretrained(tmp_path / "again")
    before, after = (read(tmp_path / name, "config.json") for name in ("long", "again"))
    assert {key: before[key] for key in after if key in before} == after


def test_a_table_that_ends_is_refused(tmp_path: Path) -> None:
    source = save_embedder(tmp_path / "stock")
    with pytest.raises(PosEncError, match=f"max_length={LONGER} is longer than the {tiny.TRAINED_LENGTH} positions of"):
        hf_posenc.convert_checkpoint(source, "learned", tmp_path / "out", max_length=LONGER)
    extended = {"type": "learned", "max_positions": LONGER, "extend": "interpolate"}
    hf_posenc.convert_checkpoint(source, extended, tmp_path / "out", max_length=LONGER)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == LONGER
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == LONGER
    assert max_positions(config) == tiny.TRAINED_LENGTH, "the size of the stored table"
    assert AutoModel.from_pretrained(tmp_path / "out")(tiny.tokens(1, LONGER)).last_hidden_state.isfinite().all()


def test_an_extended_table_names_its_length_by_itself(tmp_path: Path) -> None:
    source = save_embedder(tmp_path / "stock", "roberta")
    (source / "sentence_bert_config.json").rename(source / "sentence_roberta_config.json")  # as in older embedders
    extended = {"type": "learned", "max_positions": LONGER, "extend": "interpolate"}
    for scheme, length in (("learned", tiny.TRAINED_LENGTH), (extended, LONGER)):
        hf_posenc.convert_checkpoint(source, scheme, tmp_path / "out", force=True)
        assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == length
        assert read(tmp_path / "out", "sentence_roberta_config.json")["max_seq_length"] == length
    hf_posenc.export_checkpoint(tmp_path / "out", tmp_path / "stock form", max_positions=LONGER // 2)
    assert read(tmp_path / "stock form", "sentence_roberta_config.json")["max_seq_length"] == LONGER // 2
    assert AutoConfig.from_pretrained(tmp_path / "stock form").max_position_embeddings == LONGER // 2 + 1


@pytest.mark.slow
def test_training_names_the_length_of_an_extended_table(tmp_path: Path) -> None:
    extended = json.dumps({"type": "learned", "max_positions": LONGER, "extend": "interpolate"})
    train(save_embedder(tmp_path / "stock"), tmp_path / "out", tiny.TRAINED_LENGTH // 2, "--scheme", extended)
    assert read(tmp_path / "out", "sentence_bert_config.json")["max_seq_length"] == LONGER


def test_training_keeps_the_modules_and_names_the_length(tmp_path: Path) -> None:
    source = save_embedder(tmp_path / "stock")
    train(source, tmp_path / "out", tiny.TRAINED_LENGTH // 2)
    assert_lengths(tmp_path / "out", tiny.TRAINED_LENGTH)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert verify_manifest(checkpoint) is None
    for name in MODULE_FILES:
        assert read(tmp_path / "out", name) == read(checkpoint, name) == read(source, name)
        assert name in read(checkpoint, MANIFEST_FILE)
    train(source, tmp_path / "out", tiny.TRAINED_LENGTH // 2, "--max-length", str(LONGER), "--restart")
    assert_lengths(tmp_path / "out", LONGER)


def test_training_beyond_the_stock_length_names_that_of_the_rows(tmp_path: Path) -> None:
    train(saved("gpt2", tmp_path / "stock"), tmp_path / "long", 2 * tiny.TRAINED_LENGTH, "--recipe", "naive")
    config = AutoConfig.from_pretrained(tmp_path / "long")
    assert config.n_positions == config.max_position_embeddings == 2 * tiny.TRAINED_LENGTH
    assert max_positions(config) == tiny.TRAINED_LENGTH


@pytest.mark.slow
@needs_sentence_transformers
@pytest.mark.parametrize(
    ("model_type", "how"),
    [("bert", "converted"), ("bert", "trained"), ("roberta", "converted"), ("xlm-roberta", "converted")],
)
def test_sentence_transformers(model_type: str, how: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source, variant = save_embedder(tmp_path / "stock", model_type), tmp_path / "variant"
    if how == "converted":
        hf_posenc.convert_checkpoint(source, "alibi", variant, max_length=LONGER)
    else:
        train(source, variant, tiny.TRAINED_LENGTH, "--max-length", str(LONGER))
        checkpoint = SentenceTransformer(str(variant / "checkpoint-1"), device="cpu")
        assert [type(module).__name__ for module in checkpoint] == [name for _, name in MODULES]
        assert checkpoint.prompts["query"] == PROMPTS["query"]
    embedder = SentenceTransformer(str(variant), device="cpu")
    assert embedder.max_seq_length == LONGER
    assert embedder.prompts["query"] == PROMPTS["query"]
    names = [type(module).__name__ for module in embedder]
    assert names == [name for _, name in MODULES]
    long_text = text(LONGER - 2)
    shorter = text(tiny.TRAINED_LENGTH)
    first, second = embedder.encode([long_text, shorter])
    assert abs(float((first**2).sum()) - 1) < 1e-5
    ids = AutoTokenizer.from_pretrained(variant)([long_text], return_tensors="pt")["input_ids"]
    assert ids.shape[1] == LONGER
    with torch.no_grad():
        expected = AutoModel.from_pretrained(variant).eval()(ids).last_hidden_state.max(1).values
    torch.testing.assert_close(torch.tensor(first), torch.nn.functional.normalize(expected)[0], rtol=0, atol=1e-5)
    embedder.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert again.max_seq_length == LONGER
    assert [type(module).__name__ for module in again] == names
    torch.testing.assert_close(torch.tensor(again.encode([shorter])[0]), torch.tensor(second), rtol=0, atol=1e-6)


@pytest.mark.slow
@needs_sentence_transformers
def test_sentence_transformers_pass_the_scheme_on(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = save_embedder(tmp_path / "stock")
    embedder = SentenceTransformer(str(source), device="cpu", model_kwargs={"position_scheme": "alibi"})
    hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "variant")
    expected = SentenceTransformer(str(tmp_path / "variant"), device="cpu").encode([text(20)])
    torch.testing.assert_close(torch.tensor(embedder.encode([text(20)])), torch.tensor(expected), rtol=0, atol=1e-6)
    stock = SentenceTransformer(str(source), device="cpu").encode([text(20)])
    assert abs(stock - expected).max() > 1e-3


@pytest.mark.slow
@needs_sentence_transformers
@pytest.mark.parametrize("scheme", ["alibi", {"type": "learned", "max_positions": LONGER, "extend": "interpolate"}])
def test_sentence_transformers_save_the_length_of_a_scheme_that_was_passed_on(scheme: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source, text_of_all = save_embedder(tmp_path / "stock"), [text(LONGER - 2)]
    embedder = SentenceTransformer(str(source), device="cpu", model_kwargs={"position_scheme": scheme})
    embedder.max_seq_length = LONGER
    embedder.save_pretrained(str(tmp_path / "forgotten"))
    hf_posenc.set_max_length(embedder, LONGER)
    expected = embedder.encode(text_of_all)
    embedder.save_pretrained(str(tmp_path / "saved"))
    again, forgotten = (SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("saved", "forgotten"))
    assert (again.max_seq_length, forgotten.max_seq_length) == (LONGER, tiny.TRAINED_LENGTH)
    assert abs(again.encode(text_of_all) - expected).max() < 1e-6
    assert abs(forgotten.encode(text_of_all) - expected).max() > 1e-3
