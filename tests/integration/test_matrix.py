"""What must hold for every scheme on every architecture: caches, padding, packing, positions, backends, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc.attention import strided
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, DECODERS, Case, pairs
from tests.support.large_configs import Largest

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
by_pair, by_decoder_pair = pairs(ARCHITECTURES), pairs(DECODERS)


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def differs(model: Any, changed: Any, ids: torch.Tensor) -> bool:
    return (logits(model, ids) - logits(changed, ids)).abs().max().item() > 1e-3


def make_cache(model: Any, kind: str, length: int) -> Any:
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=length)


def padded_model(architecture: str, case: Case, backend: str) -> Any:
    """In float32 for LLaMA's eager attention, whose float32 softmax turns the padding of a float64 mask into NaN."""
    dtype = torch.float32 if architecture == "llama" and backend == "eager" else torch.float64
    model = tiny.model(architecture, case.scheme, dtype)
    model.set_attn_implementation(backend)
    return model


@pairs(ARCHITECTURES, [case for case in CASES if case.id != "none"])
def test_scheme_acts(case: Case, architecture: str) -> None:
    """The control of all the tests below: taking the scheme away changes the logits."""
    assert differs(tiny.model(architecture, case.scheme), tiny.model(architecture, "none"), tiny.tokens())


@by_decoder_pair
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_cached_decoding_equals_full_forward(case: Case, architecture: str, kind: str, backend: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 14)
    model.set_attn_implementation(backend)
    full = logits(model, ids, use_cache=False)
    cache = make_cache(model, kind, 20)
    steps = [logits(model, ids[:, :5], past_key_values=cache, use_cache=True)]
    for start, stop in [(5, 6), (6, 7), (7, 10), (10, 11), (11, 12), (12, 13), (13, 14)]:
        steps.append(logits(model, ids[:, start:stop], past_key_values=cache, use_cache=True))
    torch.testing.assert_close(torch.cat(steps, 1), full, **tiny.same(architecture))


@by_decoder_pair
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_left_padded_cached_decoding_equals_each_row_alone(case: Case, architecture: str, kind: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 10)
    padded = torch.cat([torch.full((2, 3), tiny.PAD), ids], 1)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    padded[1] = torch.cat([tiny.tokens(1, 3, seed=5)[0], ids[1]])
    cache = make_cache(model, kind, 16)
    outputs = [logits(model, padded[:, :6], attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)]
    for stop in range(7, 14):
        step = padded[:, stop - 1 : stop]
        # Half of the steps give positions, as generate() does, and half leave them to be found.
        explicit = {"position_ids": mask[:, :stop].cumsum(-1)[:, -1:] - 1} if stop % 2 else {}
        outputs.append(
            logits(model, step, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True, **explicit)
        )
    together = torch.cat(outputs, 1)
    torch.testing.assert_close(together[0, 3:], logits(model, padded[:1, 3:])[0], **tiny.same(architecture))
    torch.testing.assert_close(together[1], logits(model, padded[1:])[0], **tiny.same(architecture))


@by_decoder_pair
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("explicit", [False, True], ids=["", "position_ids"])
def test_chunked_prefill_that_begins_in_padding(case: Case, architecture: str, kind: str, explicit: bool) -> None:
    """The first query of a later chunk may be padding: the places of cached keys must not be counted from it."""
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model, kind, 16)
    steps = []
    for start, stop in ((0, 3), (3, 7), (7, 11), (11, 12)):
        inputs = {"position_ids": places[:, start:stop]} if explicit else {}
        chunk = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True, **inputs}
        steps.append(logits(model, ids[:, start:stop], **chunk))
    together = torch.cat(steps, 1)
    torch.testing.assert_close(together[0, 5:], logits(model, ids[:1, 5:])[0], **tiny.same(architecture))
    torch.testing.assert_close(together[1], logits(model, ids[1:])[0], **tiny.same(architecture))


