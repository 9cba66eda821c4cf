"""What sets model families apart: pairs of features that rotate, partial rotation, layers without positions, shared
layers, and checkpoints that are renamed or merged on loading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import conversion_mapping

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import families, oracles
from tests.support import tiny_models as tiny
from tests.support.families import TRAITS, assert_close, differ, output

IDS = tiny.tokens(2, 14)
THETA = 500.0
ROTARY = [name for name in families.MODEL_TYPES if name not in TRAITS["table"]]
SAMPLED = ["cohere", "glm", "phi", "gpt_neox", "gemma3_text", "gpt_oss"]
"""Interleaved, partial, both, angles by layer type, and one angle per pair."""


def with_theta(model_type: str, theta: float) -> dict[str, Any]:
    """Rotary settings for the stock config: unscaled, with this theta and the model type's own factor and sections."""
    parameters = families.config(model_type).rope_parameters
    kept = {name: parameters[name] for name in ("partial_rotary_factor", "mrope_section") if parameters.get(name)}
    changed = {"rope_type": "default", "rope_theta": theta, **kept}
    by_layer_type = "full_attention" in parameters
    return {"rope_parameters": {name: dict(changed) for name in parameters} if by_layer_type else changed}


def rotated_layers(model_type: str) -> dict[str, Any]:
    """An explicit rotation acts in all layers, so those that the checkpoint does not rotate are left out by hand."""
    return {"layers": [0, 2]} if model_type in TRAITS["NoPE layers"] else {}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in SAMPLED else [pytest.mark.slow]) for name in ROTARY]
)
def test_explicit_theta_equals_stock_with_that_theta(model_type: str) -> None:
    """The checkpoint's pairs of features and its partial factor stay. The control has the other layout."""
    expected = output(families.model(model_type, **with_theta(model_type, THETA)), IDS)
    scheme = {"type": "rope", "theta": THETA, **rotated_layers(model_type)}
    assert_close(output(families.model(model_type, scheme), IDS), expected)
    assert differ(output(families.model(model_type), IDS), expected)
    layout = "halves" if model_type in TRAITS["interleaved"] else "interleaved"
    assert differ(output(families.model(model_type, {**scheme, "layout": layout}), IDS), expected)


@pytest.mark.parametrize("model_type", ["phi", "glm"])
def test_explicit_partial_factor_overrides_the_own_one(model_type: str) -> None:
    changes = with_theta(model_type, THETA)
    changes["rope_parameters"]["partial_rotary_factor"] = 1.0
    expected = output(families.model(model_type, **changes), IDS)
    scheme = {"type": "rope", "theta": THETA}
    actual = output(families.model(model_type, {**scheme, "partial_rotary_factor": 1.0}), IDS)
    assert_close(actual, expected)
    assert differ(output(families.model(model_type, scheme), IDS), expected)


@pytest.mark.parametrize("model_type", [name for name in TRAITS["NoPE layers"] if name in families.MODEL_TYPES])
def test_rope_keeps_layers_without_positions(model_type: str) -> None:
    """Also where a second scheme makes the package rotate instead of the stock code."""
    stock = output(families.model(model_type), IDS)
    both = families.model(model_type, ["rope", {"type": "shaw", "max_distance": 4}])
    with torch.no_grad():
        for name, parameter in both.named_parameters():
            if "position_scheme" in name:
                parameter.zero_()
    assert torch.equal(output(families.model(model_type, "rope"), IDS), stock)
    assert_close(output(both, IDS), stock)
    everywhere = {"type": "rope", "theta": families.config(model_type).rope_parameters["rope_theta"]}
    assert differ(output(families.model(model_type, everywhere), IDS), stock)
    assert_close(output(families.model(model_type, {**everywhere, "layers": [0, 2]}), IDS), stock)


def test_smollm3_pattern_is_the_config_s() -> None:
    patterns = ([1, 1, 1], [1, 0, 1], [0, 1, 1])
    outputs = [output(families.model("smollm3", "rope", no_rope_layers=pattern), IDS) for pattern in patterns]
    for pattern, actual in zip(patterns, outputs, strict=True):
        assert torch.equal(actual, output(families.model("smollm3", no_rope_layers=pattern), IDS))
    assert differ(outputs[0], outputs[1])
    assert differ(outputs[1], outputs[2])


@pytest.mark.parametrize("layers", [[0], [2], "0:2"])
def test_shared_layers_refuse_a_choice_of_layers(layers: Any) -> None:
    with pytest.raises(PosEncError, match="albert shares.*3 layers.*leave out `layers`"):
        families.model("albert", {"type": "alibi", "layers": layers})


def test_shared_layers_share_the_parameters_of_a_scheme() -> None:
    model = families.model("albert", {"type": "shaw", "max_distance": 4})
    names = [name for name, _ in model.named_parameters() if "position_scheme" in name]
    assert len(names) == 2  # keys and values, once for all three layers
    before = output(model, IDS)
    model(IDS).last_hidden_state.square().mean().backward()
    assert all(model.get_parameter(name).grad.any() for name in names)
    with torch.no_grad():
        model.get_parameter(names[0]).mul_(2)
    assert differ(output(model, IDS), before)


