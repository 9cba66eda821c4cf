"""Every supported model type under many schemes. The fast tests sample the traits in which the types differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hf_posenc
from hf_posenc.model_types import ALIASES, MODEL_TYPES
from hf_posenc.patches import ARCHITECTURES, base_models
from tests.support import families
from tests.support import tiny_models as tiny
from tests.support.families import OWN, SCHEMES, Pair, assert_close, differ, output

CHANGING = [name for name in SCHEMES if name != OWN]
EXTENDING = [name for name in CHANGING if name != "tupe"]
WITH_PARAMETERS = ["t5", "shaw", "deberta", "tupe", "transformer_xl", "cope", "fire", "ssmax", "forget"]
IDS = tiny.tokens(2, 14)
"""Longer than the sliding windows."""


def has_sdpa(model_type: str) -> bool:
    return len(families.backends(model_type)) > 1


def load(model_type: str, directory: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model from a checkpoint, and what its loading reported."""
    backend = families.backends(model_type)[0]
    options = {"attn_implementation": backend, "output_loading_info": True, **options}
    model, report = families.auto_class(model_type).from_pretrained(directory, **options)
    return model.eval(), {name: keys for name, keys in report.items() if keys}


def test_every_model_type_has_a_record() -> None:
    assert set(MODEL_TYPES) <= set(ARCHITECTURES)
    assert set(families.MODEL_TYPES) <= {*MODEL_TYPES, *ALIASES}  # collected before other tests may add types
    for trait, model_types in families.TRAITS.items():
        assert set(model_types) <= {*MODEL_TYPES, *ALIASES}, trait


@families.numeric_settings
def test_own_encoding_equals_stock_to_the_bit(model_type: str, dtype: torch.dtype, backend: str) -> None:
    """And the traits of the stock model are those that the other tests are sampled by."""
    model = families.model(model_type, dtype=dtype, backend=backend)
    base = next(module for module in model.modules() if isinstance(module, ARCHITECTURES[model_type].base))
    assert families.detect_traits(base) == families.traits(model_type)
    expected = output(model, IDS)
    assert differ(expected, output(model, IDS.flip(1)).flip(1))  # the control: order matters
    model = families.model(model_type, families.scheme_for(model_type, OWN), dtype, backend)
    assert base_models(model)
    assert torch.equal(output(model, IDS), expected)
    assert torch.equal(output(hf_posenc.restore(model), IDS), expected)


@families.pairs(CHANGING)
def test_scheme_matters_and_restore_undoes_it(pair: Pair) -> None:
    stock = output(families.model(pair.model_type), IDS)
    model = pair.build()
    assert differ(output(model, IDS), stock)
    if pair.name != "none":
        assert differ(output(model, IDS), output(families.model(pair.model_type, "none"), IDS))
    assert torch.equal(output(hf_posenc.restore(model), IDS), stock)


@families.pairs(list(SCHEMES), only=families.is_causal)
def test_cached_equals_full(pair: Pair) -> None:
    """A prefill shorter than the window, a chunk that crosses it, and single tokens."""
    model = pair.build()
    full = output(model, IDS, use_cache=False)
    cache, steps = None, []
    for start, stop in [(0, 6), (6, 11), (11, 12), (12, 13), (13, 14)]:
        with torch.no_grad():
            outputs = model(IDS[:, start:stop], past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        steps.append(outputs.last_hidden_state)
    assert_close(torch.cat(steps, dim=1), full)
    assert differ(steps[1], output(model, IDS[:, 6:11]))  # the control: without the cache, they differ


@families.pairs(list(SCHEMES))
def test_padded_equals_alone(pair: Pair) -> None:
    model = pair.build()
    padding, real = torch.full((2, 4), tiny.PAD), torch.ones_like(IDS)
    alone = output(model, IDS)
    left, right = torch.cat([padding, IDS], 1), torch.cat([IDS, padding], 1)
    left_mask, right_mask = (torch.cat(parts, 1) for parts in ((0 * padding, real), (real, 0 * padding)))
    assert_close(output(model, left, attention_mask=left_mask)[:, 4:], alone)
    assert_close(output(model, right, attention_mask=right_mask)[:, :-4], alone)
    assert differ(output(model, left)[:, 4:], alone)  # the control: without the mask, padding is seen


@families.pairs(list(SCHEMES))
def test_packed_equals_alone(pair: Pair) -> None:
    model, options = pair.build(), {"use_cache": False} if families.is_causal(pair.model_type) else {}
    first = ARCHITECTURES[pair.model_type].first_position(model.config)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None] + first
    packed = output(model, IDS, position_ids=positions, **options)
    alone = torch.cat([output(model, IDS[:, :5]), output(model, IDS[:, 5:])], dim=1)
    assert_close(packed, alone)
    assert differ(output(model, IDS), alone)


