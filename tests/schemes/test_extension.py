"""Remapped distances of rotary models, against loops over the distances as their papers define them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_posenc
from hf_posenc.attention import function, remapped
from hf_posenc.attention.dispatch import AttentionPath
from tests.support import families, oracles
from tests.support import tiny_models as tiny
from tests.support.extension import DCA, METHODS, REROPE, SELF_EXTEND, near_length, remapped_distance, rope
from tests.support.tensor_sizes import LargestTensor

LENGTH = 30
each_method = pytest.mark.parametrize("extend", METHODS, ids=lambda extend: extend["method"])


@contextlib.contextmanager
def looping_model(architecture: str, extend: dict[str, Any]) -> Iterator[Any]:
    """The stock model without positions, with an attention that computes the distance of every query and key."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        heads, size = query.shape[1], query.shape[-1]
        key, value = (states.repeat_interleave(heads // states.shape[1], 1) for states in (key, value))
        frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        length, logits = query.shape[2], query.new_full((*query.shape[:3], query.shape[2]), -torch.inf)
        query, key = (torch.complex(states[..., : size // 2], states[..., size // 2 :]) for states in (query, key))
        for i in range(length):
            distances = torch.tensor([remapped_distance(extend, i, j) for j in range(i + 1)], dtype=torch.float64)
            turns = torch.exp(1j * distances[:, None] * frequencies)
            products = (query[:, :, i, None] * key[:, :, : i + 1].conj() * turns).real.sum(-1)
            logits[:, :, i, : i + 1] = products / math.sqrt(size)
        return logits.softmax(-1).matmul(value).transpose(1, 2), None

    with oracles.stock_with_attention(architecture, attention) as model:
        yield model


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one incomplete."""
    monkeypatch.setattr(remapped, "KERNEL_CHUNK", 11)
    monkeypatch.setattr(remapped, "WEIGHTS_CHUNK", 11)


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


SETTINGS = [("llama", "sdpa"), ("gpt2", "eager"), ("gpt2", "sdpa"), ("llama", "eager")]
LOOPS = [
    pytest.param(
        extend,
        *setting,
        id="-".join([extend["method"], *setting]),
        marks=[] if METHODS.index(extend) == SETTINGS.index(setting) else [pytest.mark.slow],
    )
    for extend in METHODS
    for setting in SETTINGS
]


@pytest.mark.parametrize(("extend", "architecture", "backend"), LOOPS)
@pytest.mark.usefixtures("small_chunks")
def test_logits_and_gradients_equal_the_loop(extend: dict[str, Any], architecture: str, backend: str) -> None:
    """LLaMA has grouped heads and rotates by its own code; GPT-2 gets the rotation from the scheme."""
    ids, model = tiny.tokens(2, LENGTH), tiny.model(architecture, rope(extend))
    model.set_attn_implementation(backend)
    with looping_model(architecture, extend) as stock:
        expected = stock(ids).logits
        # Angles are float32: at 30 radians they are off by 2e-6, which three layers amplify.
        oracles.assert_equal_models(model, stock, expected, ids, atol=1e-4)
    torch.testing.assert_close(logits(model, ids), expected.detach(), rtol=0, atol=2e-5)
    option = {**extend, next(name for name in ("group", "k", "local_window", "window") if name in extend): 2}
    with looping_model(architecture, option) as other:  # the control
        assert (other(ids).logits - expected).abs().max() > 1e-2


@each_method
@pytest.mark.usefixtures("small_chunks")
def test_every_path_gives_the_same(extend: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, taken = tiny.model("gpt2", rope(extend)), tiny.tokens(2, LENGTH), []
    for path, attend in list(function.PATHS.items()):
        monkeypatch.setitem(function.PATHS, path, lambda call, a=attend, p=path: (taken.append(p), a(call))[1])
    outputs = [logits(model, ids), model(ids).logits.detach()]
    model.set_attn_implementation("eager")
    outputs.append(logits(model, ids))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-10)
    names = [AttentionPath.REMAPPED_MERGED, AttentionPath.REMAPPED_CHUNKED, AttentionPath.REMAPPED_DENSE]
    assert taken == [name for name in names for _ in range(tiny.LAYERS)]


@each_method
def test_kernels_skip_hidden_triangles(extend: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the window is a multiple of a chunk of queries, no call needs a mask and no pair is computed twice."""
    calls: list[tuple[int, bool]] = []
    kernel = getattr(torch.ops.aten, remapped.KERNEL_NAME)

    def counting(query: Any, key: Any, value: Any, dropout: float, causal: bool, **kwargs: Any) -> Any:
        rows, columns = query.shape[2], key.shape[2]
        calls.append((rows * (rows + 1) // 2 if causal else rows * columns, kwargs.get("attn_mask") is not None))
        return kernel(query, key, value, dropout, causal, **kwargs)

    model, ids = tiny.model("gpt2", rope(extend), n_layer=1), tiny.tokens(2, LENGTH)
    model.set_attn_implementation("eager")
    expected = logits(model, ids)
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(torch.ops.aten, remapped.KERNEL_NAME, counting)
    for chunk in (near_length(extend), 3):
        monkeypatch.setattr(remapped, "KERNEL_CHUNK", chunk)
        torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-10)
        if chunk == near_length(extend):
            assert not any(masked for _, masked in calls)
            assert sum(pairs for pairs, _ in calls) == LENGTH * (LENGTH + 1) // 2
    # The control: chunks that cross the end of a window have squares that are no triangles.
    monkeypatch.setattr(remapped, "_equals_corner", lambda visible, triangle: visible.shape[-1] == visible.shape[-2])
    monkeypatch.setattr(remapped, "KERNEL_CHUNK", LENGTH)
    assert (logits(model, ids) - expected).abs().max() > 1e-3


@each_method
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_short_inputs_are_bit_identical_to_plain_rope(extend: dict[str, Any], architecture: str) -> None:
    model, plain = tiny.model(architecture, rope(extend)), tiny.model(architecture, "rope")
    length = near_length(extend)
    for inputs in ({}, {"position_ids": torch.arange(length)[None]}):
        assert torch.equal(logits(model, tiny.tokens(2, length), **inputs), logits(plain, tiny.tokens(2, length)))
    longer = tiny.tokens(2, length + 6)
    assert (logits(model, longer) - logits(plain, longer)).abs().max() > 1e-3


@each_method
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.usefixtures("small_chunks")
def test_cached_equals_full(extend: dict[str, Any], kind: str) -> None:
    """Across the first far key, one token at a time and several at once."""
    model, ids = tiny.model("llama", rope(extend)), tiny.tokens(2, LENGTH)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=40)
    full, steps, start = logits(model, ids), [], 0
    for stop in (3, 4, 9, 10, 11, 12, 25, 26, LENGTH):
        steps.append(logits(model, ids[:, start:stop], past_key_values=cache, use_cache=True))
        start = stop
    torch.testing.assert_close(torch.cat(steps, 1), full, **tiny.tolerances("llama"))


def test_beam_search_without_a_cache_finds_the_same() -> None:
    model, ids = tiny.model("llama", rope(SELF_EXTEND)), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    cached = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, use_cache=False), cached)


@each_method
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.usefixtures("small_chunks")
def test_padded_and_packed_rows_equal_each_alone(extend: dict[str, Any], backend: str) -> None:
    model, ids = tiny.model("gpt2", rope(extend)), tiny.tokens(2, LENGTH)
    model.set_attn_implementation(backend)
    for left, right in ((9, 0), (0, 9)):
        mask = torch.ones_like(ids)
        mask[0, :left], mask[0, LENGTH - right :] = 0, 0
        output, row = logits(model, ids, attention_mask=mask), slice(left, LENGTH - right)
        torch.testing.assert_close(output[0, row], logits(model, ids[:1, row])[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(output[1], logits(model, ids[1:])[0], rtol=0, atol=1e-9)
        assert output.isfinite().all()
    positions = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)]).expand(2, -1)
    output = logits(model, ids, position_ids=positions, use_cache=False)
    for document in (slice(0, 13), slice(13, LENGTH)):
        torch.testing.assert_close(output[:, document], logits(model, ids[:, document]), rtol=0, atol=1e-9)


def positions_of_last_query(extend: dict[str, Any], length: int) -> torch.Tensor:
    """Positions that give plain rotations the same distances to the last query."""
    distances = [remapped_distance(extend, length - 1, j) for j in range(length)]
    return torch.tensor([[length - 1 - distance for distance in distances]])


ROTARY_DECODERS = [
    name for name in families.MODEL_TYPES if not {"encoder", "table", "position axes"} & families.traits(name)
]
FAST_FAMILIES = families.one_per_trait(ROTARY_DECODERS, 3)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in FAST_FAMILIES else [pytest.mark.slow]) for name in ROTARY_DECODERS],
)
def test_last_token_of_every_family_equals_stock_at_remapped_positions(model_type: str) -> None:
    """In a model of one layer, the stock code rotates to any positions that we choose: interleaved, partial, NoPE."""
    length, extend, changes = 20, SELF_EXTEND, {"num_hidden_layers": 1}
    example = families.config(model_type)
    if getattr(example, "layer_types", None):
        changes["layer_types"] = ["full_attention"]
    if hasattr(example, "no_rope_layers"):
        changes["no_rope_layers"] = [1]
    if getattr(example, "sliding_window", None) is not None:
        changes["sliding_window"] = 64
    if hasattr(example, "mlp_layer_types"):
        changes["mlp_layer_types"] = example.mlp_layer_types[:1]
    ids = tiny.tokens(2, length)
    stock, model = families.model(model_type, **changes), families.model(model_type, rope(extend), **changes)
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    if stock.config._attn_implementation == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    outputs = {}
    for name, positions in (
        ("remapped", positions_of_last_query(extend, length)),
        ("plain", torch.arange(length)[None]),
    ):
        outputs[name] = families.output(stock, ids, attention_mask=mask, position_ids=positions.expand(2, -1))[:, -1]
    families.assert_close(families.output(model, ids)[:, -1], outputs["remapped"])
    rotates = families.ARCHITECTURES[model_type].rotates
    attention = families.ARCHITECTURES[model_type].self_attentions(stock)[0]
    if rotates is None or rotates(attention):
        assert (outputs["plain"] - outputs["remapped"]).abs().max() > 1e-3  # the control
    else:
        assert torch.equal(outputs["plain"], outputs["remapped"])


