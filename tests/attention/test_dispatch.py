"""The fast ways of the engine are taken, in several runs too, and give what the plain way gives, and its gradients."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc.attention import bands, blocks, strided
from hf_posenc.attention import chunked as chunks
from hf_posenc.attention import function as attention
from hf_posenc.attention.call import AttentionCall
from hf_posenc.attention.dense import dense_attention
from hf_posenc.attention.dispatch import AttentionPath
from hf_posenc.schemes.inputs import Content
from hf_posenc.schemes.terms import DistanceBias, DistanceTable, KeyTerm, QueryTerm, Separable
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, Case, pairs
from tests.support.large_configs import Largest, kept_together

SCORING = [case for case in CASES if case.scores]
by_pair = pairs(ARCHITECTURES, SCORING)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs so short that the inputs of these tests take several, the last of them not whole."""
    monkeypatch.setattr(strided, "CAUSAL_RUN", 5)
    monkeypatch.setattr(chunks, "QUERIES", 7)
    monkeypatch.setattr(chunks, "FEW_QUERIES", 6)
    monkeypatch.setattr(chunks, "COLUMNS", 5)
    monkeypatch.setattr(blocks, "HEADS_AT_A_TIME", 3)
    for module in (bands, blocks):
        monkeypatch.setattr(module, "RUN", 4)


def logits_and_gradients(model: Any, ids: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    output = model(ids, use_cache=False, **inputs).logits
    visible = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.linspace(-1, 1, output[visible].numel(), dtype=output.dtype).view_as(output[visible])
    (output[visible] * weights).sum().backward()
    return output.detach()[visible], {name: parameter.grad for name, parameter in model.named_parameters()}


@by_pair
@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "all of a row"])
@pytest.mark.usefixtures("short_runs")
def test_runs_equal_the_plain_way(case: Case, architecture: str, padding: str) -> None:
    dtype = torch.float32 if architecture == "llama" and padding != "none" else torch.float64  # stock eager's own NaN
    model, ids = tiny.model(architecture, case.scheme, dtype), tiny.tokens(3, 17)
    mask = torch.ones_like(ids)
    mask[1, : 6 if padding in ("left", "both") else 0] = 0
    mask[2, 12 if padding in ("right", "both") else 17 :] = 0
    mask[0, : 17 if padding == "all of a row" else 0] = 0
    inputs = {} if padding == "none" else {"attention_mask": mask}
    atol = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else oracles.tolerance(architecture)}
    found, gradients = logits_and_gradients(model, ids, **inputs)
    with torch.no_grad():
        without = model(ids, use_cache=False, **inputs).logits[mask.bool()]
    model.set_attn_implementation("eager")
    expected, plain = logits_and_gradients(model, ids, **inputs)
    torch.testing.assert_close(found, expected, **atol)
    torch.testing.assert_close(without, expected, **atol)
    for name, gradient in plain.items():
        if gradient is not None:
            scale = gradient.abs().max().clamp(min=1)
            torch.testing.assert_close(
                gradients[name] / scale, gradient / scale, **atol, msg=lambda text, n=name: f"{n}: {text}"
            )


@pairs(["gpt2", "llama"], SCORING)
@pytest.mark.usefixtures("short_runs")
def test_runs_behind_a_cache_equal_the_whole(case: Case, architecture: str) -> None:
    """More keys than queries, in several runs."""
    model, ids, cache = tiny.model(architecture, case.scheme), tiny.tokens(2, 23), DynamicCache()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :9], past_key_values=cache).logits
        second = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **tiny.same(architecture))


HOLED, PADDED = torch.tensor([[1, 0, *[1] * 10], [1] * 12]), torch.tensor([[0, 0, *[1] * 10], [1] * 12])
GAPS = torch.tensor([[*range(6), *range(9, 15)], [*range(12)]])


