"""The temperature of attention: against Llama 4 itself, and against loops over queries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Llama4ForCausalLM, Llama4TextConfig

import hf_posenc
from hf_posenc.attention import AttentionPath
from hf_posenc.errors import PosEncError
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, LLAMA4, SSMAX

LENGTH = oracles.LENGTH
LLAMA4_SCHEME = [
    {"type": "rope", "layout": "interleaved", "theta": 10000.0, "layers": "0::2"},
    {**LLAMA4, "layers": [1]},
]
"""Rotations in some layers, and a temperature in the others: the pattern of Llama 4."""


def llama4(**changes: Any) -> Any:
    """A dense Llama 4 of the sizes of the tiny LLaMA, with a layer without rotation."""
    llama = tiny.config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: llama[name] for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    temperature = {"attn_temperature_tuning": True, "attn_scale": 0.7, "floor_scale": 3}
    config = Llama4TextConfig(
        **{**sizes, **temperature, **changes},
        head_dim=8,
        intermediate_size_mlp=llama["intermediate_size"],
        moe_layers=[],
        use_qk_norm=False,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=tiny.PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    return tiny.randomise(Llama4ForCausalLM(config).to(torch.float64)).eval()


def llama_with_weights_of(stock: Any, scheme: Any) -> Any:
    model, weights = tiny.model("llama", scheme), stock.state_dict()
    renamed = {name.replace("feed_forward", "mlp"): value for name, value in weights.items()}
    report = model.load_state_dict(renamed, strict=False)
    assert not report.unexpected_keys
    assert not report.missing_keys
    return model


def test_llama4_form_equals_llama_4() -> None:
    """Logits, gradients and cached decoding, with rotations in the other layers."""
    stock, ids = llama4(), tiny.tokens(2, LENGTH)
    model = llama_with_weights_of(stock, LLAMA4_SCHEME)
    expected, logits = stock(ids).logits, model(ids).logits
    atol = tiny.tolerances("llama")["atol"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    theirs, ours = oracles.gradients(stock, expected), oracles.gradients(model, logits)
    for name, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=1)
        mine = ours[name.replace("feed_forward", "mlp")]
        torch.testing.assert_close(mine / scale, gradient / scale, rtol=0, atol=10 * atol)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [
            model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits
            for start, stop in ((0, 6), (6, 7), (7, 10), (10, LENGTH))
        ]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("offset", [0, 1])
def test_an_offset_of_zero_equals_ministral_3(offset: int) -> None:
    """One, as in Llama 4, is the control."""
    ministral = pytest.importorskip("transformers.models.ministral3", reason="this release has no Ministral 3")
    llama = tiny.config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "rms_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = ministral.Ministral3Config(
        **{name: llama[name] for name in names},
        head_dim=8,
        sliding_window=None,
        rope_parameters={**rope, "llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 3},
    )
    stock = tiny.randomise(ministral.Ministral3ForCausalLM(config).to(torch.float64)).eval()
    model = llama_with_weights_of(stock, ["rope", {**LLAMA4, "floor_scale": 3, "attn_scale": 0.7, "offset": offset}])
    ids = tiny.tokens(2, LENGTH)
    with torch.no_grad():
        difference = (model(ids).logits - stock(ids).logits).abs().max()
    assert difference < tiny.tolerances("llama")["atol"] if offset == 0 else difference > 1e-4


@pytest.mark.parametrize("changes", [{"floor_scale": 4}, {"attn_scale": 0.69}, {"attn_temperature_tuning": False}])
def test_the_comparison_with_llama_4_can_fail(changes: dict[str, Any]) -> None:
    stock, ids = llama4(**changes), tiny.tokens(2, LENGTH)
    with torch.no_grad():
        difference = (llama_with_weights_of(stock, LLAMA4_SCHEME)(ids).logits - stock(ids).logits).abs().max()
    assert difference > 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bias", [True, False])
def test_ssmax_equals_a_loop_over_queries(architecture: str, bias: bool) -> None:
    ids, scheme = tiny.tokens(2, LENGTH), {**SSMAX, "bias": bias}
    model = tiny.model(architecture, scheme)
    schemes = {name: value for name, value in model.named_parameters() if "position_scheme" in name}
    copies = {name: value.detach().clone().requires_grad_() for name, value in schemes.items()}
    slopes = [value for name, value in copies.items() if name.endswith("slope")]
    changes = [value for name, value in copies.items() if name.endswith("content_change")]
    assert len(slopes) == tiny.LAYERS
    assert len(changes) == tiny.LAYERS * bias

    def layer(number: int, error: float = 0.0) -> oracles.LayerOracle:
        def scale(query: torch.Tensor) -> torch.Tensor:
            rows = []
            for position in range(LENGTH):
                count = LENGTH if architecture == "bert" else position + 1
                factor = slopes[number] * (math.log(count) + error)
                factor = factor + 1 + changes[number] if bias else factor
                rows.append(query[:, :, position] * factor[:, None])
            return torch.stack(rows, 2)

        return oracles.LayerOracle(rotation=scale, key_rotation=lambda key: key)

    layers = [layer(number) for number in range(tiny.LAYERS)]
    atol = oracles.tolerance(architecture)
    with oracles.stock_with_layers(architecture, layers) as stock:
        mask = oracles.causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).logits
        oracles.assert_equal_models(model, stock, expected, ids, atol)
    for name, value in copies.items():
        scale = value.grad.abs().max()
        torch.testing.assert_close(schemes[name].grad / scale, value.grad / scale, rtol=0, atol=atol)
    with oracles.stock_with_layers(architecture, [layer(0, 0.01), *layers[1:]]) as stock:
        assert (stock(ids, attention_mask=mask).logits - expected).abs().max() > 1e-5


@pytest.mark.parametrize("scheme", [["rope", LLAMA4], ["rope", SSMAX]], ids=["llama4", "ssmax"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_equals_generation_without(scheme: Any, cache: str) -> None:
    model, ids = tiny.model("llama", scheme), tiny.tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    kind = {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **kind, **options), expected)


def test_masks_of_four_axes_are_counted_per_head() -> None:
    """With a mask that hides other keys from each head, factors follow what the head sees."""
    model, ids = tiny.model("llama", {**SSMAX, "layers": [0]}), tiny.tokens(1, 8)
    visible = torch.ones(1, tiny.HEADS, 8, 8, dtype=torch.bool).tril()
    visible[:, 1:, :, 0], visible[:, 1:, 0, 0] = False, True
    inputs = {"input_ids": ids, "attention_mask": visible, "use_cache": False}
    counts = model.model.prepare_inputs(inputs).positions.key_counts_BHQ
    assert counts[0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert counts[0, 1].tolist() == [1, 1, 2, 3, 4, 5, 6, 7]


def test_holes_in_a_mask_are_not_counted() -> None:
    model, ids = tiny.model("gpt2", SSMAX), tiny.tokens(2, 7)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    counts = model.transformer.prepare_inputs({"input_ids": ids, "attention_mask": mask}).positions.key_counts_BHQ
    assert counts[:, 0].tolist() == [[1, 2, 2, 3, 3, 4, 5], [1, 2, 3, 4, 5, 6, 6]]


def test_a_mask_of_the_new_tokens_alone_is_refused() -> None:
    model, ids = tiny.model("gpt2", ["learned", SSMAX]), tiny.tokens(1, 8)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(PosEncError, match="5 cached and 3 new"):
        model(ids[:, 5:], attention_mask=torch.ones(1, 3), past_key_values=cache)


def test_block_masks_are_refused() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    model = tiny.model("llama", ["rope", SSMAX], torch.float32)
    model.set_attn_implementation("flex_attention")
    mask = create_block_mask(lambda batch, head, q, k: q >= k, 1, None, 8, 8, device="cpu")
    with pytest.raises(PosEncError, match="BlockMask"):
        model(tiny.tokens(1, 8), attention_mask=mask)


@pytest.mark.parametrize("scheme", [["rope", LLAMA4], ["rope", SSMAX]], ids=["llama4", "ssmax"])
@pytest.mark.slow
def test_flex_attention_equals_sdpa(scheme: Any) -> None:
    model, ids = tiny.model("llama", scheme, torch.float32), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("flex_attention")
        logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-5)


def test_a_temperature_leaves_the_attention_to_the_stock_function() -> None:
    """Also flash attention: it is a factor on queries, and the rotation stays in the model's own code."""
    for report in hf_posenc.explain(tiny.model("llama", ["rope", SSMAX])).layers:
        assert report.active == ("rope: stock rotation", "temperature: content_scale")
        paths = {choice.path for choice in report.choices if choice.backend != "flex_attention"}
        assert paths == {AttentionPath.STOCK}


