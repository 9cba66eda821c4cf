"""The fast attention paths equal the dense one, forward and backward, also when inputs span several chunks."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc.attention import bands, chunked, dispatch, strided
from hf_posenc.attention.bands import key_products_by_distance, products_by_distance
from hf_posenc.attention.chunked import chunked_attention
from hf_posenc.attention.dense import dense_attention
from hf_posenc.attention.dispatch import AttentionCall
from hf_posenc.attention.strided import strided_attention
from hf_posenc.schemes.inputs import Content
from hf_posenc.schemes.terms import DistanceBias, DistanceTable, KeyTerm, QueryTerm, Separable, Term
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, Case, pairs
from tests.support.sampling import combinations
from tests.support.tensor_sizes import LargestTensor, storage_size

SCORE_CASES = [case for case in CASES if case.scores]
POSITIONS_WITH_GAPS = torch.tensor([[*range(6), *range(9, 15)], [*range(12)]])
DENSE_SCHEMES = ("fire", "fire+alibi", "tupe-untied", "cope")
"""Their terms have no form but a dense tensor."""


def set_chunk_sizes(
    monkeypatch: pytest.MonkeyPatch, causal: int, kernel: int, weights: int, key_term: int, tile: int
) -> None:
    monkeypatch.setattr(strided, "CAUSAL_CHUNK", causal)
    monkeypatch.setattr(chunked, "KERNEL_CHUNK", kernel)
    monkeypatch.setattr(chunked, "WEIGHTS_CHUNK", weights)
    monkeypatch.setattr(chunked, "KEY_TERM_CHUNK", key_term)
    monkeypatch.setattr(bands, "TILE_ROWS", tile)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that the inputs of these tests take several, the last one incomplete."""
    set_chunk_sizes(monkeypatch, causal=5, kernel=7, weights=6, key_term=5, tile=4)
    monkeypatch.setattr(dispatch, "HEADS_PER_CHUNK", 3)


def logits_and_gradients(model: Any, ids: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    logits = model(ids, use_cache=False, **inputs).logits
    logits = logits[inputs.get("attention_mask", torch.ones_like(ids)).bool()]
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weights).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pairs(ARCHITECTURES, SCORE_CASES, padding=["none", "left", "right", "both", "full row"])
@pytest.mark.usefixtures("small_chunks")
def test_sdpa_paths_equal_eager(case: Case, architecture: str, padding: str) -> None:
    # Stock eager LLaMA gives NaN for padding rows in float64.
    dtype = torch.float32 if architecture == "llama" and padding != "none" else torch.float64
    model, ids = tiny.model(architecture, case.scheme, dtype), tiny.tokens(3, 17)
    mask = torch.ones_like(ids)
    mask[1, : 6 if padding in ("left", "both") else 0] = 0
    mask[2, 12 if padding in ("right", "both") else 17 :] = 0
    mask[0, : 17 if padding == "full row" else 0] = 0
    inputs = {} if padding == "none" else {"attention_mask": mask}
    tolerances = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else oracles.tolerance(architecture)}
    logits, gradients = logits_and_gradients(model, ids, **inputs)
    with torch.no_grad():
        inference_logits = model(ids, use_cache=False, **inputs).logits[mask.bool()]
    model.set_attn_implementation("eager")
    expected_logits, expected_gradients = logits_and_gradients(model, ids, **inputs)
    torch.testing.assert_close(logits, expected_logits, **tolerances)
    torch.testing.assert_close(inference_logits, expected_logits, **tolerances)
    for name, expected in expected_gradients.items():
        if expected is not None:
            scale = expected.abs().max().clamp(min=1)
            difference = (gradients[name] - expected).abs().max() / scale
            assert difference <= tolerances["atol"], name


@pairs(["gpt2", "llama"], SCORE_CASES)
@pytest.mark.usefixtures("small_chunks")
def test_chunks_after_a_cache_equal_the_full_forward(case: Case, architecture: str) -> None:
    """More keys than queries."""
    model, ids, cache = tiny.model(architecture, case.scheme), tiny.tokens(2, 23), DynamicCache()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        first = model(ids[:, :9], past_key_values=cache).logits
        second = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, second], 1), expected, **tiny.tolerances(architecture))