def test_layers_with_a_window_and_layers_with_angles_of_their_own() -> None:
    """Gemma 3 rotates full and sliding layers by different angles, and its cache drops keys outside the window."""
    model, ids = families.model("gemma3_text", rope(REROPE), auto=families.AutoModelForCausalLM), tiny.tokens(1, LENGTH)
    full, cache = families.output(model, ids), DynamicCache(config=model.config)
    steps = [families.output(model, ids[:, i : i + 3], past_key_values=cache) for i in range(0, LENGTH, 3)]
    families.assert_close(torch.cat(steps, 1), full)


def test_scalings_keep_their_frequencies_and_factor() -> None:
    """YaRN multiplies queries and keys by a factor, which a second rotation must not repeat."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    ids = tiny.tokens(1, 20)
    stock = tiny.model("llama", num_hidden_layers=1, rope_parameters=yarn)
    model = tiny.model("llama", rope(SELF_EXTEND), num_hidden_layers=1, rope_parameters=yarn)
    explicit = tiny.model("llama", rope(SELF_EXTEND, scaling=yarn), num_hidden_layers=1)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    expected = logits(stock, ids, attention_mask=mask, position_ids=positions_of_last_query(SELF_EXTEND, 20))[:, -1]
    for extended in (model, explicit):
        torch.testing.assert_close(logits(extended, ids)[:, -1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float64(dtype: torch.dtype) -> None:
    ids = tiny.tokens(1, LENGTH)
    for extend in METHODS:
        model = tiny.model("llama", rope(extend), dtype)
        exact = logits(tiny.model("llama", rope(extend), dtype).to(torch.float64), ids)
        plain = logits(tiny.model("llama", "rope", dtype).to(torch.float64), ids)
        error = (logits(model, ids).double() - exact).abs().mean()
        assert error < 0.02 * exact.abs().mean()
        assert error < 0.2 * (plain - exact).abs().mean()


def test_memory_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor holds all pairs of query and key, with or without gradients."""
    extend = {"method": "dca", "chunk_size": 300, "local_window": 100}
    model, length = tiny.model("gpt2", rope(extend), torch.float32, n_layer=1, n_head=1), 1500
    monkeypatch.setattr(remapped, "KERNEL_CHUNK", 128)
    monkeypatch.setattr(remapped, "WEIGHTS_CHUNK", 128)
    ids = tiny.tokens(1, length)
    for gradients in (False, True):
        with LargestTensor(torch.Tensor.numel) as largest, torch.set_grad_enabled(gradients):
            hidden = model.transformer(ids, use_cache=False).last_hidden_state
            if gradients:
                hidden.sum().backward()
        assert largest.numbers <= remapped.WEIGHTS_CHUNK * length < length * length / 10


