"""The benchmark of longer inputs without training: inputs of the real LLM, what is resumed, costs, page and figure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc
from benchmarks.extension import __main__ as command
from benchmarks.extension import costs, llm, report
from benchmarks.recovery.tasks import CheckpointMissing

SCORED, VOCABULARY = 24, 128
SEGMENTS = {"segment_losses": [2.0, 4.0], "segment_tokens": [2, 2]}


class Characters:
    """A tokenizer with a token per character."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(character) % VOCABULARY for character in text]}


def prompt(length: int) -> llm.Prompt:
    text_ids = torch.arange(4000) % 23  # control characters, none of which are in the needles
    return llm.build_prompt(Characters(), text_ids, length, SCORED)


def as_text(tokens: torch.Tensor) -> str:
    return "".join(map(chr, tokens.tolist()))


@pytest.mark.parametrize("length", [900, 1800])
def test_an_input_has_its_length_and_every_number_twice(length: int) -> None:
    built = prompt(length)
    context, questions = built.input_ids[: built.scored_start], built.input_ids[built.scored_stop :]
    assert len(built.input_ids) == length
    depths = []
    for answer in built.answers:
        assert built.input_ids[answer.start :][: len(answer.key)].tolist() == answer.key
        number = "".join(map(chr, answer.key))
        assert as_text(context).count(number) == as_text(questions).count(number) == 1
        assert answer.distractor != answer.key
        depths.append(as_text(context).index(number) / len(context))
    expected = [(index + 0.5) / len(llm.NAMES) for index in range(len(llm.NAMES))]
    assert sorted(depths) == pytest.approx(expected, abs=0.05)
    assert depths != sorted(depths), "questions are in another order than the numbers"


def test_all_lengths_score_the_same_text_after_a_longer_context() -> None:
    short, long = prompt(900), prompt(1800)
    assert torch.equal(*(each.input_ids[each.scored_start : each.scored_stop] for each in (short, long)))
    assert long.scored_start == short.scored_start + 900
    with pytest.raises(ValueError, match="no room"):
        prompt(600)


