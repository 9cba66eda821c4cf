"""Forgetting by content: against a loop over tokens, in caches of all kinds, and what is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_posenc
from hf_posenc.attention import gates as token_gates
from hf_posenc.errors import PosEncError
from tests.support import families, oracles
from tests.support import tiny_models as tiny
from tests.support.cases import CABLE, DECODERS
from tests.support.sampling import sampled

LENGTH, HEADS = oracles.LENGTH, tiny.HEADS
FOX = {"type": "forget"}
SCHEMES = {"fox": FOX, "cable-paper": CABLE, "fox-paper": {**FOX, "init": "paper"}, "cable": {**FOX, "form": "cable"}}
HOLE = (5, 7)
"""Padding in the middle of the second row: its tokens must not count."""


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(ids, **inputs).logits


def mask_with_a_hole(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, slice(*HOLE)] = 0
    return mask


def gate(params: dict[str, torch.Tensor], state: torch.Tensor, form: str) -> torch.Tensor:
    """What one token adds to the sum of each head."""
    logits = torch.stack([weight @ state for weight in params["gate_weight"]]) + params["gate_bias"]
    gates = torch.log(1 / (1 + torch.exp(-logits))) if form == "fox" else -torch.log(1 + torch.exp(logits))
    return gates * params["strength"] if "strength" in params else gates


class LoopOracle:
    """The stock model, with an attention function that sums over the tokens between each query and key.

    `error` names a mistake, for the control.
    """

    def __init__(self, architecture: str, params: list[dict[str, torch.Tensor]], form: str, error: str = "") -> None:
        self.architecture, self.params, self.form, self.error = architecture, params, form, error
        self.states: dict[int, torch.Tensor] = {}

    def bias(self, layer: int, mask: torch.Tensor) -> torch.Tensor:
        """(B, H, n, n): the sum of the gates after the key up to the query, for each pair."""
        rows = []
        for states, real in zip(self.states[layer], mask, strict=True):
            gates = torch.stack([gate(self.params[layer], state, self.form) for state in states], -1)
            if self.error != "padding counts":
                gates = gates * real
            bias = torch.zeros(HEADS, LENGTH, LENGTH, dtype=gates.dtype)
            for i in range(LENGTH):
                for j in range(i):
                    between = slice(j, i) if self.error == "key counts" else slice(j + 1, i + 1)
                    bias[:, i, j] = gates[:, between].sum(-1)
            rows.append(bias)
        return torch.stack(rows)

    @contextlib.contextmanager
    def model(self, mask: torch.Tensor) -> Iterator[Any]:
        def attention(module: Any, query: Any, key: Any, value: Any, visible: Any, **kwargs: Any) -> Any:
            groups = [head * key.shape[1] // HEADS for head in range(HEADS)]
            scores = query.matmul(key[:, groups].transpose(-1, -2)) / math.sqrt(query.shape[-1])
            scores = scores + self.bias(module.layer_idx, mask) + visible
            return scores.softmax(-1).matmul(value[:, groups]).transpose(1, 2), None

        def record(module: Any, args: Any, kwargs: Any) -> None:
            self.states[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

        with oracles.stock_with_attention(self.architecture, attention) as stock:
            names = ("Attention", "SelfAttention")
            for module in stock.modules():
                if type(module).__name__.endswith(names) and hasattr(module, "layer_idx") and hasattr(module, "config"):
                    module.register_forward_pre_hook(record, with_kwargs=True)
            yield stock


@sampled(architecture=DECODERS[::-1], case=list(SCHEMES), slow=["fox-paper", "cable"])
def test_equals_a_loop_over_tokens(architecture: str, case: str) -> None:
    """Logits, and gradients of stock weights and gates, with padding in the middle of a row."""
    ids, scheme = tiny.tokens(2, LENGTH), SCHEMES[case]
    model, mask, form = tiny.model(architecture, scheme), mask_with_a_hole(ids), scheme.get("form", "fox")
    modules = [module["0"] for module in model.modules() if isinstance(module, torch.nn.ModuleDict)]
    params = [
        {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
        for module in modules
    ]
    assert len(params) == tiny.LAYERS
    visible = mask[:, None, None, :].bool() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    stock_inputs, atol = {"attention_mask": tiny.additive_mask(visible)}, oracles.tolerance(architecture)
    with LoopOracle(architecture, params, form).model(mask) as stock:
        expected = stock(ids, **stock_inputs).logits
        expected_gradients = oracles.gradients(stock, expected)
    actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    gradients = oracles.gradients(model, actual)
    pairs = [(gradients[name], value) for name, value in expected_gradients.items() if name in gradients]
    pairs += [
        (parameter.grad, params[layer][name].grad)
        for layer, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    ]
    for gradient, expected_gradient in pairs:
        scale = expected_gradient.abs().max().clamp(min=1)
        torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=0, atol=atol)
    for error in ("padding counts", "key counts"):  # the controls
        with torch.no_grad(), LoopOracle(architecture, params, form, error).model(mask) as stock:
            assert (stock(ids, **stock_inputs).logits - actual).abs().max() > 1e-4, error


class RunningSums(LoopOracle):
    """The same as flash-linear-attention's reference code: the running sum at the query minus that at the key."""

    def bias(self, layer: int, mask: torch.Tensor) -> torch.Tensor:
        rows = [[gate(self.params[layer], state, self.form) for state in states] for states in self.states[layer]]
        sums = torch.stack([torch.stack(gates, -1) for gates in rows]).cumsum(-1)
        if self.error == "sum before the token":
            sums = sums.roll(1, -1)
        return sums[..., :, None] - sums[..., None, :]