@pytest.mark.parametrize(
    ("scheme", "inputs", "way"),
    [
        ("alibi", {}, AttentionPath.STRIDED_BIAS),
        ("t5", {"attention_mask": PADDED}, AttentionPath.STRIDED_BIAS_UNPADDED),
        ("t5", {"attention_mask": HOLED}, AttentionPath.CHUNKED),
        ("t5", {"position_ids": GAPS}, AttentionPath.DENSE_BIAS_BY_HEADS),
        ({"type": "shaw", "values": False}, {}, AttentionPath.CHUNKED),
        ("deberta", {"attention_mask": PADDED}, AttentionPath.CHUNKED),
        ("shaw", {}, AttentionPath.CHUNKED),
        ("shaw", {"position_ids": GAPS}, AttentionPath.DENSE_WEIGHTS),
        ("fire", {}, AttentionPath.CHUNKED),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_the_way_that_is_taken(
    architecture: str, scheme: Any, inputs: Any, way: AttentionPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, taken = tiny.model(architecture, scheme), []
    real = attention.compute

    def watched(call: Any, path: AttentionPath) -> Any:
        taken.append(path)
        return real(call, path)

    monkeypatch.setattr(attention, "compute", watched)
    with torch.no_grad():
        model(tiny.tokens(2, 12), use_cache=False, **inputs)
    assert taken == [way] * tiny.LAYERS


@pairs(["bert", "llama"], SCORING)
@pytest.mark.usefixtures("short_runs")
def test_some_heads_at_a_time_equal_all(case: Case, architecture: str) -> None:
    """Where positions have gaps and there is no gradient; and a mask for each head, which any way must keep apart."""
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 12)
    shown = torch.ones(2, tiny.HEADS, 12, 12, dtype=torch.bool)
    for head in range(tiny.HEADS):
        shown[:, head, :, 1 + head] = False
    shown &= torch.ones(12, 12, dtype=torch.bool).tril() | (architecture == "bert")
    for inputs in ({"position_ids": GAPS}, {"position_ids": GAPS[:1]}, {"attention_mask": tiny.additive(shown)}):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(ids, use_cache=False, **inputs).logits
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            found = model(ids, use_cache=False, **inputs).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=oracles.tolerance(architecture))


@pytest.mark.parametrize("scheme", ["alibi", "t5", "deberta"])
def test_a_mask_longer_than_the_input(scheme: str) -> None:
    """Of all slots of a static cache, filled or not."""
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 12)
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask[:, :12], use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        found = model(ids, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found[:, 3:], expected[:, 3:], **tiny.same("gpt2"))


