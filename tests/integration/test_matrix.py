"""Invariants of every scheme on every architecture: caches, padding, packing, positions, backends, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc.attention import strided
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, DECODERS, Case, pairs
from tests.support.tensor_sizes import LargestTensor


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def differs(model: Any, changed: Any, ids: torch.Tensor) -> bool:
    return (logits(model, ids) - logits(changed, ids)).abs().max().item() > 1e-3


def make_cache(model: Any, kind: str, length: int) -> Any:
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=length)


def padded_model(architecture: str, case: Case, backend: str) -> Any:
    """float32 for LLaMA's eager attention: its float32 softmax turns the padding of a float64 mask into NaN."""
    dtype = torch.float32 if architecture == "llama" and backend == "eager" else torch.float64
    model = tiny.model(architecture, case.scheme, dtype)
    model.set_attn_implementation(backend)
    return model


@pairs(ARCHITECTURES, [case for case in CASES if case.id != "none"])
def test_scheme_changes_the_logits(case: Case, architecture: str) -> None:
    """The control for all tests below: without the scheme the logits are different."""
    assert differs(tiny.model(architecture, case.scheme), tiny.model(architecture, "none"), tiny.tokens())


@pairs(DECODERS, kind=["dynamic", "static"], backend=["sdpa", "eager"])
def test_cached_decoding_equals_full_forward(case: Case, architecture: str, kind: str, backend: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 14)
    model.set_attn_implementation(backend)
    full = logits(model, ids, use_cache=False)
    cache = make_cache(model, kind, 20)
    steps = [logits(model, ids[:, :5], past_key_values=cache, use_cache=True)]
    for start, stop in [(5, 6), (6, 7), (7, 10), (10, 11), (11, 12), (12, 13), (13, 14)]:
        steps.append(logits(model, ids[:, start:stop], past_key_values=cache, use_cache=True))
    torch.testing.assert_close(torch.cat(steps, 1), full, **tiny.tolerances(architecture))


@pairs(DECODERS, kind=["dynamic", "static"])
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
        # Half of the steps pass position_ids, as generate() does; in the others the model derives them.
        explicit = {"position_ids": mask[:, :stop].cumsum(-1)[:, -1:] - 1} if stop % 2 else {}
        outputs.append(
            logits(model, step, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True, **explicit)
        )
    together = torch.cat(outputs, 1)
    torch.testing.assert_close(together[0, 3:], logits(model, padded[:1, 3:])[0], **tiny.tolerances(architecture))
    torch.testing.assert_close(together[1], logits(model, padded[1:])[0], **tiny.tolerances(architecture))


@pairs(DECODERS, kind=["dynamic", "static"], explicit=[False, True])
def test_chunked_prefill_starting_inside_padding(case: Case, architecture: str, kind: str, explicit: bool) -> None:
    """The first query of a later chunk may be padding, so cached positions must not be counted from it."""
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model, kind, 16)
    steps = []
    for start, stop in ((0, 3), (3, 7), (7, 11), (11, 12)):
        inputs = {"position_ids": positions[:, start:stop]} if explicit else {}
        chunk = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True, **inputs}
        steps.append(logits(model, ids[:, start:stop], **chunk))
    together = torch.cat(steps, 1)
    torch.testing.assert_close(together[0, 5:], logits(model, ids[:1, 5:])[0], **tiny.tolerances(architecture))
    torch.testing.assert_close(together[1], logits(model, ids[1:])[0], **tiny.tolerances(architecture))