@pairs(["bert", "llama"], SCORE_CASES)
@pytest.mark.usefixtures("small_chunks")
def test_head_chunks_equal_eager(case: Case, architecture: str) -> None:
    """Positions with gaps, without gradients; and a mask that differs per head."""
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 12)
    visible = torch.ones(2, tiny.HEADS, 12, 12, dtype=torch.bool)
    for head in range(tiny.HEADS):
        visible[:, head, :, 1 + head] = False
    visible &= torch.ones(12, 12, dtype=torch.bool).tril() | (architecture == "bert")
    for inputs in (
        {"position_ids": POSITIONS_WITH_GAPS},
        {"position_ids": POSITIONS_WITH_GAPS[:1]},
        {"attention_mask": tiny.additive_mask(visible)},
    ):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(ids, use_cache=False, **inputs).logits
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            logits = model(ids, use_cache=False, **inputs).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=oracles.tolerance(architecture))


@pytest.mark.parametrize("scheme", ["alibi", "t5", "deberta"])
def test_mask_longer_than_the_input(scheme: str) -> None:
    """A mask of all slots of a static cache, filled or not."""
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 12)
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask[:, :12], use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits[:, 3:], expected[:, 3:], **tiny.tolerances("gpt2"))


def attention_call(query: Any, key: Any, value: Any, causal: bool, **changes: Any) -> AttentionCall:
    """An attention outside of any model, without terms unless they are given."""

    def stock(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float) -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2), None

    fields = {
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
        "value_tables": [],
        "positions": types.SimpleNamespace(dtype=query.dtype, uniform=True, key_length=key.shape[2]),
        "content": Content(query, query, key, 0.7, lambda: None, lambda states: None),  # type: ignore[arg-type]
        "stock_kwargs": {},
    }
    return AttentionCall(**{**fields, **changes})


