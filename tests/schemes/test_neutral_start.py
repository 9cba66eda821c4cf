"""Beside the old encoding, a new scheme starts as no change at all; and it can be learned from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posenc
from tests.support import tiny_models as tiny

OWN = {"bert": "learned", "bert-decoder": "learned", "gpt2": "learned", "llama": "rope"}
"""The encoding that a checkpoint comes with."""
NEUTRAL: list[Any] = [
    {"type": "window", "window_size": 5},
    {"type": "window", "window_size": 5, "mix": "concat"},
    {"type": "window", "window_size": 5, "mix": "attention", "query": "context"},
    {"type": "sinusoidal", "mix": "concat", "mix_init": "neutral"},
    {"type": "sinusoidal", "mix": "attention", "mix_init": "neutral"},
    {"type": "polynomial", "mix": "concat", "mix_init": "neutral"},
    {"type": "exponential", "mix": "attention", "mix_init": "neutral"},
    {"type": "alibi", "learned": True, "init": "neutral"},
    "t5",
    {"type": "t5", "shared": False},
    "kerple",
    {"type": "kerple", "kind": "power"},
    "fire",
    "shaw",
    {"type": "shaw", "query_term": True},
    "transformer_xl",
    {"type": "transformer_xl", "shared_bias": True},
    "tupe",
    {"type": "tupe", "relative": False},
    {"type": "tupe", "relative": False, "untie_cls": True},
    "deberta",
    {"type": "deberta", "share_projections": False, "norm": None, "terms": ["p2c"]},
    "cope",
]


def by_scheme(architectures: list[str]) -> Any:
    """All of them on all architectures, but for cope on an encoder, which refuses it (test_edges)."""
    rows = [(name, scheme) for scheme in NEUTRAL for name in architectures if (name, scheme) != ("bert", "cope")]
    return pytest.mark.parametrize(("architecture", "scheme"), rows, ids=str)


@by_scheme(list(OWN))
def test_a_new_scheme_beside_the_old_changes_nothing(architecture: str, scheme: Any) -> None:
    stock, ids = tiny.model(architecture, dtype=torch.float32), tiny.tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    # The old encoding alone first: with padding on the left, stock models count it and ours do not.
    alone = hf_posenc.retrofit(tiny.model(architecture, dtype=torch.float32), OWN[architecture])
    with torch.no_grad():
        expected, padded = stock(ids).logits, alone(ids, attention_mask=mask).logits[:, 5:]
        model = hf_posenc.retrofit(stock, [OWN[architecture], scheme])
        # Rounding only: a bias of zeros takes another kernel, and a mix other sums, than no bias and no mix.
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 5:], padded, rtol=0, atol=1e-5)


def is_without_effect(parameter: torch.Tensor, model: Any) -> bool:
    """Tupe's number for the row of the first token is the same for all keys, and softmax takes no notice of that."""
    return parameter is getattr(model.base_model.position_scheme[1], "cls_row", None)


@by_scheme(["bert", "gpt2", "llama"])
def test_the_neutral_start_can_be_left(architecture: str, scheme: Any) -> None:
    """A gradient reaches the scheme, and a few steps along it leave the neutral point: it is not a dead one."""
    model = hf_posenc.retrofit(tiny.model(architecture, dtype=torch.float32), [OWN[architecture], scheme])
    own = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    assert own
    ids, start = tiny.tokens(4, 14), model(tiny.tokens(4, 14)).logits.detach()
    optimiser = torch.optim.Adam(own, lr=0.005)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        optimiser.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
    assert losses[-1] < losses[0]
    for parameter in own:
        assert parameter.grad.abs().max() > 0 or is_without_effect(parameter, model)
    assert (model(ids).logits - start).abs().max() > 1e-4


PAPER: list[Any] = [
    {"type": "learned", "init": "paper"},
    {"type": "window", "init": "paper"},
    {"type": "alibi", "learned": True, "init": "paper"},
    {"type": "t5", "init": "paper"},
    {"type": "t5", "shared": False, "init": "paper"},
    {"type": "kerple", "init": "paper"},
    {"type": "kerple", "kind": "power", "init": "paper"},
    {"type": "fire", "init": "paper"},
    {"type": "shaw", "init": "paper"},
    {"type": "transformer_xl", "init": "paper"},
    {"type": "tupe", "init": "paper"},
    {"type": "deberta", "init": "paper"},
    {"type": "deberta", "share_projections": False, "init": "paper"},
]


# GPT-2 has a table of its own, which starts as it always does: `learned` brings one on LLaMA only.
STARTS = [(name, scheme) for scheme in PAPER for name in ("gpt2", "llama") if (name, scheme) != ("gpt2", PAPER[0])]


@pytest.mark.parametrize(("architecture", "scheme"), STARTS, ids=str)
def test_the_papers_start_acts_from_the_first_step(architecture: str, scheme: Any) -> None:
    ids = tiny.tokens(2, 14)
    torch.manual_seed(0)
    model = tiny.HEADS_OF[architecture](tiny.config(architecture, position_scheme=scheme)).eval()
    own = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    assert all(parameter.isfinite().all() for parameter in own)
    neutral = {**scheme, "init": "neutral"}
    silent = tiny.HEADS_OF[architecture](tiny.config(architecture, position_scheme=neutral)).eval()
    others = {name: value for name, value in model.state_dict().items() if "position_scheme" not in name}
    assert not silent.load_state_dict(others, strict=False).unexpected_keys
    with torch.no_grad():
        assert (model(ids).logits - silent(ids).logits).abs().max() > 1e-4


def test_every_scheme_with_parameters_is_in_these_lists() -> None:
    def named(schemes: list[Any]) -> set[str]:
        return {scheme if isinstance(scheme, str) else scheme["type"] for scheme in schemes}

    with_parameters = {name for name, info in hf_posenc.list_schemes().items() if info.neutral != "no parameters"}
    assert with_parameters - {"learned"} == named(NEUTRAL)  # learned is the old encoding itself, or zeros on LLaMA
    with_init = {
        name
        for name, info in hf_posenc.list_schemes().items()
        if "init" in info.options and "'paper'" in info.options["init"].type
    }
    assert with_init == named(PAPER)  # not cope: its paper starts at zero too