@torch.no_grad()
def test_equals_a_difference_of_running_sums() -> None:
    ids, model = tiny.tokens(2, LENGTH), tiny.model("llama", SCHEMES["fox-paper"])
    modules = [module["0"] for module in model.modules() if isinstance(module, torch.nn.ModuleDict)]
    params, mask = [dict(module.named_parameters()) for module in modules], torch.ones_like(ids)
    visible = tiny.additive_mask(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1))
    for error in ("", "sum before the token"):
        with RunningSums("llama", params, "fox", error).model(mask) as stock:
            difference = (stock(ids, attention_mask=visible).logits - logits(model, ids)).abs().max()
        assert (difference > 1e-4) if error else (difference < oracles.tolerance("llama"))


def test_forms_are_the_same_with_opposite_signs() -> None:
    ids, fox = tiny.tokens(), tiny.model("gpt2", SCHEMES["fox-paper"])
    cable = tiny.model("gpt2", CABLE)
    with torch.no_grad():
        for name, parameter in cable.named_parameters():
            if "position_scheme" in name:
                parameter.neg_()
    assert torch.equal(logits(fox, ids), logits(cable, ids))
    assert (logits(fox, ids) - logits(tiny.model("gpt2", CABLE), ids)).abs().max() > 1e-3


def test_sinks_are_compared_with_the_right_logits() -> None:
    """A sink has a logit of its own, so what is added to all keys of a query matters too."""
    ids = tiny.tokens(2, 9)
    sizes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    stock, model = (families.model("gpt_oss", scheme, **sizes) for scheme in (None, ["rope", "forget"]))
    attention = model.layers[0].self_attn
    states: list[torch.Tensor] = []
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: states.append(kwargs["hidden_states"]), with_kwargs=True
    )
    actual = families.output(model, ids, use_cache=False)
    handle.remove()
    with torch.no_grad():
        sums = model.position_scheme[1].gate(states[0], attention.position_scheme["1"]).cumsum(-1)
    bias = (sums[..., None] - sums[..., None, :]).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -1e30)
    families.assert_close(families.output(stock, ids, attention_mask=bias, use_cache=False), actual)
    shifted = bias - sums[..., None]  # the control: without the sums at the queries
    assert families.differ(families.output(stock, ids, attention_mask=shifted, use_cache=False), actual)


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_beams_equal_those_without_a_cache(architecture: str) -> None:
    model, ids = tiny.model(architecture, "forget"), tiny.tokens(2, 6)
    mask = tiny.padding_mask(ids, [0, 2])
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_equals_that_without_a_cache(side: str) -> None:
    """Right padding comes between the prompt and the new tokens, and must not count."""
    model, ids = tiny.model("llama", ["rope", "forget"]), tiny.tokens(2, 7)
    mask = tiny.padding_mask(ids, {"left": [0, 3], "right": [0, -3]}[side])
    expected = tiny.generate_logits(model, ids, mask, use_cache=False)
    for options in ({}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}):
        if "prompt_lookup_num_tokens" in options:  # crops the cache; for a single row only
            rows, masks, wanted = ids[:1], mask[:1], expected[:1]
        else:
            rows, masks, wanted = ids, mask, expected
        actual = tiny.generate_logits(model, rows, masks, **options)
        torch.testing.assert_close(actual, wanted, **tiny.tolerances("llama"))


