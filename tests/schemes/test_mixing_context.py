"""The `query="context"` of an attention mix: the mean embedding of the tokens that a token may see.

Its caches hold token embeddings in addition to keys and values. Whatever is done to a cache, the result must equal a
forward pass without one.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from tests.support import tiny_models as tiny
from tests.support.cases import DECODERS
from tests.support.sampling import sampled

CONTEXT = {"mix": "attention", "query": "context"}
SINUSOIDAL = {"type": "sinusoidal", **CONTEXT}
by_decoder = pytest.mark.parametrize("architecture", DECODERS)
LAYOUTS = {
    "whole": ("aaaaaaaaaa", "aaaaaaaaaa"),
    "left": ("...aaaaaaa", "aaaaaaaaaa"),
    "right": ("aaaaaaa...", "aaaaaaaaaa"),
    "both-sides": ("..aaaaaaa.", "a........."),
    "packed": ("aaaabbbbbb", "aaaaaaabcc"),
    "packed-padded": ("..aaabbbb.", "aaa..bbbbb"),
}
"""The document of each token, or a dot for padding."""


def layout_inputs(name: str) -> dict[str, torch.Tensor]:
    """A mask if there is padding, position_ids if there are several documents."""
    rows, inputs = LAYOUTS[name], {}
    if "." in "".join(rows):
        inputs["attention_mask"] = torch.tensor([[token != "." for token in row] for row in rows]).long()
    if "b" in "".join(rows):
        positions = [[0 if row[slot] == "." else slot - row.index(row[slot]) for slot in range(10)] for row in rows]
        inputs["position_ids"] = torch.tensor(positions)
    return inputs


def context_of(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """What the model's mix reads as its query."""
    seen: list[torch.Tensor] = []

    def record(module: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0] == "embed":
            seen.append(arguments[2].context_BQE)

    handle = model.base_model.position_scheme[0].register_forward_pre_hook(record)
    with torch.no_grad():
        model(ids, **inputs)
    handle.remove()
    assert len(seen) == 1
    return seen[0].expand(ids.shape[0], -1, -1)


@sampled(architecture=["bert", *DECODERS], name=list(LAYOUTS))
def test_context_is_the_mean_of_the_visible_tokens(architecture: str, name: str) -> None:
    """Within its document, without padding, and up to the token itself in a causal model. Finite at padding."""
    model, ids = tiny.model(architecture, SINUSOIDAL), tiny.tokens(2, 10)
    actual, embeddings = context_of(model, ids, **layout_inputs(name)), model.get_input_embeddings().weight.detach()
    assert actual.isfinite().all()
    for number, row in enumerate(LAYOUTS[name]):
        for slot, document in enumerate(row):
            if document == ".":
                continue
            last = 10 if architecture == "bert" else slot + 1
            visible = [embeddings[ids[number, other]] for other in range(last) if row[other] == document]
            expected = torch.stack(visible).sum(0) / len(visible)
            torch.testing.assert_close(actual[number, slot], expected, rtol=0, atol=1e-14)
    whole = context_of(model, ids)  # the control: padding and documents make a difference
    assert (name == "whole") == ((actual - whole).abs().max() < 1e-6)


def make_cache(model: Any, cache_type: str) -> Any:
    return DynamicCache(config=model.config) if cache_type == "dynamic" else StaticCache(model.config, max_cache_len=16)


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


@sampled(
    architecture=DECODERS,
    cache_type=["dynamic", "static"],
    name=["sinusoidal", "learned", "window"],
    padded=[0, 4],
    every=2,
)
def test_cached_steps_equal_the_full_forward(architecture: str, cache_type: str, name: str, padded: int) -> None:
    """Also if the first step is nothing but padding in one row."""
    model, ids = tiny.model(architecture, {"type": name, **CONTEXT}), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    full = logits(model, ids, attention_mask=mask, use_cache=False)
    cache, cuts = make_cache(model, cache_type), [0, 3, 7, 8, 9, 10, 11, 12]
    for start, stop in itertools.pairwise(cuts):
        inputs = {"attention_mask": mask[:, :stop]} if padded else {}
        step = logits(model, ids[:, start:stop], past_key_values=cache, **inputs)
        torch.testing.assert_close(step[1], full[1, start:stop], **tiny.tolerances(architecture))
        first = max(padded, start)
        torch.testing.assert_close(step[0, first - start :], full[0, first:stop], **tiny.tolerances(architecture))
    assert len(cache.layers) == tiny.LAYERS + 1
    last, inputs = tiny.tokens(2, 1, seed=1), {"attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    expected = logits(model, torch.cat([ids, last], 1), use_cache=False, **inputs)[:, -1:]
    cache.layers[-1].keys.zero_()  # the control: a step without the embeddings of earlier tokens
    lost = logits(model, last, past_key_values=cache, **inputs)
    assert (lost - expected).abs().max() > 1e-4


@sampled(architecture=DECODERS, cache_type=["dynamic", "static"])
def test_beam_search_equals_the_same_without_a_cache(
    architecture: str, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny.model(architecture, SINUSOIDAL), tiny.tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    orders: list[list[int]] = []
    reorder = Cache.reorder_cache

    def recorded(cache: Any, beams: torch.Tensor) -> None:
        orders.append(beams.tolist())
        reorder(cache, beams)

    monkeypatch.setattr(Cache, "reorder_cache", recorded)

    def generate(**settings: Any) -> Any:
        lengths = {"max_new_tokens": 9, "min_new_tokens": 9}
        beams = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False}
        scores = {"return_dict_in_generate": True, "output_scores": True}
        return model.generate(ids, attention_mask=mask, **lengths, **beams, **scores, **settings)

    expected = generate(use_cache=False)
    assert not orders
    actual = generate(use_cache=True, cache_implementation=None if cache_type == "dynamic" else "static")
    assert any(order != sorted(order) for order in orders)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, **tiny.tolerances(architecture))

    def reorder_keys_only(cache: Any, beams: torch.Tensor) -> None:
        for layer in cache.layers[: tiny.LAYERS]:
            layer.reorder_cache(beams)

    monkeypatch.setattr(Cache, "reorder_cache", reorder_keys_only)  # the control: embeddings of other beams
    mixed_up = generate(use_cache=True, cache_implementation=None if cache_type == "dynamic" else "static")
    assert (mixed_up.sequences_scores - expected.sequences_scores).abs().max() > 1e-4