def test_separable_term_shared_by_all_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    queries, keys = (torch.randn(1, 1, 6, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(4, 11, generator=generator, dtype=torch.float64)
    attention = attention_call(query, key, value, False, terms=[Separable(queries, keys), DistanceBias(bias)])
    torch.testing.assert_close(chunked_attention(attention)[0], dense_attention(attention)[0])


def test_band_products_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_queries, num_keys in ((1, 1), (1, 9), (3, 9), (9, 9), (300, 310), (9, 4)):
        query, key = (torch.randn(2, 2, size, 3, generator=generator) for size in (num_queries, num_keys))
        rows = torch.randn(2, num_queries + num_keys - 1, 3, generator=generator)
        query_products = products_by_distance(query, rows, num_keys)
        key_products = key_products_by_distance(key, rows, num_queries)
        for i in {0, num_queries // 2, num_queries - 1}:
            for j in {0, num_keys // 2, num_keys - 1}:
                row = rows[:, j - i + num_queries - 1]
                torch.testing.assert_close(query_products[:, :, i, j], (query[:, :, i] * row).sum(-1))
                torch.testing.assert_close(key_products[:, :, i, j], (key[:, :, j] * row).sum(-1))
        if num_queries * num_keys > 1:  # control: rows in the wrong order
            assert (products_by_distance(query, rows.flip(1), num_keys) - query_products).abs().max() > 1e-2


@combinations(causal=[True, False], num_key_heads=[4, 2, 1])
@pytest.mark.usefixtures("small_chunks")
def test_gradient_of_a_strided_bias(causal: bool, num_key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = 7, 7 if causal else 9
    key_shape = (2, num_key_heads, num_keys, 3)
    shapes = [(2, 4, num_queries, 3), key_shape, key_shape, (4, num_queries + num_keys - 1)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(query: Any, key: Any, value: Any, values: Any) -> torch.Tensor:
        return strided_attention(attention_call(query, key, value, causal, terms=[DistanceBias(values)]))[0]

    assert "_ChunkedAttention" in attend(*inputs).grad_fn.next_functions[0][0].name()
    assert torch.autograd.gradcheck(attend, inputs)


FAST_GRADIENTS = [(True, 4, 2, 0.0), (True, 2, 99, 0.3), (False, 2, 99, 0.0), (False, 1, 2, 0.3)]


def all_term_types(tensors: list[torch.Tensor], index: torch.Tensor) -> dict[str, Any]:
    key_rows, query_rows, value_rows, values, queries, keys, dense, dense_row = tensors
    terms: list[Term] = [
        KeyTerm(DistanceTable(key_rows, index)),
        QueryTerm(DistanceTable(query_rows, index)),
        DistanceBias(values),
        Separable(queries, keys),
        dense,
        dense_row,
    ]
    return {"terms": terms, "value_tables": [DistanceTable(value_rows, index)]}


# `make test` runs every value, and every pair of dropout and causal.
@pytest.mark.parametrize(
    ("causal", "num_key_heads", "clip", "dropout"),
    [
        pytest.param(
            causal,
            num_key_heads,
            clip,
            dropout,
            id=f"{'causal' if causal else 'bidirectional'}-{num_key_heads}-{clip}-{dropout}",
            marks=[] if (causal, num_key_heads, clip, dropout) in FAST_GRADIENTS else [pytest.mark.slow],
        )
        for causal in (True, False)
        for num_key_heads in (4, 2, 1)
        for clip in (2, 99)  # clipped distances, one row per distance
        for dropout in (0.0, 0.3)
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_gradients_of_all_term_types(causal: bool, num_key_heads: int, clip: int, dropout: float) -> None:
    """All at once: several chunks and tiles, shared heads, terms shared by the batch, dropout."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = 9, 9 if causal else 11
    distances = torch.arange(num_queries + num_keys - 1) - (num_queries - 1)
    index = distances.clamp(-clip, clip) + min(clip, num_queries - 1)
    shapes = [(2, 4, num_queries, 3), (2, num_key_heads, num_keys, 3), (2, num_key_heads, num_keys, 3)]
    shapes += [(4, 32, 3), (1, 32, 3), (1, 32, 3), (4, num_queries + num_keys - 1), (1, 4, num_queries, 2)]
    shapes += [(2, 4, num_keys, 2), (1, 4, num_queries, num_keys), (2, 4, 1, num_keys)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(query: Any, key: Any, value: Any, *tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        terms = all_term_types(list(tensors), index)
        return chunked_attention(attention_call(query, key, value, causal, dropout=dropout, **terms))[0]

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    if not dropout:
        attention = attention_call(*inputs[:3], causal, **all_term_types(inputs[3:], index))
        expected = dense_attention(attention)[0]
        torch.testing.assert_close(attend(*inputs), expected)
        wrong = attend(*inputs[:3], inputs[3].flip(1), *inputs[4:])  # control: a table in the wrong order
        assert (wrong - expected).abs().max() > 1e-2


@pairs(
    ["bert", "gpt2", "llama"],
    [case for case in SCORE_CASES if case.id in ("t5", "kerple", "shaw", "transformer_xl", "tupe", "deberta", "cope")],
)
@pytest.mark.usefixtures("small_chunks")
def test_half_precision_gradients_equal_float32(case: Case, architecture: str) -> None:
    gradients = []
    for dtype, autocast, use_cache in (
        (torch.float32, False, False),
        (torch.bfloat16, False, False),
        (torch.float32, True, False),
        (torch.float32, True, True),
    ):
        model = tiny.model(architecture, case.scheme, torch.bfloat16).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tiny.tokens(4, 16), use_cache=use_cache).logits
        logits.float().square().mean().backward()
        parameters = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
        gradients.append(torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None]))
    assert gradients[0].norm() > 0
    for gradient in gradients[1:]:
        assert gradient.isfinite().all()
        assert (gradient - gradients[0]).norm() < 0.1 * gradients[0].norm()


def test_long_sums_are_not_rounded_to_half_precision() -> None:
    """Rows that all far keys share, and the mean over a row of weights: summed in bfloat16, errors are 2 to 5%."""
    length, index = 300, (torch.arange(599) - 299).clamp(-4, 4) + 4

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype)

        query, key, value = (random(2, 4, length, 16) for _ in range(3))
        tables = [random(4, 9, 16).requires_grad_() for _ in range(2)]
        bias = random(4, 2 * length - 1, dtype=torch.float32).requires_grad_()
        terms = [QueryTerm(DistanceTable(tables[0], index)), KeyTerm(DistanceTable(tables[1], index))]
        output = chunked_attention(attention_call(query, key, value, True, terms=[*terms, DistanceBias(bias)]))[0]
        (output * random(2, length, 4, 16)).float().sum().backward()
        return [leaf.grad.float() for leaf in (*tables, bias) if leaf.grad is not None]

    for narrow, wide in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert (narrow - wide).norm() < 0.013 * wide.norm()


@pytest.mark.usefixtures("small_chunks")
def test_dropout_rate_and_scale() -> None:
    """With unit vectors as values, the output is the weights themselves."""
    generator, length, rate = torch.Generator().manual_seed(0), 31, 0.25
    query, key = (torch.randn(2, 4, length, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    value = torch.eye(length, dtype=torch.float64).expand(2, 4, -1, -1)
    bias = DistanceBias(torch.randn(4, 2 * length - 1, generator=generator, dtype=torch.float64))
    attention = attention_call(query, key, value, False, terms=[bias])
    with_dropout = dataclasses.replace(attention, dropout=rate)
    weights = chunked_attention(attention)[0]
    torch.manual_seed(5)
    dropped, other_seed = (chunked_attention(with_dropout)[0] for _ in range(2))
    torch.manual_seed(5)
    torch.testing.assert_close(chunked_attention(with_dropout)[0], dropped)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - rate))
    deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs((~kept).double().mean() - rate) < 5 * deviation
    assert 0.3 < (kept != (other_seed != 0)).double().mean() / (2 * rate * (1 - rate)) < 1.7
    rows = kept.transpose(1, 2).flatten(0, 2)  # every chunk has its own seed, so no two rows are dropped alike
    assert len(rows.unique(dim=0)) == len(rows)


@combinations(gaps=[False, True], architecture=["bert", "gpt2", "llama"], scheme=["alibi", "t5", "deberta", "shaw"])
def test_dropout_under_gradient_checkpointing(gaps: bool, architecture: str, scheme: str) -> None:
    """Checkpointing runs the forward pass twice; the reentrant kind without gradients first."""
    option = {"bert": "attention_probs_dropout_prob", "gpt2": "attn_pdrop", "llama": "attention_dropout"}[architecture]
    gradients, inputs = [], {"position_ids": POSITIONS_WITH_GAPS} if gaps else {}
    for use_reentrant, seed in ((None, 0), (False, 0), (True, 0), (True, 1)):
        model = tiny.model(architecture, scheme, **{option: 0.4}).train()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(seed)
        model(tiny.tokens(), use_cache=False, **inputs).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    expected, *checkpointed, other_seed = gradients
    for gradient in checkpointed:
        torch.testing.assert_close(gradient, expected)
    assert any((other_seed[name] - expected[name]).abs().max() > 1e-6 for name in expected)


@pairs(
    ["bert", "gpt2"],
    [case for case in SCORE_CASES if case.id not in DENSE_SCHEMES],
    fast_cases=["alibi", "t5", "shaw", "transformer_xl", "tupe", "deberta"],
    mode=["inference", "training"],
)
def test_no_path_builds_a_quadratic_tensor(
    case: Case, architecture: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small chunks, no tensor exceeds a quarter of the Q x K of one head."""
    set_chunk_sizes(monkeypatch, causal=16, kernel=16, weights=16, key_term=16, tile=32)
    length = 512
    sizes = {"max_position_embeddings" if architecture == "bert" else "n_positions": length}
    model, ids = tiny.model(architecture, case.scheme, torch.float32, **sizes), tiny.tokens(1, length)
    with torch.set_grad_enabled(mode == "training"), LargestTensor(storage_size) as largest:
        output = model.base_model(ids, use_cache=False)[0]
        if mode == "training":
            output.sum().backward()
    assert largest.numbers <= length * length / 4
    model.set_attn_implementation("eager")  # control: dense attention is seen
    with torch.no_grad(), LargestTensor(storage_size) as largest:
        model.base_model(ids, use_cache=False)
    assert largest.numbers >= length * length


def test_attentions_of_all_layers_or_none() -> None:
    """Some paths compute weights and some do not: SDPA returns none from any layer, eager from all."""
    scheme = [{"type": "shaw", "max_distance": 4, "layers": [0, 2]}, {"type": "alibi", "layers": [1]}]
    model = tiny.model("gpt2", scheme, torch.float32)
    assert not [weights for weights in model(tiny.tokens(), output_attentions=True).attentions if weights is not None]
    model.set_attn_implementation("eager")
    assert len(model(tiny.tokens(), output_attentions=True).attentions) == tiny.LAYERS