def test_dropout_drops_weights_and_gradients_agree() -> None:
    """With everything dropped, only the residual stream is left; recomputed weights drop the same."""
    model, ids = tiny.model("gpt2", rope(REROPE), attn_pdrop=0.3).train(), tiny.tokens(1, LENGTH)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    direction, sums = torch.randn_like(embeddings), []
    for step in (-1e-6, 1e-6):
        torch.manual_seed(7)
        with torch.no_grad():
            inputs = embeddings + step * direction
        sums.append(model(inputs_embeds=inputs.requires_grad_()).logits.sum())
    torch.manual_seed(7)
    output = model(inputs_embeds=embeddings).logits.sum()
    (gradient,) = torch.autograd.grad(output, embeddings)
    torch.testing.assert_close((gradient * direction).sum(), (sums[1] - sums[0]) / 2e-6, rtol=1e-4, atol=1e-4)
    torch.manual_seed(8)
    assert not torch.allclose(model(inputs_embeds=embeddings).logits.sum(), output)


def test_save_and_load(tmp_path: Any) -> None:
    model, ids = tiny.model("llama", rope(DCA)), tiny.tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.models.PosEncLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.position_scheme == rope(DCA)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=0, atol=1e-10)
    hf_posenc.restore(model)
    assert torch.equal(logits(model, ids), logits(tiny.model("llama"), ids))


