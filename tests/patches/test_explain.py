"""`hf_posenc.explain` says what the engine then does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.attention import function as attention
from hf_posenc.attention.dispatch import AttentionPath, DispatchKey
from hf_posenc.patches import build_explanation
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, Case, pairs

PADDED, HOLED = torch.tensor([[0, 0, *[1] * 10], [1] * 12]), torch.tensor([[1, 0, *[1] * 10], [1] * 12])
GAPS = torch.tensor([[*range(6), *range(9, 15)], [*range(12)]])
PACKED = torch.tensor([[*range(5), *range(7)], [*range(11), 0]])
INPUTS: dict[str, dict[str, Any]] = {
    "no padding": {},
    "training with dropout": {},
    "padding at the ends of rows": {"attention_mask": PADDED},
    "any other mask": {"attention_mask": HOLED},
    "packed rows": {"position_ids": PACKED},
    "gaps in position_ids": {"position_ids": GAPS},
    "training": {},
}


DROPOUT = {"bert": "attention_probs_dropout_prob", "gpt2": "attn_pdrop", "llama": "attention_dropout"}
DROPOUT["bert-decoder"] = DROPOUT["bert"]


@pairs(ARCHITECTURES, CASES)
def test_explain_says_what_is_done(case: Case, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = tiny.model(architecture, case.scheme, **{DROPOUT[architecture]: 0.1}), []
    explanation = hf_posenc.explain(model)
    assert len(explanation.layers) == tiny.LAYERS
    select_path = attention.select_path

    def watched(key: DispatchKey) -> Any:
        path, reason = select_path(key)
        taken.append(path)
        return path, reason

    monkeypatch.setattr(attention, "select_path", watched)
    for situation, inputs in INPUTS.items():
        taken.clear()
        model.train(situation == "training with dropout")
        with torch.set_grad_enabled("training" in situation):
            model(tiny.tokens(2, 12), use_cache=False, **inputs)
        expected = [
            choice.path
            for layer in explanation.layers
            for choice in layer.choices
            if (choice.backend, choice.situation) == ("sdpa", situation) and choice.path is not AttentionPath.STOCK
        ]
        assert taken == expected, situation


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    scheme = ["learned", {"type": "alibi", "layers": [0, 1]}]
    hf_posenc.explain(tiny.model("gpt2", scheme))
    printed = capsys.readouterr().out
    assert printed.startswith("input: learned\nlayers 0 to 1: alibi: score\n  sdpa")
    assert "layer 2: no scheme\n  sdpa               always: stock attention function" in printed
    assert "flash_attention_2  always: not supported" in printed
    hf_posenc.explain(tiny.model("gpt2"))
    assert capsys.readouterr().out == "a stock model: hf_posenc does nothing in it\n"


def test_no_line_is_said_twice() -> None:
    scheme = ["rope", {"type": "alibi", "layers": "::2"}, {"type": "t5", "layers": [1]}]
    lines = str(hf_posenc.explain(tiny.model("gpt2", scheme, n_layer=4))).splitlines()
    assert len(lines) == len(set(lines)), lines
    heads = [index for index, line in enumerate(lines) if line.endswith(":") or line.startswith("layer")]
    assert lines[heads[-1]] == "all layers:"
    assert lines[heads[-1] + 1].startswith("  flex_attention")
    assert "all layers:" not in str(hf_posenc.explain(tiny.model("gpt2", "rope")))


def test_equal_layers_are_listed_once() -> None:
    scheme = [{"type": "alibi", "layers": "::2"}, {"type": "rope", "layers": "::2"}]
    text = str(hf_posenc.explain(tiny.model("llama", scheme)))
    assert [line for line in text.splitlines() if line.startswith("layer")] == [
        "layers 0, 2: rope: rotate, alibi: score",
        "layer 1: no scheme",
    ]
    every_fourth = tiny.model("llama", {"type": "none", "layers": "3::4"}, num_hidden_layers=9)
    lines = str(hf_posenc.explain(every_fourth)).splitlines()
    assert lines[0] == "layers 0 to 2, 4 to 6, 8: rope: stock rotation"
    assert lines[-2:] == ["layers 3, 7: no scheme", "  paths as in layers 0 to 2, 4 to 6, 8"]


@pytest.mark.slow
def test_refusals_are_those_of_the_engine() -> None:
    for choice in hf_posenc.explain(tiny.model("gpt2", "shaw")).layers[0].choices:
        assert (choice.path is AttentionPath.REFUSED) == (choice.backend in ("flex_attention", "flash_attention_2"))
    for scheme in ("rope", "alibi"):
        model = tiny.model("gpt2", scheme, attn_pdrop=0.1)
        for choice in hf_posenc.explain(model).layers[0].choices:
            if choice.backend == "flex_attention":
                assert (choice.path is AttentionPath.REFUSED) == (choice.situation == "training with dropout")
        model.set_attn_implementation("flex_attention")
        with pytest.raises(ValueError, match="dropout"):
            model.train()(tiny.tokens())


def test_the_input_says_what_the_cache_keeps() -> None:
    context = {"type": "sinusoidal", "mix": "attention", "query": "context"}
    assert build_explanation(tiny.model("gpt2", context)).at_input == (
        "sinusoidal (keeps token embeddings in one more layer of the KV cache)",
    )
    assert build_explanation(tiny.model("bert", context)).at_input == ("sinusoidal",), "an encoder has no cache"
