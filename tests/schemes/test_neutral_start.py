"""Added to the model's own encoding, a neutral scheme changes nothing at first, and it can be trained from there."""

from __future__ import annotations

from typing import Any

import torch

import hf_posenc
from tests.support import tiny_models as tiny
from tests.support.sampling import repeated_types, sampled

STOCK_ENCODING = {"bert": "learned", "bert-decoder": "learned", "gpt2": "learned", "llama": "rope"}
NEUTRAL: list[Any] = [
    {"type": "window", "window_size": 5},
    {"type": "window", "window_size": 5, "mix": "concat"},
    {"type": "window", "window_size": 5, "mix": "attention", "query": "context"},
    {"type": "sinusoidal", "mix": "concat", "mix_init": "neutral"},
    {"type": "sinusoidal", "mix": "attention", "mix_init": "neutral"},
    {"type": "polynomial", "mix": "concat", "mix_init": "neutral"},
    {"type": "exponential", "mix": "attention", "mix_init": "neutral"},
    {"type": "alibi", "learned": True, "init": "neutral"},
    {"type": "alibi", "learned": "per_layer", "init": "neutral"},
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
    {"type": "temperature", "form": "ssmax"},
    "forget",
    {"type": "forget", "form": "cable"},
]


NOT_CAUSAL = [("bert", "cope"), ("bert", NEUTRAL[-2]), ("bert", NEUTRAL[-1])]
"""The encoder refuses cope and forget."""


@sampled(architecture=list(STOCK_ENCODING), scheme=NEUTRAL, exclude=NOT_CAUSAL, slow=repeated_types(NEUTRAL))
def test_adding_a_neutral_scheme_changes_nothing(architecture: str, scheme: Any) -> None:
    stock, ids = tiny.model(architecture, dtype=torch.float32), tiny.tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    # With left padding compare to the stock encoding under hf_posenc, which does not count the padding; stock does.
    alone = hf_posenc.retrofit(tiny.model(architecture, dtype=torch.float32), STOCK_ENCODING[architecture])
    with torch.no_grad():
        expected, padded = stock(ids).logits, alone(ids, attention_mask=mask).logits[:, 5:]
        model = hf_posenc.retrofit(stock, [STOCK_ENCODING[architecture], scheme])
        # Only rounding differs: a zero bias uses another kernel, and a mix adds in another order.
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 5:], padded, rtol=0, atol=1e-5)


def has_no_effect(parameter: torch.Tensor, model: Any) -> bool:
    """TUPE's bias for the first token's row is the same for all keys, which softmax ignores."""
    return parameter is getattr(model.base_model.position_scheme[1], "cls_row", None)


@sampled(architecture=["bert", "gpt2", "llama"], scheme=NEUTRAL, exclude=NOT_CAUSAL, slow=repeated_types(NEUTRAL))
def test_neutral_schemes_can_be_trained(architecture: str, scheme: Any) -> None:
    """Every parameter gets a gradient, and a few steps lower the loss."""
    model = hf_posenc.retrofit(tiny.model(architecture, dtype=torch.float32), [STOCK_ENCODING[architecture], scheme])
    parameters = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    assert parameters
    ids, start = tiny.tokens(4, 14), model(tiny.tokens(4, 14)).logits.detach()
    optimizer = torch.optim.Adam(parameters, lr=0.005)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    for parameter in parameters:
        assert parameter.grad.abs().max() > 0 or has_no_effect(parameter, model)
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
    {"type": "forget", "init": "paper"},
]


# GPT-2 has its own table; only on LLaMA does `learned` create one.
@sampled(architecture=["gpt2", "llama"], scheme=PAPER, exclude=[("gpt2", PAPER[0])], slow=repeated_types(PAPER))
def test_paper_initialization_has_an_effect(architecture: str, scheme: Any) -> None:
    ids = tiny.tokens(2, 14)
    torch.manual_seed(0)
    model = tiny.MODEL_CLASSES[architecture](tiny.config(architecture, position_scheme=scheme)).eval()
    parameters = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    assert all(parameter.isfinite().all() for parameter in parameters)
    neutral = {**scheme, "init": "neutral"}
    baseline = tiny.MODEL_CLASSES[architecture](tiny.config(architecture, position_scheme=neutral)).eval()
    others = {name: value for name, value in model.state_dict().items() if "position_scheme" not in name}
    assert not baseline.load_state_dict(others, strict=False).unexpected_keys
    with torch.no_grad():
        assert (model(ids).logits - baseline(ids).logits).abs().max() > 1e-4


def test_every_scheme_with_parameters_is_in_these_lists() -> None:
    def names(schemes: list[Any]) -> set[str]:
        return {scheme if isinstance(scheme, str) else scheme["type"] for scheme in schemes}

    with_parameters = {name for name, info in hf_posenc.list_schemes().items() if info.neutral != "no parameters"}
    assert with_parameters - {"learned"} == names(NEUTRAL)  # learned is the stock encoding, or zeros on LLaMA
    with_init = {
        name
        for name, info in hf_posenc.list_schemes().items()
        if "init" in info.options and "'paper'" in info.options["init"].type
    }
    assert with_init == names(PAPER)  # not cope, which starts at zero in the paper too