def test_other_schemes_in_other_layers_and_at_the_input_are_fine() -> None:
    ids = tiny.tokens(1, LENGTH)
    scheme = ["sinusoidal", rope(REROPE, layers=[0, 2]), {"type": "alibi", "layers": [1]}]
    model = tiny.model("gpt2", scheme)
    assert (logits(model, ids) - logits(tiny.model("gpt2", ["sinusoidal", "rope"]), ids)).abs().max() > 1e-3
    cache = DynamicCache()
    steps = [logits(model, ids[:, i : i + 10], past_key_values=cache) for i in range(0, LENGTH, 10)]
    torch.testing.assert_close(torch.cat(steps, 1), logits(model, ids), rtol=0, atol=1e-9)


@pytest.mark.usefixtures("small_chunks")
def test_a_temperature_scales_near_and_far_keys() -> None:
    """Under a constant factor, as queries that are as much larger."""
    ids, temperature = tiny.tokens(2, LENGTH), {"type": "temperature", "form": "ssmax"}
    both, alone = tiny.model("gpt2", [rope(REROPE), temperature]), tiny.model("gpt2", rope(REROPE))
    for name, parameter in both.named_parameters():
        if "position_scheme" in name:
            parameter.data.fill_(0.0 if name.endswith("slope") else 0.7)
    for layer in alone.transformer.h:
        layer.attn.c_attn.weight.data[:, : tiny.WIDTH] *= 1.7
        layer.attn.c_attn.bias.data[: tiny.WIDTH] *= 1.7
    torch.testing.assert_close(logits(both, ids), logits(alone, ids), rtol=0, atol=1e-9)
    assert (logits(tiny.model("gpt2", rope(REROPE)), ids) - logits(alone, ids)).abs().max() > 1e-2