class Oracle(torch.nn.Module):
    """Predicts the next token of its input with certainty, but not at some places."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        expected = torch.cat([input_ids[0, 1:], input_ids[0, :1]])
        logits = torch.zeros(1, input_ids.shape[1], VOCABULARY)
        for place, token in enumerate(expected.tolist()):
            logits[0, place, token] = -50.0 if place + 1 in self.wrong else 50.0
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


def test_numbers_are_found_where_all_digits_come_first() -> None:
    built = prompt(900)
    result = llm.measure_prompt(Oracle(wrong=set()), built)
    assert (result["found"], result["passkey"]) == (1.0, 1.0)
    assert result["perplexity"] == pytest.approx(1.0)
    last_digit = built.answers[0].start + len(built.answers[0].key) - 1
    assert llm.measure_prompt(Oracle({last_digit}), built)["found"] == pytest.approx(0.9)
    answer = built.answers[1]
    fork = next(i for i, (key, other) in enumerate(zip(answer.key, answer.distractor, strict=True)) if key != other)
    result = llm.measure_prompt(Oracle({answer.start + fork}), built)
    assert (result["found"], result["passkey"]) == (pytest.approx(0.9), pytest.approx(0.9))
    assert result["perplexity"] == pytest.approx(1.0), "questions do not count"
    assert llm.measure_prompt(Oracle({built.scored_start}), built)["perplexity"] > 5, "the first scored token counts"


@torch.no_grad()
def test_perplexity_is_that_of_the_whole_sequence() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes)).eval()
    hf_posenc.retrofit(model, {"type": "rope", "extend": {"method": "rerope"}})
    built = prompt(900)
    labels = built.input_ids.clone()
    labels[: built.scored_start] = labels[built.scored_stop :] = -100
    loss = model(built.input_ids[None], labels=labels[None]).loss.item()
    assert llm.measure_prompt(model, built)["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_operations_count_weights_and_pairs() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=1, head_dim=4)
    weights = sum(
        parameter.numel()
        for name, parameter in LlamaForCausalLM(config).model.layers.named_parameters()
        if "norm" not in name
    )
    pairs = 10 * 10 / 2  # half of all pairs are causal
    attention = 3 * 2 * pairs * 4 * 4  # layers, heads, a product and a sum for each of 4 features, twice
    assert llm.forward_operations(config, 10) == 2 * weights * 10 + attention
    assert llm.forward_operations(config, 10, 1.5) == 2 * weights * 10 + 1.5 * attention


def test_measured_rows_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Inputs:
        measured: list[tuple[Any, str]] = []

        def estimate(self, rows: list[tuple[str, str]], cost: dict[str, Any]) -> dict[tuple[str, str], float]:
            return dict.fromkeys(rows, 3.0)

        def length(self, multiple: str) -> int:
            return 8192

        def measure(self, scheme: Any, multiple: str) -> dict[str, Any]:
            self.measured.append((scheme, multiple))
            return {"perplexity": 12.0, "found": 0.5, "cpu_seconds": 1}

    path, inputs = tmp_path / "results.json", Inputs()
    path.write_text(json.dumps({"llm": {"plain": {"1x": {}}}}))
    for _ in range(2):
        file = command.ResultsFile(path)
        rows = list(llm.missing_rows(file.results["llm"], ["plain", "YaRN"], ["1x", "2x"]))
        command.run_llm(file, inputs, rows, estimate_only=True)  # type: ignore[arg-type]
        command.run_llm(file, inputs, rows)  # type: ignore[arg-type]
    yarn = command.METHODS["YaRN"]
    assert inputs.measured == [(yarn, "1x"), ("rope", "2x"), (yarn, "2x")], "the shortest first"
    assert "3 rows, about 9 CPU minutes" in capsys.readouterr().out


def test_a_missing_model_or_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSENC_SMOLLM2", str(tmp_path))
    with pytest.raises(CheckpointMissing, match="pass --llm or set HF_POSENC_SMOLLM2"):
        llm.model_directory(None)
    with pytest.raises(CheckpointMissing, match="--text"):
        llm.text_file(tmp_path / "test.txt")


def test_ratios_are_those_of_the_same_round() -> None:
    def work(loops: int) -> None:
        sum(range(loops))

    ratios = costs.interleaved_ratios({"plain": lambda: work(200_000), "slow": lambda: work(2_000_000)}, rounds=3)
    assert ratios["plain"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert 3 < ratios["slow"]["low"] <= ratios["slow"]["ratio"] <= ratios["slow"]["high"] < 30


@pytest.mark.slow
def test_costs_of_short_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "COST_LENGTH": 64,
        "COST_ROUNDS": 3,
        "TRAINING_ROUNDS": 3,
        "DECODED_TOKENS": 2,
        "DECODING_ROUNDS": 3,
    }.items():
        monkeypatch.setattr(costs, name, value)
    methods = {"plain", "Self-Extend", "ReRoPE", "dual chunk attention", "Leaky ReRoPE"}
    for measure in (costs.measure_cost, costs.measure_training_cost, costs.measure_decoding):
        ratios = measure()
        assert set(ratios) == methods
        assert all(0 < ratio["ratio"] <= ratio["high"] for ratio in ratios.values())


def results() -> dict[str, Any]:
    row = {"perplexity": 4.0, "interval": [3.0, 5.0], "passkey": 0.5, "found": 0.4, **SEGMENTS}
    longer = {**row, "perplexity": 8.0, "segment_losses": [4.0, 6.0]}
    quality = {"1x": row, "2x": row, "4x": longer}
    decoding = {name: {"ratio": ratio, "low": 0.9 * ratio, "high": 2 * ratio} for name, ratio in (("ReRoPE", 1.75),)}
    return {
        "quality": {"plain": quality, "ReRoPE": quality},
        "cost": {},
        "decoding": decoding,
        "llm": {"plain": quality},
    }


def test_the_page_shows_both_models_and_what_is_missing() -> None:
    page = report.render_page(results())
    assert "| ReRoPE | 4.00 | 4.00 | 8.00 | 50% | 50% | 50% |  |  | 1.75 |" in page
    assert "| plain | 4.00 | 4.00 | 8.00 | 40% | 40% | 40% |" in page
    assert f"| YaRN |{' not yet run |' * 6}" in page
    assert "relative to plain at 1x on the same tokens (95%): plain 2.718 (2.718 to 2.718)" in page
    assert "Quartiles of the cost of a new token: ReRoPE 1.57 to 3.50." in page


@pytest.mark.slow
def test_the_figure_has_a_panel_per_model_and_fits_a_phone(tmp_path: Path) -> None:
    heights = []
    for measured in ({**results(), "llm": {}}, results()):
        report.draw_figure(measured, tmp_path / "figure.png")
        with Image.open(tmp_path / "figure.png") as image:
            assert image.width == round(report.PHONE_WIDTH * report.DPI)
            heights.append(image.height)
    assert heights[1] - heights[0] == pytest.approx(report.PANEL_HEIGHT * report.DPI, abs=2)