@by_decoder_pair
def test_an_empty_cache_is_a_cache(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens()
    found = logits(model, ids, past_key_values=DynamicCache(), use_cache=True)
    torch.testing.assert_close(found, logits(model, ids, use_cache=False), **tiny.same(architecture))


@by_pair
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("explicit", [False, True], ids=["", "position_ids"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_padded_rows_equal_each_row_alone(
    case: Case, architecture: str, side: str, explicit: bool, backend: str
) -> None:
    model, short, long = padded_model(architecture, case, backend), tiny.tokens(1, 7), tiny.tokens(1, 11, seed=1)
    filler, ones = torch.full((1, 4), tiny.PAD), torch.ones(1, 7, dtype=torch.long)
    parts = [filler, short] if side == "left" else [short, filler]
    masks = [filler * 0, ones] if side == "left" else [ones, filler * 0]
    batch = torch.cat([torch.cat(parts, 1), long])
    mask = torch.cat([torch.cat(masks, 1), torch.ones(1, 11, dtype=torch.long)])
    inputs = {"attention_mask": mask}
    if explicit:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    output = logits(model, batch, **inputs)
    row = output[0, 4:] if side == "left" else output[0, :7]
    torch.testing.assert_close(row, logits(model, short)[0], **tiny.same(architecture))
    torch.testing.assert_close(output[1], logits(model, long)[0], **tiny.same(architecture))


@by_pair
@pytest.mark.parametrize("use_cache", [False, None], ids=["no-cache", "default"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_packed_documents_equal_each_alone(case: Case, architecture: str, use_cache: Any, backend: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 12)
    model.set_attn_implementation(backend)
    cuts = [[(0, 4), (4, 5), (5, 12)], [(0, 6), (6, 11), (11, 12)]]
    positions = torch.stack([torch.cat([torch.arange(stop - start) for start, stop in row]) for row in cuts])
    output = logits(model, ids, position_ids=positions, use_cache=use_cache)
    for row, spans in enumerate(cuts):
        for start, stop in spans:
            alone = logits(model, ids[row : row + 1, start:stop])[0]
            torch.testing.assert_close(output[row, start:stop], alone, **tiny.same(architecture))


@by_pair
def test_packed_and_padded_documents_equal_each_alone(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(1, 12)
    for positions, mask, documents in (
        ([0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [(2, 6), (6, 11)]),
        ([0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], [(0, 4), (6, 12)]),
    ):
        inputs = {"position_ids": torch.tensor([positions]), "attention_mask": torch.tensor([mask])}
        output = logits(model, ids, **inputs)
        for start, stop in documents:
            alone = logits(model, ids[:, start:stop])[0]
            torch.testing.assert_close(output[0, start:stop], alone, **tiny.same(architecture))


@by_decoder_pair
def test_packed_documents_in_a_static_cache_equal_each_alone(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    output = logits(model, ids, position_ids=positions, past_key_values=make_cache(model, "static", 20), use_cache=True)
    torch.testing.assert_close(output[0, :5], logits(model, ids[:, :5])[0], **tiny.same(architecture))
    torch.testing.assert_close(output[0, 5:], logits(model, ids[:, 5:])[0], **tiny.same(architecture))


@pairs(["gpt2", "llama"], [case for case in CASES if not case.causal])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_decoder_can_be_told_to_look_both_ways(case: Case, architecture: str, backend: str) -> None:
    """`is_causal=False` in the config: the last token then reaches the first, as it does in the stock model."""
    model, ids = tiny.model(architecture, case.scheme, is_causal=False), tiny.tokens()
    model.set_attn_implementation(backend)
    changed = ids.clone()
    changed[:, -1] = 3 + (changed[:, -1] - 2) % (tiny.VOCABULARY - 3)
    assert (logits(model, ids)[:, 0] - logits(model, changed)[:, 0]).abs().max() > 1e-4


@by_pair
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_gaps_in_positions_are_honoured(case: Case, architecture: str, masked: bool, backend: str) -> None:
    """A skip of positions stands for tokens that are not there: the same as having them and masking them out."""
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 16)
    model.set_attn_implementation(backend)
    kept = torch.tensor([0, 1, 2, 3, 4, 9, 10, 11, 15])
    visible = torch.zeros(16, dtype=torch.bool)
    visible[kept] = True
    causal = (
        torch.ones(16, 16, dtype=torch.bool) if architecture == "bert" else torch.ones(16, 16, dtype=torch.bool).tril()
    )
    whole_mask = (causal & visible)[None, None].expand(2, 1, -1, -1)
    if backend == "eager":
        whole_mask = tiny.additive(whole_mask)
    whole = logits(model, ids, attention_mask=whole_mask)
    inputs = {"attention_mask": torch.ones(2, len(kept), dtype=torch.long)} if masked else {}
    skipped = logits(model, ids[:, kept], position_ids=kept[None].expand(2, -1), **inputs)
    torch.testing.assert_close(skipped, whole[:, kept], **tiny.same(architecture))


@by_pair
def test_eager_equals_sdpa(case: Case, architecture: str) -> None:
    model, ids = padded_model(architecture, case, "eager"), tiny.tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    eager, eager_padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(model, ids), eager, **tiny.same(architecture))
    torch.testing.assert_close(
        logits(model, ids, attention_mask=mask)[1, 5:], eager_padded[1, 5:], **tiny.same(architecture)
    )


def has_parameters(case: Case, architecture: str) -> bool:
    """Whether a case brings parameters of its own, read off what its options say."""
    fixed = ("sinusoidal", "polynomial", "exponential", "rope", "xpos", "sandwich", "none")
    for item in case.scheme if isinstance(case.scheme, list) else [case.scheme]:
        item = {"type": item} if isinstance(item, str) else item
        mixed = item.get("mix", "add") != "add"
        own = {"alibi": item.get("learned", False), "learned": architecture == "llama"}.get(item["type"])
        if mixed or (item["type"] not in fixed if own is None else own):
            return True
    return False


@by_pair
def test_gradients_of_eager_equal_sdpa(case: Case, architecture: str) -> None:
    """The strided bias of the fast path and the dense one give the same gradients to every parameter."""
    gradients = []
    for backend in ("eager", "sdpa"):
        model = tiny.model(architecture, case.scheme)
        model.set_attn_implementation(backend)
        model.train()(tiny.tokens(2, 13)).logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    parameters = {name for name in gradients[0] if "position_scheme" in name}
    assert bool(parameters) == has_parameters(case, architecture)
    for name, gradient in gradients[0].items():
        if gradient is None:
            assert gradients[1][name] is None
            continue
        torch.testing.assert_close(
            gradient, gradients[1][name], **tiny.same(architecture), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_the_strided_bias_is_what_sdpa_runs_on(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tests above would pass if the fast path were never taken. It is, and the order of its rows counts."""
    model, ids = tiny.model(architecture, "alibi"), tiny.tokens(2, 13)
    expected, calls, view = logits(model, ids), [], strided.rows_by_falling_query

    def watched(values: torch.Tensor, num_keys: int) -> torch.Tensor:
        rows = view(values, num_keys)
        calls.append(rows)
        return rows

    monkeypatch.setattr(strided, "rows_by_falling_query", watched)
    assert torch.equal(logits(model, ids), expected)
    assert len(calls) == tiny.LAYERS
    assert all(rows.stride()[-2:] == (1, 1) and rows.untyped_storage().size() == 8 * 4 * 25 for rows in calls)
    monkeypatch.setattr(strided, "rows_by_falling_query", lambda values, keys: view(values, keys).flip(-2))
    assert (logits(model, ids) - expected).abs().nan_to_num(1.0).max() > 1e-3


@by_pair
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_gradient_checkpointing_changes_no_gradient(case: Case, architecture: str, reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny.model(architecture, case.scheme).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(tiny.tokens(2, 13), use_cache=False).logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradient, gradients[1][name], **tiny.same(architecture), msg=lambda text, n=name: f"{n}: {text}"
        )


@by_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_positions_are_not_narrowed_with_the_model(case: Case, architecture: str, dtype: torch.dtype) -> None:
    """In half precision, far positions give what the same half-precision weights give in float64, to rounding.

    The control computes with the positions rounded to the model's dtype, which tells no neighbours apart at 5,000.
    """
    narrow = tiny.model(architecture, case.scheme, dtype)
    wide = tiny.model(architecture, case.scheme, dtype).to(torch.float64)
    first = 5000 if case.extends else tiny.TRAINED_LENGTH - 12
    ids, positions = tiny.tokens(1, 12), torch.arange(first, first + 12)[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask = mask if architecture == "bert" else mask.tril()
    true = logits(wide, ids, position_ids=positions, attention_mask=mask)
    rounding = (logits(narrow, ids, position_ids=positions, attention_mask=mask).double() - true).abs().mean()
    coarse = (logits(wide, ids, position_ids=positions.to(dtype).long(), attention_mask=mask) - true).abs().mean()
    assert rounding < 0.02 * true.abs().mean()
    if case.extends and not (case.id in ("none", "fire") or case.contextual or case.settles):
        # Fire: so far out, distances relative to the position differ by too little.
        assert rounding < 0.5 * coarse


@by_pair
def test_runs_past_the_trained_length_or_says_why_not(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(1, tiny.TRAINED_LENGTH + 9)
    if case.extends:
        output = logits(model, ids)
        assert output.shape[1] == ids.shape[1]
        assert output.isfinite().all()
        return
    for inputs in ({}, {"position_ids": torch.arange(ids.shape[1])[None]}):
        with pytest.raises(
            ValueError, match=rf"length {ids.shape[1]}.*table serves {tiny.TRAINED_LENGTH} positions.*rope"
        ):
            logits(model, ids, **inputs)


@by_decoder_pair
def test_no_future_leaks(case: Case, architecture: str) -> None:
    """Output i has no gradient to inputs after i."""
    model = tiny.model(architecture, case.scheme)
    embeddings = model.get_input_embeddings()(tiny.tokens(1, 9)).detach().requires_grad_()
    output = model(inputs_embeds=embeddings).logits
    for place in (0, 4, 7):
        (gradient,) = torch.autograd.grad(output[0, place].sum(), embeddings, retain_graph=True)
        assert gradient[0, place + 1 :].abs().max() == 0
        assert gradient[0, : place + 1].abs().min(-1).values.max() > 0


@by_pair
def test_nothing_of_queries_by_keys_by_width_is_built(case: Case, architecture: str) -> None:
    """At most two numbers for each head, query and key (queries by all distances), where a head is 8 wide."""
    length = tiny.TRAINED_LENGTH
    square = tiny.HEADS * length * length
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(1, length)
    for inputs in ({}, {"position_ids": (torch.arange(length) % 29)[None]}):
        with Largest(torch.Tensor.numel) as largest:
            model(ids, use_cache=False, **inputs).logits.sum().backward()
        assert largest.numbers <= 2 * square
    with Largest(torch.Tensor.numel) as largest:  # the control: what must not be there would be seen
        torch.zeros(tiny.HEADS, length, 1, 8) * torch.zeros(length, 8)
    assert largest.numbers > 2 * square


@by_case
def test_all_key_heads_equal_to_grouped_ones(case: Case) -> None:
    """Grouped-query attention gives what the same model with its key heads written out gives."""
    grouped = tiny.model("llama", case.scheme)
    whole = tiny.model("llama", case.scheme, num_key_value_heads=tiny.HEADS)
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].view(2, -1, tiny.WIDTH)
            state[name] = heads.repeat_interleave(2, 0).reshape(-1, tiny.WIDTH)
    whole.load_state_dict(state)
    ids = tiny.tokens(2, 13)
    torch.testing.assert_close(logits(grouped, ids), logits(whole, ids), **tiny.same("llama"))
