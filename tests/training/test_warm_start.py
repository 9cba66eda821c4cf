"""Warm starts: fitting a variant's attention to the stock one, and keeping the mean of a dropped position table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AlbertForMaskedLM,
    DistilBertForMaskedLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GenerationMixin,
    GptOssForCausalLM,
    GraniteForCausalLM,
    ModernBertForMaskedLM,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaForMaskedLM,
)

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.training.attention_targets import LayerTarget, StockAttention, paired_bases
from hf_posenc.training.warm_start import absorb_table_mean, fit
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.sampling import combinations

ARCHITECTURES = ["bert", "gpt2", "llama"]
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "windows": (Gemma3ForCausalLM, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "windows both ways": (ModernBertForMaskedLM, {"global_attn_every_n_layers": 2, "local_attention": 6}),
    "caps": (Gemma2ForCausalLM, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}),
    "sinks": (GptOssForCausalLM, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "scaled queries": (OPTForCausalLM, {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "a scale": (GraniteForCausalLM, {"attention_multiplier": 0.7}),
    "shared layers": (AlbertForMaskedLM, {"embedding_size": 16}),
    "a table with an offset": (RobertaForMaskedLM, {}),
    "no cache": (DistilBertForMaskedLM, {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 40}),
}


def family_model(name: str) -> PreTrainedModel:
    model_class, changes = FAMILIES[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40}
    sizes |= {"max_position_embeddings": 48, "vocab_size": tiny.VOCABULARY, "pad_token_id": 1, "sliding_window": 6}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8} if issubclass(model_class, GenerationMixin) else {}
    model = model_class(model_class.config_class(**{**sizes, **changes}))
    return tiny.randomise(model).eval()


SCHEMES: list[Any] = ["t5", "shaw", "deberta", "kerple", "transformer_xl", {"type": "alibi", "learned": True}]


def stock_and_variant(architecture: str, scheme: Any) -> tuple[Any, Any]:
    """A stock model whose attention is sharp enough for positions to matter, and its variant, not trained yet."""
    stock = tiny.model(architecture, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if any(word in name for word in ("q_proj.weight", "k_proj.weight", "c_attn.weight", "query.weight")):
                parameter.mul_(3)
    return stock, hf_posenc.retrofit(copy.deepcopy(stock), scheme)


@combinations(architecture=ARCHITECTURES, scheme=SCHEMES)
def test_fit_brings_attention_closer_to_stock(architecture: str, scheme: Any) -> None:
    stock, variant = stock_and_variant(architecture, scheme)
    input_ids = tiny.tokens(6, 24)
    stock_weights = {name: parameter.clone() for name, parameter in stock.named_parameters()}
    other_weights = {name: p.clone() for name, p in variant.named_parameters() if "position_scheme" not in name}
    with torch.no_grad():
        logits = stock(input_ids).logits
    result = fit(stock, variant, input_ids, steps=40)
    assert result.after < result.before
    with torch.no_grad():
        assert torch.equal(stock(input_ids).logits, logits)
    assert type(stock) is tiny.MODEL_CLASSES[architecture]
    assert "position_scheme" not in vars(stock.config)
    assert all(torch.equal(parameter, stock_weights[name]) for name, parameter in stock.named_parameters())
    assert all(parameter.requires_grad for parameter in stock.parameters())
    for name, weight in other_weights.items():
        assert torch.equal(variant.get_parameter(name), weight), name
        assert variant.get_parameter(name).requires_grad
    again = fit(stock, variant, input_ids, steps=0)
    assert again.before == again.after == pytest.approx(result.after, rel=1e-5)


def record_targets(stock: Any, variant: Any, input_ids: torch.Tensor) -> list[LayerTarget]:
    """What the stock model attends to, layer by layer."""
    ((stock_base, base),) = paired_bases(stock, variant)
    targets: list[LayerTarget] = []
    StockAttention(stock_base, base).visit_layers(input_ids, targets.append)
    return targets


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_target_weights_are_those_of_the_stock_model(architecture: str) -> None:
    stock = tiny.model(architecture)
    stock.set_attn_implementation("eager")
    input_ids = tiny.tokens(2, 10)
    with torch.no_grad():
        outputs = stock(input_ids, output_attentions=True)
        variant = hf_posenc.retrofit(copy.deepcopy(stock), "t5")
        targets = record_targets(stock, variant, input_ids)
    for target, expected in zip(targets, outputs.attentions, strict=True):
        torch.testing.assert_close(target.log_weights.exp(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(outputs.attentions[0], outputs.attentions[1], atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_target_weights_of_other_families(name: str) -> None:
    stock = family_model(name)
    stock.set_attn_implementation("eager")
    input_ids = tiny.tokens(2, 14)
    with torch.no_grad():
        expected = stock(input_ids, output_attentions=True).attentions
        if not expected:
            pytest.skip(f"{type(stock).__name__} of this release of transformers returns no attention weights")
        variant = hf_posenc.retrofit(copy.deepcopy(stock), "t5")
        targets = record_targets(stock, variant, input_ids)
    assert len(targets) == len(expected) == 4
    for target, weights in zip(targets, expected, strict=True):
        torch.testing.assert_close(target.log_weights.exp()[..., :14], weights, rtol=0, atol=1e-5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    identity = hf_posenc.retrofit(copy.deepcopy(stock), variant.architecture.stock_scheme)
    assert fit(stock, identity, input_ids, steps=0).before == pytest.approx(0, abs=1e-6)
    assert fit(stock, variant, input_ids, steps=0).before > 1e-2


@pytest.mark.slow
def test_fit_recovers_a_bias_exactly() -> None:
    """If all tokens share their query and key, a rotation is a bias by distance, which t5 can represent."""
    stock = tiny.model("llama", dtype=torch.float32, attention_bias=True)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.zero_()
            elif name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    attention = stock.model.layers[1].self_attn
    length, size = 16, tiny.WIDTH // tiny.HEADS
    query = attention.q_proj.bias.detach().view(tiny.HEADS, 1, size)
    key = attention.k_proj.bias.detach().view(-1, 1, size).repeat_interleave(2, 0)
    turn = oracles.complex_rotation(length, 10000.0, size, interleaved=False)
    rotated_query, rotated_key = (turn(of[None].expand(-1, -1, length, -1).double()) for of in (query, key))
    logits = (rotated_query[0, :, -1:] @ rotated_key[0].transpose(-1, -2))[:, 0] * size**-0.5
    scheme = {"type": "t5", "shared": False, "num_buckets": 64, "max_distance": 128}
    variant = hf_posenc.retrofit(copy.deepcopy(stock), scheme)
    result = fit(stock, variant, tiny.tokens(2, length), steps=300, learning_rate=0.1)
    assert result.before > 0.05
    assert result.after < 1e-4
    table = variant.model.layers[1].self_attn.position_scheme["0"].weight.detach()
    by_distance = table[:length].flip(0).t()  # bucket 0 is distance 0, the last key of the last query
    expected = (logits - logits[:, -1:]).to(table.dtype)
    # Adam stops 3e-4 short after 300 steps; the bias itself spans more than 2.5.
    torch.testing.assert_close(by_distance - by_distance[:, -1:], expected, rtol=0, atol=2e-3)
    assert expected.abs().max() > 1


def test_own_encoding_needs_no_fit() -> None:
    """Control: a variant with its own encoding attends as the stock model does, one with another does not."""
    for architecture, stock_scheme in (("llama", "rope"), ("gpt2", "learned")):
        stock, variant = stock_and_variant(architecture, stock_scheme)
        assert fit(stock, variant, tiny.tokens(4, 16), steps=0).before == pytest.approx(0, abs=1e-6)
        other = hf_posenc.retrofit(copy.deepcopy(stock), "none")
        assert fit(stock, other, tiny.tokens(4, 16), steps=0).before > 1e-2


def test_projections_are_fitted_on_request() -> None:
    stock, variant = stock_and_variant("llama", "alibi")
    input_ids = tiny.tokens(4, 24)
    schemes_only = fit(stock, variant, input_ids, steps=5)
    assert schemes_only.after == schemes_only.before
    result = fit(stock, variant, input_ids, steps=30, projections=True)
    assert result.after < 0.9 * result.before


def test_zero_projection_learning_rate_changes_nothing() -> None:
    stock, variant = stock_and_variant("gpt2", "rope")
    before = {name: weight.clone() for name, weight in variant.state_dict().items()}
    input_ids = tiny.tokens(4, 8)
    fit(stock, variant, input_ids, projections=True, projection_learning_rate=0.0, steps=2)
    assert all(torch.equal(weight, before[name]) for name, weight in variant.state_dict().items())
    fit(stock, variant, input_ids, projections=True, steps=4)
    assert any(not torch.equal(weight, before[name]) for name, weight in variant.state_dict().items())


def test_fit_refuses_models_that_do_not_match() -> None:
    stock, variant = stock_and_variant("gpt2", "t5")
    with pytest.raises(PosEncError, match="no position scheme"):
        fit(stock, stock, tiny.tokens())
    with pytest.raises(PosEncError, match="different sizes"):
        fit(tiny.model("gpt2", n_layer=tiny.LAYERS + 1), variant, tiny.tokens())
    with pytest.raises(PosEncError, match="Linear with a NoneType is not supported"):
        fit(torch.nn.Linear(2, 2), variant, tiny.tokens())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("input_ids", "settings", "match"),
    [
        (tiny.tokens(4)[:0], {}, r"int64 of shape \(0, 12\)"),
        (tiny.tokens(4)[0], {}, r"int64 of shape \(12,\)"),
        (tiny.tokens(4).float(), {}, "float32"),
        (tiny.tokens(4).tolist(), {}, "got list"),
        (tiny.tokens(4), {"rows": 0}, "rows=0"),
        (tiny.tokens(4), {"steps": -1}, "steps=-1"),
    ],
)
def test_fit_refuses_bad_inputs(input_ids: Any, settings: dict[str, int], match: str) -> None:
    stock, variant = stock_and_variant("llama", "t5")
    with pytest.raises(PosEncError, match=match):
        hf_posenc.fit(stock, variant, input_ids, **settings)


def test_a_table_needs_two_rows_per_step() -> None:
    """With one row, everything would be taken for position, and no content would be left."""
    stock, variant = stock_and_variant("gpt2", "shaw")
    input_ids = tiny.tokens(3, 8)
    for text, rows in ((input_ids[:1], 2), (input_ids, 1)):
        with pytest.raises(PosEncError, match="at least 2 rows"):
            fit(stock, variant, text, rows=rows, steps=1)
    fit(stock, variant, input_ids, rows=2, steps=3)


def test_table_mean_is_absorbed() -> None:
    input_ids = tiny.tokens(3, 20)
    stock = tiny.model("bert")
    table = stock.base_model.embeddings.position_embeddings.weight
    with torch.no_grad():
        table += torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(1), dtype=table.dtype)
        expected = stock.base_model.embeddings(input_ids, token_type_ids=input_ids % 2)
    errors = {}
    for absorb in (True, False):
        variant = hf_posenc.retrofit(copy.deepcopy(stock), "none")
        if absorb:
            absorb_table_mean(stock, variant, 20)
        with torch.no_grad():
            embeddings = variant.base_model.embeddings(input_ids, token_type_ids=input_ids % 2)
        errors[absorb] = (embeddings - expected).square().mean().item()
    assert errors[True] < 0.2 * errors[False]


@pytest.mark.parametrize(("architecture", "scheme"), [("bert", ["learned", "t5"]), ("gpt2", "t5"), ("llama", "t5")])
def test_no_mean_is_absorbed_where_it_does_not_apply(architecture: str, scheme: Any) -> None:
    """The table stays; its mean has nowhere to go; there is no table."""
    stock, variant = stock_and_variant(architecture, scheme)
    before = {name: parameter.clone() for name, parameter in variant.named_parameters()}
    absorb_table_mean(stock, variant, 20)
    assert all(torch.equal(parameter, before[name]) for name, parameter in variant.named_parameters())