@families.pairs(list(SCHEMES), only=has_sdpa)
def test_eager_equals_sdpa(pair: Pair) -> None:
    model = pair.build(backend="sdpa")
    expected = output(model, IDS)
    model.set_attn_implementation("eager")
    assert_close(output(model, IDS), expected)


@families.pairs(WITH_PARAMETERS)
def test_gradients_reach_scheme_parameters(pair: Pair) -> None:
    """Also under gradient checkpointing, with the same gradients."""
    model, gradients = pair.build().train(), []
    for checkpointing in (False, True):
        model.zero_grad()
        torch.manual_seed(0)  # PhiMoE samples its experts while training
        if checkpointing and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(IDS, **({"use_cache": False} if families.is_causal(pair.model_type) else {}))[
            0
        ].square().mean().backward()
        parameters = {name: value for name, value in model.named_parameters() if "position_scheme" in name}
        assert parameters
        assert all(value.grad is not None for value in parameters.values())
        assert any(value.grad.any() for value in parameters.values())
        gradients.append({name: value.grad.clone() for name, value in parameters.items()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient)


@families.pairs(EXTENDING)
def test_runs_past_the_trained_length(pair: Pair) -> None:
    states = output(pair.build(), tiny.tokens(1, tiny.TRAINED_LENGTH + 22))
    assert states.shape[1] == tiny.TRAINED_LENGTH + 22
    assert states.isfinite().all()


@families.pairs(["shaw"])
def test_neutral_scheme_beside_the_own_encoding_changes_nothing(pair: Pair) -> None:
    stock = output(families.model(pair.model_type), IDS)
    model = families.model(pair.model_type, [families.scheme_for(pair.model_type, OWN), pair.scheme])
    assert differ(output(model, IDS), stock)  # the control: its tables are random
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_scheme" in name:
                parameter.zero_()
    assert_close(output(model, IDS), stock)


@families.pairs([OWN, "alibi", "shaw"])
def test_save_and_load(pair: Pair, tmp_path: Path) -> None:
    """Stock checkpoint, variant, saved variant: no key is reported, and nothing changes but by the scheme."""
    auto = families.auto_class(pair.model_type)
    stock = families.model(pair.model_type, auto=auto)
    stock.save_pretrained(tmp_path / "stock")
    expected = output(load(pair.model_type, tmp_path / "stock")[0], IDS)
    model, report = load(pair.model_type, tmp_path / "stock", position_scheme=pair.scheme)
    assert not report
    assert torch.equal(output(model, IDS), expected) == (pair.name == OWN)
    tiny.randomise_scheme(model)
    model.save_pretrained(tmp_path / "variant")
    loaded, report = load(pair.model_type, tmp_path / "variant")
    assert not report
    assert type(loaded) is type(model)
    assert torch.equal(output(loaded, IDS), output(model, IDS))


@families.pairs([OWN, "alibi"])
def test_damaged_checkpoints_are_reported_as_by_stock(pair: Pair, tmp_path: Path) -> None:
    """The control for the test above."""
    pair.build()  # skips what this release cannot build
    families.model(pair.model_type, auto=families.auto_class(pair.model_type)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if re.search(r"\.0\..*(norm|ln_1|mlp)", name, re.IGNORECASE))
    weights["unknown.weight"] = weights.pop(lost)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    _, expected = load(pair.model_type, tmp_path)
    _, report = load(pair.model_type, tmp_path, position_scheme=pair.scheme)
    assert {name: set(keys) for name, keys in report.items()} == {name: set(keys) for name, keys in expected.items()}
    assert report["missing_keys"]
    assert report["unexpected_keys"]


@families.pairs(list(SCHEMES), only=families.generates)
def test_generate_with_cache_equals_without(pair: Pair) -> None:
    model = pair.build(auto=families.auto_class(pair.model_type))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, tiny.PAD
    prompt = IDS[:, :6].clone()
    mask = torch.ones_like(prompt)
    prompt[0, :2] = mask[0, :2] = tiny.PAD
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    cached = model.generate(prompt, **options)
    assert cached.shape == (2, 15)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), cached)