def test_layers_of_albert_may_have_weights_of_their_own() -> None:
    schemes = ["alibi", {"type": "alibi", "layers": [0, 1, 2]}, {"type": "alibi", "layers": [1]}]
    outputs = [output(families.model("albert", scheme, num_hidden_groups=3), IDS) for scheme in schemes]
    assert torch.equal(outputs[0], outputs[1])
    assert differ(outputs[0], outputs[2])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_queries_that_opt_scales_itself_are_scaled_once(backend: str) -> None:
    """Shaw with its query term, by definition: (q.k + q.a + k.a) / sqrt(d). The control leaves k.a unscaled."""
    scheme = {"type": "shaw", "max_distance": 4, "values": False, "query_term": True}
    model = families.model("opt", scheme, backend=backend, num_hidden_layers=1)
    attention = model.decoder.layers[0].self_attn
    table = attention.position_scheme["0"].keys
    rows = 4 - (torch.arange(14) - torch.arange(14)[:, None]).clamp(-4, 4)
    outputs = {}
    for key_scaling in (attention.scaling, 1.0):

        def reference(
            module: Any, query: Any, key: Any, value: Any, *args: Any, factor: float = key_scaling, **kwargs: Any
        ) -> Any:
            scores = query @ key.mT + torch.einsum("bhqd,qkd->bhqk", query, table[rows])  # OPT's queries are scaled
            scores = scores + factor * torch.einsum("bhkd,qkd->bhqk", key, table[rows])
            scores = scores.masked_fill(torch.ones(14, 14).triu(1).bool(), -torch.inf)
            return (scores.softmax(-1) @ value).transpose(1, 2), None

        stock = families.model("opt", num_hidden_layers=1)
        with torch.no_grad():
            stock.decoder.embed_positions.weight.zero_()
        with oracles.attention_function(stock, reference):
            outputs[key_scaling] = output(stock, IDS)
    assert_close(output(model, IDS), outputs[attention.scaling])
    assert differ(output(model, IDS), outputs[1.0])


CONVERSIONS = {
    "gpt_neox": ("embed_out.weight", "PosEncGPTNeoXForCausalLM", "lm_head.weight"),
    "mixtral": (
        "model.layers.0.block_sparse_moe.experts.1.w1.weight",
        "posenc_mixtral",
        "model.layers.0.mlp.experts.gate_up_proj",
    ),
}
"""For each model type, a key of its checkpoints, the name its variants' conversions have, and a key of the model."""


@pytest.mark.parametrize("model_type", CONVERSIONS)
def test_variants_are_converted_like_stock_checkpoints(model_type: str, tmp_path: Path) -> None:
    """Heads that are renamed and experts that are merged on loading. Without the conversion, both would be random."""
    stored_key, conversion_name, key = CONVERSIONS[model_type]
    auto = families.auto_class(model_type)
    stock = families.model(model_type, auto=auto)
    if key not in stock.state_dict():
        pytest.skip("this release of transformers names weights as checkpoints do")
    stock.save_pretrained(tmp_path / "stock")
    assert stored_key in load_file(tmp_path / "stock" / "model.safetensors")
    variant = auto.from_pretrained(tmp_path / "stock", position_scheme="rope").eval()
    assert torch.equal(variant.state_dict()[key], stock.state_dict()[key])
    assert torch.equal(output(variant, IDS), output(stock, IDS))

    variant.save_pretrained(tmp_path / "variant")
    assert stored_key in load_file(tmp_path / "variant" / "model.safetensors")
    assert torch.equal(output(auto.from_pretrained(tmp_path / "variant").eval(), IDS), output(stock, IDS))

    retrofitted = hf_posenc.retrofit(stock, "alibi")
    retrofitted.save_pretrained(tmp_path / "retrofitted")
    assert stored_key in load_file(tmp_path / "retrofitted" / "model.safetensors")
    assert torch.equal(output(auto.from_pretrained(tmp_path / "retrofitted").eval(), IDS), output(retrofitted, IDS))

    conversions = conversion_mapping.get_checkpoint_conversion_mapping(conversion_name)
    conversion_mapping.register_checkpoint_conversion_mapping(conversion_name, [], overwrite=True)
    try:  # the control
        broken, report = auto.from_pretrained(
            tmp_path / "stock", position_scheme="rope", output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        conversion_mapping.register_checkpoint_conversion_mapping(conversion_name, conversions, overwrite=True)
    assert key in report["missing_keys"]
    assert not torch.equal(broken.state_dict()[key], stock.state_dict()[key])


@pytest.mark.parametrize("model_type", ["stablelm", "nemotron"])
def test_layers_that_drop_arguments_work_in_threads(model_type: str) -> None:
    """Positions travel with each call, so calls of other lengths at the same time do not disturb it."""
    model = families.model(model_type, "alibi")
    rows = [tiny.tokens(1, length, seed=length) for length in (3, 7, 11, 14) * 4]
    expected = [output(model, row) for row in rows]
    assert differ(expected[-1], output(families.model(model_type, "none"), rows[-1]))
    with ThreadPoolExecutor(max_workers=4) as pool:
        for actual, alone in zip(pool.map(lambda row: output(model, row), rows), expected, strict=True):
            assert_close(actual, alone)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["stablelm", "nemotron"])
def test_layers_that_drop_arguments_can_be_compiled(model_type: str) -> None:
    model, ids = families.model(model_type, "alibi"), tiny.tokens(2, 12)
    expected = output(model, ids)
    torch._dynamo.reset()
    assert_close(output(torch.compile(model, fullgraph=True, backend="eager"), ids), expected)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "vaultgemma"])
def test_terms_of_values_are_refused_where_logits_are_capped(model_type: str) -> None:
    """Before anything is written, not in the first forward pass; without these terms is the control."""
    scheme = {"type": "shaw", "max_distance": 4}
    with pytest.raises(PosEncError, match=f'{model_type} caps its attention logits .*"values": false'):
        families.model(model_type, scheme)
    assert output(families.model(model_type, {**scheme, "values": False}), tiny.tokens(1, 12)).isfinite().all()