def test_without_a_bias_the_factors_average_one() -> None:
    """Over the positions of a causal model, and at the trained length of an encoder."""
    for architecture, counts in (("gpt2", torch.arange(1, tiny.TRAINED_LENGTH + 1)), ("bert", [tiny.TRAINED_LENGTH])):
        model = hf_posenc.retrofit(tiny.model(architecture), {**SSMAX, "bias": False})
        (slope, *_) = (value for name, value in model.named_parameters() if name.endswith("slope"))
        factors = slope.detach()[0] * torch.as_tensor(counts).double().log()
        assert abs(factors.mean().item() - 1) < 1e-9
    model = hf_posenc.retrofit(tiny.model("gpt2"), {**SSMAX, "bias": False, "scale": 0.43})
    assert all((value == 0.43).all() for name, value in model.named_parameters() if name.endswith("slope"))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"type": "temperature", "bias": False}, 'bias.*"form": "ssmax"'),
        ({**SSMAX, "floor_scale": 16}, 'floor_scale.*"form": "llama4"'),
        ({"type": "temperature", "form": "yarn"}, "'llama4' or 'ssmax'"),
        ({"type": "temperature", "floor_scale": 0}, "at least 1"),
    ],
)
def test_options_of_the_other_form_are_refused(scheme: Any, message: str) -> None:
    with pytest.raises(PosEncError, match=message):
        tiny.model("gpt2", scheme)