@by_decoder
def test_caches_can_be_cropped_and_repeated(architecture: str) -> None:
    model, ids, others = tiny.model(architecture, SINUSOIDAL), tiny.tokens(2, 8), tiny.tokens(4, 4, seed=1)
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache)
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    actual = logits(model, others, past_key_values=cache)
    rows = torch.cat([ids[:, :5].repeat_interleave(2, 0), others], 1)
    torch.testing.assert_close(actual, logits(model, rows, use_cache=False)[:, 5:], **tiny.tolerances(architecture))


@by_decoder
def test_static_caches_can_be_reset(architecture: str) -> None:
    model, ids, others = tiny.model(architecture, SINUSOIDAL), tiny.tokens(2, 8), tiny.tokens(2, 6, seed=1)
    cache = StaticCache(model.config, max_cache_len=16)
    logits(model, ids, past_key_values=cache)
    cache.reset()
    steps = [logits(model, chunk, past_key_values=cache) for chunk in others.split([3, 1, 2], 1)]
    expected = logits(model, others, use_cache=False)
    torch.testing.assert_close(torch.cat(steps, 1), expected, **tiny.tolerances(architecture))


@sampled(architecture=DECODERS, cache_type=["dynamic", "static"])
def test_caches_of_other_models_are_refused(architecture: str, cache_type: str) -> None:
    model, ids = tiny.model(architecture, SINUSOIDAL), tiny.tokens(2, 8)
    for other in (tiny.model(architecture), tiny.model(architecture, "sinusoidal")):
        cache = make_cache(other, cache_type)
        logits(other, ids[:, :5], past_key_values=cache)
        with pytest.raises(ValueError, match="context.*filled by another model.*use_cache=False"):
            model(ids[:, 5:], past_key_values=cache)
    cache = make_cache(model, cache_type)  # the control: its own cache is accepted
    logits(model, ids[:, :5], past_key_values=cache)
    assert logits(model, ids[:, 5:], past_key_values=cache).isfinite().all()


@sampled(architecture=DECODERS, cache_type=["dynamic", "static"])
def test_caches_continued_by_another_model_are_refused(architecture: str, cache_type: str) -> None:
    """Such a cache has fewer embeddings than keys."""
    model, other, ids = tiny.model(architecture, SINUSOIDAL), tiny.model(architecture), tiny.tokens(2, 8)
    cache = make_cache(model, cache_type)
    logits(model, ids[:, :4], past_key_values=cache)
    logits(other, ids[:, 4:6], past_key_values=cache)
    with pytest.raises(ValueError, match="filled by another model"):
        model(ids[:, 6:], past_key_values=cache)


def test_caches_of_deeper_models_are_refused() -> None:
    model, ids = tiny.model("gpt2", SINUSOIDAL), tiny.tokens(2, 8)
    deeper = tiny.model("gpt2", n_layer=tiny.LAYERS + 2)
    cache = DynamicCache(config=deeper.config)
    logits(deeper, ids[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match="filled by another model"):
        model(ids[:, 4:], past_key_values=cache)


@sampled(architecture=["bert", *DECODERS], backend=["sdpa", "eager"])
def test_4d_masks_limit_the_context(architecture: str, backend: str) -> None:
    """A document that a token cannot see through a 4D mask is not in its context either."""
    model, ids = tiny.model(architecture, SINUSOIDAL), tiny.tokens(1, 10)
    model.set_attn_implementation(backend)
    visible = torch.block_diag(torch.ones(4, 4), torch.ones(6, 6)).bool()
    visible = visible if architecture == "bert" else visible.tril()
    mask = visible[None, None] if backend == "sdpa" else tiny.additive_mask(visible[None, None])
    changed = ids.clone()
    changed[0, 1] = 3 + (changed[0, 1] - 2) % (tiny.VOCABULARY - 3)
    original, after_change = (logits(model, row, attention_mask=mask, use_cache=False) for row in (ids, changed))
    assert torch.equal(original[0, 4:], after_change[0, 4:])
    assert (original[0, 1:4] - after_change[0, 1:4]).abs().max() > 1e-3