def test_one_separable_term_for_all_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    queries, keys = (torch.randn(1, 1, 6, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(4, 11, generator=generator, dtype=torch.float64)
    call = plain_call(query, key, value, False, terms=[Separable(queries, keys), DistanceBias(bias)])
    torch.testing.assert_close(chunks.sdpa_by_chunks(call), dense_attention(call)[0])


def test_bands_put_each_product_at_its_distance() -> None:
    """Against a loop; and the control, rows in the wrong order."""
    generator = torch.Generator().manual_seed(0)
    for queries, keys in ((1, 1), (1, 9), (3, 9), (9, 9), (300, 310), (9, 4)):
        states, others = (torch.randn(2, 2, size, 3, generator=generator) for size in (queries, keys))
        rows = torch.randn(2, queries + keys - 1, 3, generator=generator)
        found = bands.products_by_distance(states, rows, keys)
        of_keys = bands.products_of_keys_by_distance(others, rows, queries)
        for i in {0, queries // 2, queries - 1}:
            for j in {0, keys // 2, keys - 1}:
                row = rows[:, j - i + queries - 1]
                torch.testing.assert_close(found[:, :, i, j], (states[:, :, i] * row).sum(-1))
                torch.testing.assert_close(of_keys[:, :, i, j], (others[:, :, j] * row).sum(-1))
        if queries * keys > 1:
            assert (bands.products_by_distance(states, rows.flip(1), keys) - found).abs().max() > 1e-2


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.usefixtures("short_runs")
def test_the_backward_pass_of_a_trained_bias_is_its_gradient(causal: bool, groups: int) -> None:
    """Numerically, in float64; grouped key heads, an odd number of heads at a time, several runs."""
    generator = torch.Generator().manual_seed(0)
    length, keys = 7, 7 if causal else 9
    shapes = [(2, 4, length, 3), (2, groups, keys, 3), (2, groups, keys, 3), (4, length + keys - 1)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(query: Any, key: Any, value: Any, values: Any) -> torch.Tensor:
        return strided.sdpa_strided(plain_call(query, key, value, causal), values)

    assert "_ByChunks" in attend(*inputs).grad_fn.next_functions[0][0].name()
    assert torch.autograd.gradcheck(attend, inputs)


def plain_call(query: Any, key: Any, value: Any, causal: bool, **changes: Any) -> AttentionCall:
    """An attention with nothing added, outside of any model."""

    def stock(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float) -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2), None

    given = {
        "module": torch.nn.Module(),
        "stock": stock,
        "query": query,
        "key": key,
        "value": value,
        "attention_mask": None,
        "causal": causal,
        "scaling": 0.7,
        "dropout": 0.0,
        "terms": [],
        "value_rows": [],
        "positions": types.SimpleNamespace(dtype=query.dtype, uniform=True, key_length=key.shape[2]),
        "content": Content(query, query, key, 0.7, lambda: None, lambda states: None),  # type: ignore[arg-type]
        "extra": {},
    }
    return AttentionCall(**{**given, **changes})


def every_form(tensors: list[torch.Tensor], index: torch.Tensor) -> tuple[list[Any], list[Any]]:
    rows, other_rows, value_rows, values, queries, keys, whole, of_keys = tensors
    terms = [
        KeyTerm(DistanceTable(rows, index)),
        QueryTerm(DistanceTable(other_rows, index)),
        DistanceBias(values),
        Separable(queries, keys),
        whole,
        of_keys,
    ]
    return terms, [DistanceTable(value_rows, index)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("clip", [2, 99], ids=["far rows", "a row each"])
@pytest.mark.usefixtures("short_runs")
def test_the_backward_pass_of_every_form_of_term(causal: bool, groups: int, clip: int, dropout: float) -> None:
    """Numerically, in float64, all at once: several chunks and runs, shared heads, shared rows of a batch, dropout."""
    generator = torch.Generator().manual_seed(0)
    length, keys = 9, 9 if causal else 11
    distances = torch.arange(length + keys - 1) - (length - 1)
    index = distances.clamp(-clip, clip) + min(clip, length - 1)
    shapes = [(2, 4, length, 3), (2, groups, keys, 3), (2, groups, keys, 3)]
    shapes += [(4, 32, 3), (1, 32, 3), (1, 32, 3), (4, length + keys - 1), (1, 4, length, 2), (2, 4, keys, 2)]
    shapes += [(1, 4, length, keys), (2, 4, 1, keys)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(query: Any, key: Any, value: Any, *tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        terms, value_rows = every_form(list(tensors), index)
        call = plain_call(query, key, value, causal, terms=terms, value_rows=value_rows, dropout=dropout)
        return chunks.sdpa_by_chunks(call)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    if not dropout:
        call = plain_call(*inputs[:3], causal)
        terms, value_rows = every_form(inputs[3:], index)
        expected, _ = dense_attention(dataclasses.replace(call, terms=terms, value_rows=value_rows))
        torch.testing.assert_close(attend(*inputs), expected)
        terms, _ = every_form([inputs[3].flip(1), *inputs[4:]], index)
        wrong = chunks.sdpa_by_chunks(dataclasses.replace(call, terms=terms, value_rows=value_rows))
        assert (wrong - expected).abs().max() > 1e-2


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("name", ["t5", "kerple", "shaw", "shaw-keys", "transformer_xl", "tupe", "deberta", "cope"])
def test_half_precision_trains_a_scheme_as_float32_does(architecture: str, name: str) -> None:
    case = next(case for case in CASES if case.id == name)
    if case.causal and architecture == "bert":
        architecture = "bert-decoder"
    gradients = []
    wide, narrow = torch.float32, torch.bfloat16
    for dtype, autocast, cached in (
        (wide, False, False),
        (narrow, False, False),
        (wide, True, False),
        (wide, True, True),
    ):
        model = tiny.model(architecture, case.scheme, narrow).to(dtype)
        with torch.autocast("cpu", narrow, enabled=autocast):
            output = model(tiny.tokens(4, 16), use_cache=cached).logits
        output.float().square().mean().backward()
        own = [p.grad for n, p in model.named_parameters() if "position_scheme" in n and p.grad is not None]
        gradients.append(torch.cat([grad.float().flatten() for grad in own]))
    assert gradients[0].norm() > 0
    for found in gradients[1:]:
        assert found.isfinite().all()
        assert (found - gradients[0]).norm() < 0.1 * gradients[0].norm()


def test_half_precision_rounds_no_long_sums() -> None:
    """Rows that all far keys share, and the mean over a row of weights: taken in bfloat16, errors are 2 to 5 %."""
    length, index = 300, (torch.arange(599) - 299).clamp(-4, 4) + 4

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, kept: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16).to(kept)

        query, key, value = (random(2, 4, length, 16) for _ in range(3))
        tables = [random(4, 9, 16).requires_grad_() for _ in range(2)]
        bias = random(4, 2 * length - 1, kept=torch.float32).requires_grad_()
        rows = [DistanceTable(table, index) for table in tables]
        call = plain_call(query, key, value, True, terms=[QueryTerm(rows[0]), KeyTerm(rows[1]), DistanceBias(bias)])
        (chunks.sdpa_by_chunks(call) * random(2, length, 4, 16)).float().sum().backward()
        return [leaf.grad.float() for leaf in (*tables, bias) if leaf.grad is not None]

    for narrow, known in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert (narrow - known).norm() < 0.013 * known.norm()


@pytest.mark.usefixtures("short_runs")
def test_dropout_drops_as_many_weights_and_scales_the_rest() -> None:
    """With unit vectors for values, the output is the weights themselves."""
    generator, length, rate = torch.Generator().manual_seed(0), 31, 0.25
    query, key = (torch.randn(2, 4, length, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    value = torch.eye(length, dtype=torch.float64).expand(2, 4, -1, -1)
    terms: list[Any] = [DistanceBias(torch.randn(4, 2 * length - 1, generator=generator, dtype=torch.float64))]
    call = plain_call(query, key, value, False, terms=terms)
    weights = chunks.sdpa_by_chunks(call)
    torch.manual_seed(5)
    dropped, again = (chunks.sdpa_by_chunks(dataclasses.replace(call, dropout=rate)) for _ in range(2))
    torch.manual_seed(5)
    torch.testing.assert_close(chunks.sdpa_by_chunks(dataclasses.replace(call, dropout=rate)), dropped)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - rate))
    spread = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs((~kept).double().mean() - rate) < 5 * spread
    assert 0.3 < (kept != (again != 0)).double().mean() / (2 * rate * (1 - rate)) < 1.7
    by_query_and_head = kept.transpose(1, 2).flatten(0, 2)  # no two are dropped alike: chunks have their own
    assert len(by_query_and_head.unique(dim=0)) == len(by_query_and_head)


@pytest.mark.parametrize("inputs", [{}, {"position_ids": GAPS}], ids=["by slot", "gaps"])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "deberta", "shaw"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_dropout_is_the_same_when_layers_are_computed_again(architecture: str, scheme: str, inputs: Any) -> None:
    """Gradient checkpointing runs the forward a second time; the reentrant kind without gradients first."""
    name = {"bert": "attention_probs_dropout_prob", "gpt2": "attn_pdrop", "llama": "attention_dropout"}[architecture]
    gradients = []
    for reentrant, seed in ((None, 0), (False, 0), (True, 0), (True, 1)):
        model = tiny.model(architecture, scheme, **{name: 0.4}).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(seed)
        model(tiny.tokens(), use_cache=False, **inputs).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for again in gradients[1:3]:
        for parameter, gradient in gradients[0].items():
            torch.testing.assert_close(again[parameter], gradient, msg=lambda text, n=parameter: f"{n}: {text}")
    assert any((gradients[0][name] - gradients[3][name]).abs().max() > 1e-6 for name in gradients[0])


DENSE_BIAS = ("fire", "fire+alibi", "tupe-untied", "cope")
"""A number for each pair, of no form that could be computed by chunks."""


@pairs(["bert", "gpt2"], [case for case in SCORING if case.id not in DENSE_BIAS])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_nothing_of_queries_by_keys_is_built(
    case: Case, architecture: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for one head of four, where chunks are short: a quarter of that, for some queries of all heads."""
    names = [
        (strided, "CAUSAL_RUN"),
        (chunks, "QUERIES"),
        (chunks, "FEW_QUERIES"),
        (chunks, "COLUMNS"),
        (bands, "RUN"),
        (blocks, "RUN"),
    ]
    for module, name in names:
        monkeypatch.setattr(module, name, 32)
    length = 1024
    sizes = {"max_position_embeddings" if architecture == "bert" else "n_positions": length}
    model, ids = tiny.model(architecture, case.scheme, torch.float32, **sizes), tiny.tokens(1, length)
    with torch.set_grad_enabled(training), Largest(kept_together) as largest:
        output = model.base_model(ids, use_cache=False)[0]
        if training:
            output.sum().backward()
    assert largest.numbers <= length * length / 4
    model.set_attn_implementation("eager")  # the control: what must not be there would be seen
    with torch.no_grad(), Largest(kept_together) as largest:
        model.base_model(ids, use_cache=False)
    assert largest.numbers >= length * length