@pairs(DECODERS)
def test_an_empty_cache_changes_nothing(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens()
    cached = logits(model, ids, past_key_values=DynamicCache(), use_cache=True)
    torch.testing.assert_close(cached, logits(model, ids, use_cache=False), **tiny.tolerances(architecture))


@pairs(ARCHITECTURES, side=["left", "right"], explicit=[False, True], backend=["sdpa", "eager"])
def test_padded_rows_equal_each_row_alone(
    case: Case, architecture: str, side: str, explicit: bool, backend: str
) -> None:
    model, short, long = padded_model(architecture, case, backend), tiny.tokens(1, 7), tiny.tokens(1, 11, seed=1)
    filler, ones = torch.full((1, 4), tiny.PAD), torch.ones(1, 7, dtype=torch.long)
    ids = [filler, short] if side == "left" else [short, filler]
    masks = [filler * 0, ones] if side == "left" else [ones, filler * 0]
    batch = torch.cat([torch.cat(ids, 1), long])
    mask = torch.cat([torch.cat(masks, 1), torch.ones(1, 11, dtype=torch.long)])
    inputs = {"attention_mask": mask}
    if explicit:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    output = logits(model, batch, **inputs)
    row = output[0, 4:] if side == "left" else output[0, :7]
    torch.testing.assert_close(row, logits(model, short)[0], **tiny.tolerances(architecture))
    torch.testing.assert_close(output[1], logits(model, long)[0], **tiny.tolerances(architecture))


@pairs(ARCHITECTURES, use_cache=[False, None], backend=["sdpa", "eager"])
def test_packed_documents_equal_each_alone(case: Case, architecture: str, use_cache: Any, backend: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 12)
    model.set_attn_implementation(backend)
    cuts = [[(0, 4), (4, 5), (5, 12)], [(0, 6), (6, 11), (11, 12)]]
    positions = torch.stack([torch.cat([torch.arange(stop - start) for start, stop in row]) for row in cuts])
    output = logits(model, ids, position_ids=positions, use_cache=use_cache)
    for row, spans in enumerate(cuts):
        for start, stop in spans:
            alone = logits(model, ids[row : row + 1, start:stop])[0]
            torch.testing.assert_close(output[row, start:stop], alone, **tiny.tolerances(architecture))


@pairs(ARCHITECTURES)
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
            torch.testing.assert_close(output[0, start:stop], alone, **tiny.tolerances(architecture))


@pairs(DECODERS)
def test_packed_documents_in_a_static_cache_equal_each_alone(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    output = logits(model, ids, position_ids=positions, past_key_values=make_cache(model, "static", 20), use_cache=True)
    torch.testing.assert_close(output[0, :5], logits(model, ids[:, :5])[0], **tiny.tolerances(architecture))
    torch.testing.assert_close(output[0, 5:], logits(model, ids[:, 5:])[0], **tiny.tolerances(architecture))


@pairs(["gpt2", "llama"], [case for case in CASES if not case.causal], backend=["sdpa", "eager"])
def test_is_causal_false_makes_a_decoder_bidirectional(case: Case, architecture: str, backend: str) -> None:
    """With `is_causal=False` in the config, the last token influences the first, as in the stock model."""
    model, ids = tiny.model(architecture, case.scheme, is_causal=False), tiny.tokens()
    model.set_attn_implementation(backend)
    changed = ids.clone()
    changed[:, -1] = 3 + (changed[:, -1] - 2) % (tiny.VOCABULARY - 3)
    assert (logits(model, ids)[:, 0] - logits(model, changed)[:, 0]).abs().max() > 1e-4


@pairs(ARCHITECTURES, masked=[False, True], backend=["sdpa", "eager"])
def test_gaps_in_position_ids_equal_masked_tokens(case: Case, architecture: str, masked: bool, backend: str) -> None:
    """Skipping positions is the same as keeping those tokens and masking them out."""
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(2, 16)
    model.set_attn_implementation(backend)
    kept = torch.tensor([0, 1, 2, 3, 4, 9, 10, 11, 15])
    visible = torch.zeros(16, dtype=torch.bool)
    visible[kept] = True
    causal = (
        torch.ones(16, 16, dtype=torch.bool) if architecture == "bert" else torch.ones(16, 16, dtype=torch.bool).tril()
    )
    full_mask = (causal & visible)[None, None].expand(2, 1, -1, -1)
    if backend == "eager":
        full_mask = tiny.additive_mask(full_mask)
    full = logits(model, ids, attention_mask=full_mask)
    inputs = {"attention_mask": torch.ones(2, len(kept), dtype=torch.long)} if masked else {}
    skipped = logits(model, ids[:, kept], position_ids=kept[None].expand(2, -1), **inputs)
    torch.testing.assert_close(skipped, full[:, kept], **tiny.tolerances(architecture))


@pairs(ARCHITECTURES)
def test_eager_equals_sdpa(case: Case, architecture: str) -> None:
    model, ids = padded_model(architecture, case, "eager"), tiny.tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    eager, eager_padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(model, ids), eager, **tiny.tolerances(architecture))
    torch.testing.assert_close(
        logits(model, ids, attention_mask=mask)[1, 5:], eager_padded[1, 5:], **tiny.tolerances(architecture)
    )


def has_parameters(case: Case, architecture: str) -> bool:
    """Whether the scheme of a case should have parameters, judging by its options."""
    fixed = ("sinusoidal", "polynomial", "exponential", "rope", "xpos", "sandwich", "none")
    for item in case.scheme if isinstance(case.scheme, list) else [case.scheme]:
        item = {"type": item} if isinstance(item, str) else item
        has_mixer = item.get("mix", "add") != "add"
        optional = {"alibi": item.get("learned", False), "learned": architecture == "llama"}
        optional["temperature"] = item.get("form") == "ssmax"
        if has_mixer or optional.get(item["type"], item["type"] not in fixed):
            return True
    return False


@pairs(ARCHITECTURES)
def test_gradients_of_eager_equal_sdpa(case: Case, architecture: str) -> None:
    """The strided bias of the fast path and the dense bias give every parameter the same gradient."""
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
            gradient, gradients[1][name], **tiny.tolerances(architecture), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_sdpa_uses_the_strided_bias(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for the two tests above: the fast path is taken, and reversing its rows changes the logits."""
    model, ids = tiny.model(architecture, "alibi"), tiny.tokens(2, 13)
    expected, calls, view = logits(model, ids), [], strided.strided_bias

    def spy(values: torch.Tensor, num_keys: int) -> torch.Tensor:
        rows = view(values, num_keys)
        calls.append(rows)
        return rows

    monkeypatch.setattr(strided, "strided_bias", spy)
    assert torch.equal(logits(model, ids), expected)
    assert len(calls) == tiny.LAYERS
    assert all(rows.stride()[-2:] == (1, 1) and rows.untyped_storage().size() == 8 * 4 * 25 for rows in calls)
    monkeypatch.setattr(strided, "strided_bias", lambda values, keys: view(values, keys).flip(-2))
    assert (logits(model, ids) - expected).abs().nan_to_num(1.0).max() > 1e-3


@pairs(ARCHITECTURES, reentrant=[False, True])
def test_gradient_checkpointing_keeps_the_gradients(case: Case, architecture: str, reentrant: bool) -> None:
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
            gradient, gradients[1][name], **tiny.tolerances(architecture), msg=lambda text, n=name: f"{n}: {text}"
        )


@pairs(ARCHITECTURES, dtype=[torch.bfloat16, torch.float16])
def test_positions_stay_exact_in_half_precision(case: Case, architecture: str, dtype: torch.dtype) -> None:
    """At distant positions, a half-precision model matches the same weights run in float64, up to rounding.

    The control rounds positions to the model's dtype, which merges neighbors at 5,000.
    """
    narrow = tiny.model(architecture, case.scheme, dtype)
    wide = tiny.model(architecture, case.scheme, dtype).to(torch.float64)
    first = 5000 if case.extends else tiny.TRAINED_LENGTH - 12
    ids, positions = tiny.tokens(1, 12), torch.arange(first, first + 12)[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask = mask if architecture == "bert" else mask.tril()
    exact = logits(wide, ids, position_ids=positions, attention_mask=mask)
    error = (logits(narrow, ids, position_ids=positions, attention_mask=mask).double() - exact).abs().mean()
    coarse = (logits(wide, ids, position_ids=positions.to(dtype).long(), attention_mask=mask) - exact).abs().mean()
    assert error < 0.02 * exact.abs().mean()
    if case.extends and not (case.id in ("none", "fire") or case.contextual or case.saturates):
        # fire normalizes by the position, so neighboring distances hardly differ this far out
        assert error < 0.5 * coarse


@pairs(ARCHITECTURES)
def test_runs_past_the_trained_length_or_explains_why_not(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme), tiny.tokens(1, tiny.TRAINED_LENGTH + 9)
    if case.extends:
        output = logits(model, ids)
        assert output.shape[1] == ids.shape[1]
        assert output.isfinite().all()
        return
    for inputs in ({}, {"position_ids": torch.arange(ids.shape[1])[None]}):
        with pytest.raises(PosEncError, match=rf"{ids.shape[1]}.*{tiny.TRAINED_LENGTH}.*rope"):
            logits(model, ids, **inputs)


@pairs(DECODERS)
def test_no_future_leaks(case: Case, architecture: str) -> None:
    """Output i has no gradient with respect to later inputs."""
    model = tiny.model(architecture, case.scheme)
    embeddings = model.get_input_embeddings()(tiny.tokens(1, 9)).detach().requires_grad_()
    output = model(inputs_embeds=embeddings).logits
    for position in (0, 4, 7):
        (gradient,) = torch.autograd.grad(output[0, position].sum(), embeddings, retain_graph=True)
        assert gradient[0, position + 1 :].abs().max() == 0
        assert gradient[0, : position + 1].abs().min(-1).values.max() > 0


@pairs(ARCHITECTURES)
def test_no_tensor_of_queries_by_keys_by_head_size_is_built(case: Case, architecture: str) -> None:
    """At most two numbers per head, query and key (queries by all distances); the head size is 8."""
    length = tiny.TRAINED_LENGTH
    square = tiny.HEADS * length * length
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(1, length)
    for inputs in ({}, {"position_ids": (torch.arange(length) % 29)[None]}):
        with LargestTensor(torch.Tensor.numel) as largest:
            model(ids, use_cache=False, **inputs).logits.sum().backward()
        assert largest.numbers <= 2 * square
    with LargestTensor(torch.Tensor.numel) as largest:  # the control: such a tensor is detected
        torch.zeros(tiny.HEADS, length, 1, 8) * torch.zeros(length, 8)
    assert largest.numbers > 2 * square


@pairs(["llama"])
def test_grouped_query_attention_equals_repeated_key_heads(case: Case, architecture: str) -> None:
    grouped = tiny.model("llama", case.scheme)
    repeated = tiny.model("llama", case.scheme, num_key_value_heads=tiny.HEADS)
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].view(2, -1, tiny.WIDTH)
            state[name] = heads.repeat_interleave(2, 0).reshape(-1, tiny.WIDTH)
    repeated.load_state_dict(state)
    ids = tiny.tokens(2, 13)
    torch.testing.assert_close(logits(grouped, ids), logits(repeated, ids), **tiny.tolerances("llama"))
