"""Evaluations at the edges: ties, models that do not agree, parts that are missing, places that cannot be written."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import BertModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.evaluation import scoring
from hf_posenc.evaluation.estimates import Estimate, share
from hf_posenc.evaluation.halt import Halt
from hf_posenc.evaluation.passkey import TOKENS, Haystack, measure_passkey
from hf_posenc.evaluation.report import Evaluation
from hf_posenc.evaluation.results import DepthResult, LengthResult, PasskeyResult, SimilarityResult, Stop
from hf_posenc.evaluation.settings import Settings
from hf_posenc.evaluation.similarity import agreement
from hf_posenc.evaluation.windows import Frame
from tests.support import evaluation as evaluating
from tests.support import tiny_models as tiny
from tests.support.evaluation import ALONE, Copycat, subject, text_ids

QUIET: dict[str, Any] = {"progress": False}


def test_a_model_that_tells_nothing_apart_is_at_chance() -> None:
    """In bfloat16 logits are often equal: to count ties for the key, or against it, would show what is not there."""

    class Blank(Copycat):
        @property
        def base_model(self) -> Any:
            size = (tiny.VOCABULARY,)
            return lambda ids, use_cache: types.SimpleNamespace(last_hidden_state=torch.zeros(*ids.shape, *size))

    found = measure_passkey(subject(Blank(), text_ids(500)), 60, Settings(trials=4), ALONE)
    for cell in found.depths:
        assert cell.preference == share(2, 4, 0.95)
        assert cell.rank == pytest.approx((tiny.VOCABULARY + 1) / 2)


def test_the_rank_of_all_depths_is_a_geometric_mean_too() -> None:
    half = Estimate(0.5, 0.2, 0.8)
    cells = tuple(DepthResult(depth, 4, half, half, rank, -1.0) for depth, rank in ((0.0, 1.0), (1.0, 100.0)))
    table = str(Evaluation(("a",), 48, 0.95, passkey=(PasskeyResult("a", 48, depths=cells),)))
    assert table.splitlines()[-1].split()[-1] == "10.0"


def test_where_a_model_ends_is_said_once() -> None:
    stops = (Stop("it ends (96 asked)", 48), Stop("it ends (192 asked)", 48), Stop("no text"), Stop("no text"))
    found = Evaluation(("a",), 48, 0.95, perplexity=tuple(LengthResult("a", 96 + n, s) for n, s in enumerate(stops)))
    lines = str(found).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[2:6]] == ["ends at 48 [1]"] * 2 + ["not measured [2]"] * 2
    assert [line for line in lines if line.startswith("[")] == ["[1] a: it ends (96 asked)", "[2] a: no text"]


def test_lengths_in_tokens_need_no_common_trained_length() -> None:
    several = {"a": tiny.model("gpt2"), "b": tiny.model("llama", max_position_embeddings=64)}
    found = hf_posenc.evaluate(several, text_ids(200), lengths=[20, "40"], **QUIET)
    assert found.trained_length is None
    assert [one.length for one in found.perplexity] == [20, 40] * 2
    assert "x)" not in str(found)
    with pytest.raises(ValueError, match="a: 48, b: 64"):
        hf_posenc.evaluate(several, text_ids(200), lengths=[20, "1x"], **QUIET)
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    from hf_posenc.evaluation.figures import length_curve_figure, position_figure

    for figure in (length_curve_figure(found), position_figure(found)):
        assert not any("trained" in text.get_text() for text in figure.axes[0].texts)


def test_a_head_that_is_not_in_the_files_is_not_measured(tmp_path: Path) -> None:
    BertModel(tiny.config("bert")).save_pretrained(tmp_path)
    evaluating.tokenizer().save_pretrained(tmp_path)
    asked = {"lengths": [20], **QUIET}
    with pytest.raises(ValueError, match="lacks weights for the task masked-lm, among them cls"):
        hf_posenc.evaluate(str(tmp_path), text_ids(100), task="masked-lm", **asked)
    found = hf_posenc.evaluate(str(tmp_path), text_ids(100), measures=["similarity"], **asked)
    assert found.similarity[0].cosine is not None
    assert found.similarity[0].cosine.value == pytest.approx(1.0)


def test_a_lack_of_memory_is_no_end_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(model: Any, ids: torch.Tensor) -> torch.Tensor:
        raise Halt("no memory", lasting=False) if ids.shape[1] < 48 else Halt("too long", refused=True)

    monkeypatch.setattr(scoring, "states", states)
    assert scoring.longest_that_works(tiny.model("gpt2"), 96) == 47


def test_a_tokenizer_that_knows_three_letters() -> None:
    """Nothing of the samples, or of the question for a key, is left by one that drops what it does not know."""
    built = Tokenizer(models.WordLevel({"A": 0, "B": 1, "[B]": 2}, unk_token="?"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex("[AB]"), "removed", invert=True)
    built.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 2)])
    picky = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="[B]")
    assert picky("a", add_special_tokens=False)["input_ids"] == []
    assert Frame.of(picky, causal=True) == Frame((2,), ())
    hay = Haystack.of(subject(Copycat(), text_ids(300), picky), 5)
    assert hay.kind == TOKENS
    assert hay.lead == text_ids(300)[:4].tolist()


def test_likeness_is_no_more_than_one() -> None:
    assert Estimate(0.99, 0.97, 1.01).within(-1.0, 1.0) == Estimate(0.99, 0.97, 1.0)
    alike = torch.ones(4, 3, dtype=torch.float64)
    assert agreement(alike, torch.randn(4, 3, dtype=torch.float64)) is None  # JSON has no word for "not a number"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--csv", "DIRECTORY"], "cannot be written"),
        (["--plots", "FILE"], "cannot be a directory"),
        (["--results", "DIRECTORY"], "is a directory"),
        (["--device", "abacus"], "'abacus' cannot be used"),
        (["--data", "BINARY"], "no text in UTF-8"),
        (["--task", "masked-lm"], "cannot be loaded for the task masked-lm"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_a_clumsy_user_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], said: str) -> None:
    from hf_posenc.evaluation import run

    monkeypatch.setattr(run, "_one", lambda *_: pytest.fail("nothing is measured for what cannot be written"))
    model = evaluating.checkpoint(tmp_path / "model", "gpt2")
    places = {"DIRECTORY": tmp_path, "FILE": tmp_path / "text.txt", "BINARY": tmp_path / "binary.txt"}
    places["FILE"].write_text(evaluating.words(text_ids(100)))
    places["BINARY"].write_bytes(b"\xff\xfe\x80")
    more = [str(places.get(word, word)) for word in more]
    line = ["eval", model, "--lengths", "20", "--no-progress", "--data", str(places["FILE"])]
    done = CliRunner().invoke(app, [*line, *more])
    assert done.exit_code == 2, (done.output, done.exception)
    assert said in done.output
    assert len(done.output) < 1200


def test_files_go_where_there_was_no_directory(tmp_path: Path) -> None:
    found = hf_posenc.evaluate(tiny.model("gpt2"), text_ids(100), lengths=[20], **QUIET)
    found.write_csv(tmp_path / "new" / "eval.csv")
    found.write_json(tmp_path / "newer" / "eval.json")
    assert "perplexity" in (tmp_path / "new" / "eval.csv").read_text()
    assert "perplexity" in (tmp_path / "newer" / "eval.json").read_text()


def test_figures_name_every_model_and_where_it_ends() -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    from hf_posenc.evaluation.figures import length_curve_figure, passkey_figure, similarity_figure

    names = tuple(f"model {number}" for number in range(12))
    near = [Estimate(math.exp(3 + number / 10), 15.0, 90.0) for number in range(12)]
    results = [LengthResult(name, 48, perplexity=value) for name, value in zip(names, near, strict=True)]
    results.append(LengthResult(names[0], 96, Stop("it ends", 60)))
    likes = [SimilarityResult(name, 48, original=names[0], cosine=Estimate(0.9, 0.8, 1.0)) for name in names]
    keys = (PasskeyResult(names[0], 96, Stop("it ends", 60)),)
    found = Evaluation(names, 48, 0.95, perplexity=tuple(results), similarity=tuple(likes), passkey=keys)
    for figure in (length_curve_figure(found), similarity_figure(found)):
        told = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len(told) == 12
        lines = [line for line in figure.axes[0].lines if line.get_label() in told]
        assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 12
    assert length_curve_figure(found).legends[0].get_texts()[0].get_text() == "model 0\n(ends at 60)"
    assert similarity_figure(found).axes[0].get_ylabel() == "cosine with model 0"
    assert "ends at 60" in [text.get_text() for text in passkey_figure(found).axes[0].texts]