def test_cropped_and_reordered_caches_are_continued() -> None:
    model, ids, cache = tiny.model("llama", "forget"), tiny.tokens(2, 12), DynamicCache()
    logits(model, ids[:, :10], past_key_values=cache)
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    flipped = ids.flip(0)
    continued = logits(model, flipped[:, 6:], past_key_values=cache)
    expected = logits(model, flipped, use_cache=False)[:, 6:]
    torch.testing.assert_close(continued, expected, **tiny.tolerances("llama"))


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_sliding_windows_drop_gates_with_keys(model_type: str, kind: str) -> None:
    model, ids = families.model(model_type, "forget"), tiny.tokens(2, 14)
    cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=16)
    steps = [
        families.output(model, ids[:, start:stop], past_key_values=cache, use_cache=True)
        for start, stop in ((0, 3), (3, 9), (9, 10), (10, 11), (11, 14))
    ]
    families.assert_close(torch.cat(steps, 1), families.output(model, ids, use_cache=False))
    assert model.config.sliding_window < 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_are_not_rounded_in_half_precision(dtype: torch.dtype) -> None:
    """What the cache stores adds up to the gates; a single number of the cache's dtype would not."""
    gates = -torch.rand(2, 4, 300, generator=torch.Generator().manual_seed(0)) * 3
    parts = token_gates.split_gates(gates, dtype)
    error = (token_gates.sum_parts(parts, torch.float32).cumsum(-1) - gates.cumsum(-1)).abs().max()
    rounded = (gates.to(dtype).float().cumsum(-1) - gates.cumsum(-1)).abs().max()
    assert error < 1e-3
    assert rounded > 5 * error
    assert token_gates.split_gates(gates, torch.float32)[0] is gates
    huge = token_gates.sum_parts(token_gates.split_gates(torch.tensor([-1e30]), torch.float16), torch.float32)
    assert huge.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cached_half_precision_equals_the_full_forward(dtype: torch.dtype) -> None:
    model, ids, cache = tiny.model("llama", ["rope", "forget"], dtype), tiny.tokens(2, 14), DynamicCache()
    full = logits(model, ids, use_cache=False).float()
    steps = [logits(model, ids[:, a:b], past_key_values=cache).float() for a, b in ((0, 5), (5, 6), (6, 14))]
    assert (torch.cat(steps, 1) - full).abs().mean() < 0.01 * full.abs().mean()
    assert cache.layers[0].keys.shape[-1] == 8 + 2 * 2  # two numbers for each of the two heads that share a key


def test_strong_forgetting_in_float16_hides_what_is_masked() -> None:
    """Sums beyond the range of float16: a later key, at a positive distance of the sums, must stay hidden."""
    model, ids = tiny.model("gpt2", CABLE, torch.float32), tiny.tokens(2, 10)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_bias"):
                parameter.fill_(2e4)
    wide, mask = logits(model, ids), tiny.additive_mask(torch.ones(10, 10).tril().bool(), torch.float16)
    model.to(torch.float16)
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        for inputs in ({}, {"attention_mask": mask.expand(2, 1, -1, -1)}):
            narrow = logits(model, ids, **inputs).float()
            assert (narrow - wide).abs().mean() < 0.02 * wide.abs().mean()


