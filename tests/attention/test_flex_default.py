"""On CUDA, large inputs take flex_attention without being asked for: forced here on the CPU, where it runs unfused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import hf_posenc
from hf_posenc.attention import compiled_flex, dispatch, flex
from hf_posenc.attention.dispatch import FLEX_SETTING, AttentionPath, DispatchKey, flex_min_scores, select_path
from hf_posenc.errors import PosEncError
from hf_posenc.schemes.terms import DistanceBias, DistanceTable, QueryTerm
from tests.support import tiny_models as tiny
from tests.support.pretended_gpu import pretend_gpu

SCHEMES: dict[str, Any] = {
    "t5": "t5",
    "shaw": {"type": "shaw", "max_distance": 4, "values": False, "query_term": True},
    "deberta": {"type": "deberta", "max_distance": 6},
    "transformer_xl": "transformer_xl",
    "tupe": {"type": "tupe", "relative": True},
}
SLOW = pytest.mark.slow
PADDING = torch.tensor([[0, 0, 0, *[1] * 9], [1] * 12])
PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": PADDING},
    "packed": {"position_ids": PACKED},
    "packed and padded": {"attention_mask": PADDING, "position_ids": (PADDING.cumsum(-1) - 1).clamp(min=0) % 5},
    "additive": {"attention_mask": tiny.additive_mask(torch.ones(2, 1, 12, 12).tril().bool())},
}


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[AttentionPath]:
    return pretend_gpu(monkeypatch)


def run(model: Any, ids: torch.Tensor, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits at tokens, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **inputs).logits
    mask = inputs.get("attention_mask")
    logits = logits[mask.bool()] if mask is not None and mask.dim() == 2 else logits
    (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, architecture, marks=[] if (name, architecture) == ("t5", "gpt2") else pytest.mark.slow)
        for name in SCHEMES
        for architecture in ("gpt2", "bert", "llama")
    ],
)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case == "packed" else SLOW) for case in INPUTS])
def test_equals_sdpa(
    name: str, architecture: str, case: str, on_cuda: list[AttentionPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unfused, flex_attention has gradients on CPUs too, but refuses them because the fused CPU kernels have none.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    model, ids, inputs = tiny.model(architecture, SCHEMES[name]), tiny.tokens(2, 12), INPUTS[case]
    monkeypatch.setenv(FLEX_SETTING, "off")
    expected, expected_gradients = run(model, ids, inputs)
    monkeypatch.setenv(FLEX_SETTING, "0")
    on_cuda.clear()
    logits, gradients = run(model, ids, inputs)
    assert on_cuda == [AttentionPath.FLEX] * tiny.LAYERS
    tolerances = tiny.tolerances(architecture)
    torch.testing.assert_close(logits, expected, **tolerances)
    for parameter, gradient in expected_gradients.items():
        scale = gradient.abs().max().clamp(min=1)
        torch.testing.assert_close(gradients[parameter] / scale, gradient / scale, **tolerances)


@pytest.mark.parametrize(
    ("scheme", "path"),
    [("shaw", AttentionPath.CHUNKED), ("fire", AttentionPath.CHUNKED), ("cope", AttentionPath.CHUNKED)],
)
def test_what_flex_cannot_do_better_keeps_its_path(scheme: str, path: AttentionPath, on_cuda: Any) -> None:
    """Vectors at the values, and terms that are dense tensors."""
    with torch.no_grad():
        tiny.model("gpt2", scheme)(tiny.tokens(1, 8), use_cache=False)
    assert on_cuda == [path] * tiny.LAYERS


def test_size_from_which_it_is_taken(on_cuda: list[AttentionPath], monkeypatch: pytest.MonkeyPatch) -> None:
    model, scores = tiny.model("gpt2", "alibi", n_layer=1), 2 * tiny.HEADS * 12 * 12
    for least, path in ((scores, AttentionPath.FLEX), (scores + 1, AttentionPath.STRIDED_BIAS)):
        monkeypatch.setenv(FLEX_SETTING, str(least))
        on_cuda.clear()
        with torch.no_grad():
            model(tiny.tokens(2, 12), use_cache=False)
        assert on_cuda == [path]
    monkeypatch.delenv(FLEX_SETTING)
    assert flex_min_scores() == dispatch.FLEX_MIN_SCORES
    monkeypatch.setenv(FLEX_SETTING, "many")
    with pytest.raises(PosEncError, match="number of scores"):
        flex_min_scores()


def test_only_cuda_has_the_kernels() -> None:
    assert not dispatch.runs_flex_kernels(torch.device("cpu"))
    assert not dispatch.runs_flex_kernels(torch.device("mps"))


@pytest.mark.parametrize(
    "changes",
    [{"dropout": True}, {"has_value_terms": True}, {"mask_requires_grad": True}, {"single_query": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_dispatch_where_flex_cannot_be_used(changes: dict[str, Any]) -> None:
    key = DispatchKey("sdpa", frozenset({DistanceBias, QueryTerm}), on_cpu=False, flex_pays=True)
    assert select_path(key)[0] is AttentionPath.FLEX
    assert select_path(key._replace(**changes))[0] in (AttentionPath.DENSE_BIAS, AttentionPath.DENSE_WEIGHTS)
    assert select_path(key._replace(tracing=True))[0] is AttentionPath.DENSE_BIAS


def test_options_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DistanceTable(torch.zeros(1, 3, 2), torch.arange(3))
    content, bias, cuda = [QueryTerm(table)], [DistanceBias(torch.zeros(1, 3))], torch.device("cuda", 0)
    for capability, options in (((8, 0), {"bwd_num_warps": 8}), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert flex.kernel_options(content, cuda) == options
        assert flex.kernel_options(bias, cuda) is None
    assert flex.kernel_options(content, torch.device("cpu")) is None


def test_explain_says_so(on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLEX_SETTING, "1000")
    text = str(hf_posenc.explain(tiny.model("gpt2", "alibi")))
    assert "from 1,000 scores per layer on, no padding" in text
    assert f"large inputs take flex_attention, which writes no bias out; {FLEX_SETTING} sets from when" in text
    monkeypatch.setenv(FLEX_SETTING, "off")
    assert FLEX_SETTING not in str(hf_posenc.explain(tiny.model("gpt2", "alibi")))


@pytest.fixture
def compiled(on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Compile flex_attention, but without a kernel: only what decides when it is compiled again."""
    wrappers: dict[Any, Any] = {}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(flex, "compiles_flex", lambda query: True)
    monkeypatch.setattr(compiled_flex, "COMPILER", "eager")
    monkeypatch.setattr(compiled_flex, "_compiled", wrappers)
    return wrappers


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_each_kind_of_terms_is_compiled_by_itself(compiled: dict[Any, Any]) -> None:
    """Torch's limit for one function is 8 graphs. Here are three kinds of terms, each compiled at most three times."""
    models = [tiny.model("gpt2", SCHEMES[name], torch.float32) for name in ("t5", "shaw", "transformer_xl")]
    lengths, expected = (5, 12, 17, 23), []
    with torch.no_grad():
        for length in lengths:
            for model in models:
                logits = model(tiny.tokens(2, length), use_cache=False).logits
                expected.append((model, length, logits))
    assert len(compiled) == 3
    assert num_graphs() <= 9
    for model, length, logits in expected:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            torch.testing.assert_close(logits, model(tiny.tokens(2, length), use_cache=False).logits, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_reaching_the_recompile_limit_is_an_error(compiled: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_flex, "RECOMPILE_LIMIT", 1)
    model = tiny.model("gpt2", "t5", torch.float32)
    with torch.no_grad():
        model(tiny.tokens(2, 12), use_cache=False)
        with pytest.raises(PosEncError, match="compiled 1 times"):
            model.to(torch.bfloat16)(tiny.tokens(2, 12), use_cache=False)
    assert len(compiled) == 1
