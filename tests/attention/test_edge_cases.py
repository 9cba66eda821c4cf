"""Corners where a scheme was, or could be, silently wrong: each was found by trying to break it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, DynamicCache, StaticCache

import hf_posenc
from tests.support import tiny_models as tiny
from tests.support.cases import DECODERS

CONTEXT = {"type": "sinusoidal", "mix": "attention", "query": "context"}
SHAW = {"type": "shaw", "max_distance": 4}


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("scheme", ["tupe", {"type": "deberta", "share_projections": False}], ids=str)
def test_every_head_can_leave_the_neutral_start(scheme: Any) -> None:
    """Also where the heads together are wider than the model: none of them may start between zeros on both sides."""
    model = tiny.model("llama", dtype=torch.float32, head_dim=16)
    hf_posenc.retrofit(model, ["rope", scheme]).train()
    for _ in range(2):  # the first step moves what was zero, the second what it was multiplied with
        model(tiny.tokens(2, 12)).logits.square().mean().backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "position_scheme" in name:
                    parameter -= 0.1 * parameter.grad
    for name, parameter in model.named_parameters():
        if name.endswith(("query_projection", "key_projection")):
            assert (parameter.grad.view(tiny.HEADS, -1).abs().amax(-1) > 0).all(), name


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("scheme", [CONTEXT, "t5"], ids=str)
def test_a_call_that_gives_no_cache_back_has_filled_it_all_the_same(architecture: str, kind: str, scheme: Any) -> None:
    model, ids = tiny.model(architecture, scheme), tiny.tokens(2, 12)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=14)
    steps = [
        logits(model, ids[:, start:stop], past_key_values=cache, use_cache=use_cache)
        for start, stop, use_cache in ((0, 4, True), (4, 8, False), (8, 12, True))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), logits(model, ids, use_cache=False), **tiny.same(architecture))


@pytest.mark.parametrize("scheme", [{"type": "cope", "max_positions": 6}, CONTEXT, SHAW], ids=str)
@pytest.mark.parametrize("low", [-1e4, -1e9, float("-inf"), torch.finfo(torch.float64).min])
def test_masks_hide_by_any_low_number(scheme: Any, low: float) -> None:
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 10)
    model.set_attn_implementation("eager")
    mask = torch.zeros(10, 10, dtype=torch.float64).masked_fill(~torch.ones(10, 10).tril().bool(), low)[None, None]
    found = logits(model, ids, attention_mask=mask.expand(2, -1, -1, -1), use_cache=False)
    torch.testing.assert_close(found, logits(model, ids, use_cache=False), rtol=0, atol=1e-10)


def test_half_precision_with_padding_and_large_logits_stays_finite() -> None:
    """The lowest float16 and a negative logit would make -inf of a whole row of padding, and NaN of what reads it."""
    model = tiny.model("gpt2", SHAW, torch.float32)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, : 2 * tiny.WIDTH] *= 20
    ids, mask = tiny.tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    assert logits(model.to(torch.float16), ids, attention_mask=mask)[:, 4:].isfinite().all()


def test_attentions_are_of_all_layers_or_of_none() -> None:
    scheme = [{**SHAW, "layers": [0, 2]}, {"type": "alibi", "layers": [1]}]
    model = tiny.model("gpt2", scheme, torch.float32)
    assert not [weights for weights in model(tiny.tokens(), output_attentions=True).attentions if weights is not None]
    model.set_attn_implementation("eager")
    assert len(model(tiny.tokens(), output_attentions=True).attentions) == tiny.LAYERS


def test_one_table_is_learned_once() -> None:
    with pytest.raises(ValueError, match="learned.*twice"):
        tiny.model("gpt2", ["learned", "learned"])
    assert tiny.model("llama", ["learned", "learned"]) is not None  # two tables of its own


def test_cope_is_refused_where_queries_see_ahead() -> None:
    for architecture, changes in (("bert", {}), ("gpt2", {"is_causal": False})):
        with pytest.raises(ValueError, match="cope.*causal models only.*deberta, shaw or t5"):
            tiny.model(architecture, "cope", **changes)


def test_a_scheme_of_the_input_must_say_its_vectors() -> None:
    from hf_posenc.schemes.mixing import InputScheme, MixOptions

    with pytest.raises(TypeError, match="position_embeddings"):
        type("Nothing", (InputScheme,), {})(MixOptions(), None)


def test_a_nan_stays_a_nan() -> None:
    model = tiny.model("gpt2", "cope")
    words = model.get_input_embeddings()(tiny.tokens(1, 8)).detach()
    words[0, 3, 0] = float("nan")
    assert model(inputs_embeds=words).logits[0, 3:].isnan().all()  # and is no row of a table, which would be an error


@pytest.mark.parametrize("scheme", ["alibi", SHAW, "tupe"], ids=str)
def test_rows_of_a_cache_can_be_reordered(scheme: Any) -> None:
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places, cache = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache(config=model.config)
    first = {"attention_mask": mask[:, :6], "position_ids": places[:, :6], "past_key_values": cache}
    logits(model, ids[:, :6], **first)
    cache.reorder_cache(torch.tensor([1, 0]))
    ids, mask, places = ids.flip(0), mask.flip(0), places.flip(0)
    rest = {"attention_mask": mask, "position_ids": places[:, 6:], "past_key_values": cache}
    found = logits(model, ids[:, 6:], **rest)
    whole = logits(model, ids, attention_mask=mask, position_ids=places, use_cache=False)
    torch.testing.assert_close(found, whole[:, 6:], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="position_ids.*cached"):  # a jump is still seen
        model(
            ids[:, 9:],
            attention_mask=torch.cat([mask, mask[:, :1] * 0 + 1], 1),
            position_ids=places[:, 9:] + 4,
            past_key_values=cache,
        )


def test_autocast_keeps_neighbouring_positions_apart() -> None:
    for scheme in ("polynomial", "exponential"):
        model = tiny.model("gpt2", scheme, torch.float32, n_positions=2048)
        words = torch.zeros(1, 2048, tiny.WIDTH)
        with torch.autocast("cpu", torch.bfloat16):
            located = model.transformer.prepare_inputs({"inputs_embeds": words})
            vectors = model.transformer.position_scheme[0].position_embeddings(located.positions)[0]
        assert vectors.unique(dim=0).shape[0] == 2048, scheme


def test_an_old_relative_bert_can_be_read_as_transformers_5_does() -> None:
    config = BertConfig(position_embedding_type="relative_key_query")
    assert config.position_embedding_type == "relative_key_query"
    config.position_embedding_type = "absolute"
    assert type(config) is BertConfig
    assert type(AutoModel.from_config(config)) is BertModel


@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_one_mask_for_all_rows_beside_positions_of_each(scheme: str) -> None:
    ids = tiny.tokens(2, 6)
    model = tiny.model("gpt2", scheme)
    mask = tiny.additive(torch.ones(6, 6, dtype=torch.bool).tril())[None, None]
    with torch.no_grad():
        found = model(ids, position_ids=torch.arange(6).expand(2, -1), attention_mask=mask).logits
        torch.testing.assert_close(found, model(ids).logits)