def test_long_rows_keep_near_keys_exact() -> None:
    """Near the query, logits do not lose digits to how much was summed before: about 7,000 for the last query."""
    from hf_posenc.attention.chunked import chunked_attention
    from hf_posenc.schemes import RunningSum
    from tests.attention.test_paths import attention_call

    generator, length = torch.Generator().manual_seed(0), 300
    query, key, value = (torch.randn(1, 2, length, 8, generator=generator) for _ in range(3))
    sums = -torch.rand(1, 2, length, generator=generator, dtype=torch.float64).cumsum(-1)

    def attend(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        states = (states.to(dtype) for states in (query, key, value))
        return chunked_attention(attention_call(*states, True, terms=[RunningSum(sums, sums)]))[0].double()

    exact = attend(sums, torch.float64)
    near = attend(sums, torch.float32)
    far = attend(sums - 2.0**20, torch.float32)
    rounded = attend((sums - 2.0**20).float(), torch.float32)  # the control: sums in float32
    assert (near - exact).abs().max() < 1e-5
    assert (far - exact).abs().max() < 1e-5
    assert (rounded - exact).abs().max() > 1e-4


def test_encoders_are_refused() -> None:
    for architecture, changes in (("bert", {}), ("gpt2", {"is_causal": False})):
        with pytest.raises(PosEncError, match="forget.*causal"):
            tiny.model(architecture, "forget", **changes)


def test_caches_without_gates_are_refused() -> None:
    model, ids = tiny.model("gpt2", "forget"), tiny.tokens(2, 8)
    filled_elsewhere = DynamicCache()
    logits(tiny.model("gpt2", "none"), ids[:, :4], past_key_values=filled_elsewhere)
    early = StaticCache(model.config, max_cache_len=8)
    early.early_initialization(2, HEADS, 8, torch.float64, torch.device("cpu"))
    for cache in (filled_elsewhere, early):
        with pytest.raises(PosEncError, match="width 9.*width 8.*empty cache"):
            model(ids[:, 4:], past_key_values=cache)


def test_quantized_caches_are_refused() -> None:
    class QuantizedLayer(DynamicCache().layer_class_to_replicate):  # type: ignore[misc]
        """Stands for transformers' own, which need other packages."""

    cache = DynamicCache()
    cache.layers.append(QuantizedLayer())
    with pytest.raises(PosEncError, match="quantized.*DynamicCache"):
        tiny.model("gpt2", "forget")(tiny.tokens(), past_key_values=cache)


def test_masks_that_leave_the_sums_undefined_are_refused() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    model, ids = tiny.model("gpt2", "forget"), tiny.tokens(1, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    between, later = causal.clone(), causal.clone()
    between[4, 2] = False
    later[1, 3] = True
    for mask in (between, later):
        with pytest.raises(PosEncError, match="between query and key.*causal mask"):
            model(ids, attention_mask=mask[None, None])
    documents = causal.clone()
    documents[3:, :3] = False  # two documents, and a window of two tokens: fine
    window = causal & ~causal.tril(-2)
    packed = logits(model, ids, attention_mask=documents[None, None])
    torch.testing.assert_close(packed[:, 3:], logits(model, ids[:, 3:]), **tiny.tolerances("gpt2"))
    assert logits(model, ids, attention_mask=window[None, None]).isfinite().all()
    model.set_attn_implementation("flex_attention")
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 6, 6, device="cpu")
    with pytest.raises(PosEncError, match="BlockMask"):
        model(ids, attention_mask=block_mask)


def test_explain_mentions_the_cache() -> None:
    explanation = str(hf_posenc.patches.build_explanation(tiny.model("llama", ["rope", "forget"])))
    assert "forget: score (keeps a gate per head and token in the KV cache)" in explanation
