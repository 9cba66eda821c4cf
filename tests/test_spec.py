"""The grammar of `position_scheme`: what is valid builds and runs, what is not raises and names the key."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.registry import SCHEMES
from hf_posenc.spec import OTHER_NAMES, parse_position_scheme
from tests.support import tiny_models as tiny


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        ("roep", "unknown type 'roep'.*did you mean 'rope'"),
        ("", "unknown type ''"),
        (3, "name, a dict with a type, or a list"),
        ([], "empty list"),
        ([["rope"]], "name, a dict with a type, or a list"),
        ({}, "has no type"),
        ({"num_buckets": 3}, "has no type"),
        ({"type": ["rope"]}, "unknown type"),
        ({"type": "t5", "num_bucket": 3}, "t5: unknown option 'num_bucket'.*did you mean 'num_buckets'"),
        ({"type": "t5", "num_buckets": 0}, "num_buckets must be at least 2, got 0"),
        ({"type": "t5", "num_buckets": -4}, "num_buckets"),
        ({"type": "t5", "num_buckets": "32"}, "num_buckets must be a whole number, got '32'"),
        ({"type": "t5", "num_buckets": True}, "num_buckets must be a whole number"),
        ({"type": "t5", "shared": 1}, "shared must be true or false"),
        ({"type": "rope", "theta": 0}, "theta must be above 0"),
        ({"type": "rope", "theta": float("nan")}, "theta must be a finite number"),
        ({"type": "rope", "layout": "half"}, "layout must be 'halves' or 'interleaved'"),
        ({"type": "rope", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"type": "rope", "scaling": "yarn"}, "scaling must be a dict or None"),
        ({"type": "rope", "layers": []}, "layers must be a list"),
        ({"type": "rope", "layers": [-1]}, "layers must be a list"),
        ({"type": "rope", "layers": "0:2:0"}, "layers must be a list"),
        ({"type": "rope", "layers": "0:2:00"}, "layers must be a list"),
        ({"type": "rope", "theta": 10**400}, "theta must be a finite number"),
        ({"type": "t5", "init": "fit"}, "'neutral' or 'paper', got 'fit'; hf_posenc.fit and hf-posenc train"),
        ({"type": "sinusoidal", "mix": "stir"}, "mix must be 'add'"),
        ({"type": "rope", "layers": "first"}, "layers must be a list"),
        ({"type": "rope", "layers": [True]}, "layers must be a list"),
        ({"type": "learned", "layers": [0]}, "learned acts at the input embedding, where layers"),
        ({"type": "sinusoidal", "layers": "0:1"}, "sinusoidal acts at the input embedding, where layers"),
        ({"type": "learned", "max_positions": 0}, "max_positions"),
        ({"type": "learned", "extend": "stretch"}, "extend must be"),
        ({"type": "sinusoidal", "base": 1}, "base must be above 1"),
        (["rope", "alibbi"], "did you mean 'alibi'"),
        ({"type": "rope", "except_layers": "last"}, "rope: except_layers must be a list"),
        ({"type": "rope", "except_layer": [1]}, "unknown option 'except_layer'.*did you mean 'except_layers'"),
        ({"type": "learned", "except_layers": [0]}, "input embedding, where except_layers has no meaning"),
        (["rope", "none"], "lists none, which means no positions in any layer, with other schemes"),
        (["none", "none"], "lists none"),
        (["learned", {"type": "none", "layers": [0]}], "none: layers cannot be combined with learned"),
        (["alibi", "sinusoidal", {"type": "none", "layers": [0]}], "cannot be combined with sinusoidal.*except_layers"),
    ],
)
def test_bad_values_name_the_key(scheme: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_position_scheme(scheme)
    with pytest.raises(ValueError, match=match):
        tiny.config("gpt2", position_scheme=scheme)
    config = tiny.config("gpt2")
    with pytest.raises(ValueError, match=match):
        config.position_scheme = scheme
    assert config.position_scheme is None


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("0:6", range(6)),
        ("3::4", [3, 7, 11]),
        ("-2:", [10, 11]),
        ([1, 5], [1, 5]),
        (":", range(12)),
        ("::2", range(0, 12, 2)),
    ],
)
def test_layers(layers: Any, chosen: Any) -> None:
    (item,) = parse_position_scheme({"type": "rope", "layers": layers})
    assert item.active_layers(12) == tuple(chosen)


@pytest.mark.parametrize(
    ("item", "chosen"),
    [
        ({"except_layers": "3::4"}, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ({"except_layers": [0, 11]}, range(1, 11)),
        ({"layers": "0:6", "except_layers": [1, 9]}, [0, 2, 3, 4, 5]),
    ],
)
def test_except_layers(item: Any, chosen: Any) -> None:
    (spec,) = parse_position_scheme({"type": "rope", **item})
    assert spec.active_layers(12) == tuple(chosen)


@pytest.mark.parametrize(
    ("typed", "spelling"),
    [
        ("yarn", '{"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}'),
        ({"type": "YaRN", "factor": 4}, '{"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}'),
        ("ntk", '{"type": "rope", "theta": 80000.0}'),
        ("nope", '"none"'),
        ("NoPE", '"none"'),
        ("relative_key", '{"type": "shaw", "values": false}'),
        ("relative-key-query", '{"type": "shaw", "values": false, "query_term": true}'),
        ("absolute", '"learned"'),
        ("rotary", '"rope"'),
        ("drope", "hf-posenc train --recipe drope"),
        ("ReRoPE", '{"type": "rope", "extend": {"method": "rerope"}}'),
        ("self-extend", '{"type": "rope", "extend": {"method": "self_extend"}}'),
        ("dca", '{"type": "rope", "extend": {"method": "dca"}}'),
        ("fox", '"forget"'),
        ("cable", '{"type": "forget", "form": "cable"}'),
        ("ssmax", '["rope", {"type": "temperature", "form": "ssmax"}]'),
        ("pose", "hf-posenc train --positions pose"),
        ("ALiBi", '"alibi"'),
        ("Transformer-XL", '"transformer_xl"'),
        ("rpe", '"t5" or "shaw"'),
        ("pi", '{"type": "rope", "scaling": {"rope_type": "linear", "factor": 2.0}}'),
    ],
)
def test_names_of_other_packages_are_answered_with_the_spelling(typed: Any, spelling: str) -> None:
    with pytest.raises(PosEncError, match="unknown type") as raised:
        parse_position_scheme(typed)
    assert str(raised.value).endswith(spelling)


def test_suggested_spellings_are_accepted() -> None:
    complete = [text for text in OTHER_NAMES.values() if "..." not in text]
    spellings = [spelling for text in complete for spelling in re.findall(r'\{[^{}]*(?:\{[^{}]*\})?\}|"\w+"', text)]
    without = [text for text in OTHER_NAMES.values() if "..." in text or "--positions" in text]
    assert len(spellings) >= len(OTHER_NAMES) - len(without)
    for spelling in spellings:
        tiny.model("llama", json.loads(spelling), torch.float32, num_hidden_layers=4)
    assert not OTHER_NAMES.keys() & hf_posenc.list_schemes().keys()


@pytest.mark.parametrize(
    ("scaling", "match"),
    [
        ({"rope_type": "linear", "factor": 0}, "factor must be above 0"),
        ({"rope_type": "linear", "factor": -1.0}, "factor must be above 0"),
        ({"rope_type": "yarn", "factor": 0.0}, "factor must be above 0"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta must be above 0"),
        ({"rope_type": "linear"}, "linear' is incomplete"),
        ({"rope_type": "linear", "factor": "two"}, "factor must be a finite number"),
        ({"rope_type": "longrope", "factor": 2, "short_factor": [1.0], "long_factor": [1.0, 2.0]}, "longrope"),
        ({"rope_type": "nonsense"}, "rope_type 'nonsense' is unknown"),
        ({"factor": 2.0}, "needs a rope_type"),
        ({"rope_type": "linear", "factor": 2.0, "wobble": 1}, "no setting 'wobble'"),
    ],
)
def test_bad_scalings_are_refused_when_the_model_is_built(scaling: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tiny.MODEL_CLASSES["llama"](tiny.config("llama", position_scheme={"type": "rope", "scaling": scaling}))


YARN = {"rope_type": "yarn", "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    "rope",
    [
        {"scaling": {**YARN, "attention_factor": 1e30}},
        {"scaling": {**YARN, "attention_factor": 1e-300}},
        {"scaling": {**YARN, "attention_factor": "1"}},
        {"scaling": {**YARN, "mscale": 1e30, "mscale_all_dim": 1.0}},
        {"scaling": {**LONGROPE, "attention_factor": 1e30}},
        {"scaling": {**LONGROPE, "attention_factor": [1.0]}},
        {"scaling": {**LONGROPE, "short_factor": [1e-30] * 4}},
        {"scaling": {**LONGROPE, "long_factor": [1e-30] * 4}},
        {"scaling": {"rope_type": "linear", "factor": 1e-30}},
        {"scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": "x"}},
        {"theta": 1e-30},
    ],
    ids=str,
)
def test_rotations_that_overflow_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(PosEncError, match="rope"):
        tiny.model("llama", {"type": "rope", **rope}, torch.float32)
    stock = {"rope_theta": 1e4, **rope.get("scaling", {"rope_type": "default", "rope_theta": rope.get("theta")})}
    with pytest.raises(ValueError, match="rope|factor"):
        tiny.MODEL_CLASSES["llama"](tiny.config("llama", rope_parameters=stock, position_scheme="rope"))


def test_usual_rotations_are_accepted() -> None:
    for scaling in ({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, {**LONGROPE, "attention_factor": None}):
        model = tiny.model("llama", {"type": "rope", "theta": 1e7, "scaling": scaling}, torch.float32)
        assert model(tiny.tokens()).logits.isfinite().all()


def test_layers_out_of_range() -> None:
    with pytest.raises(ValueError, match="layer 12.*0 to 11"):
        parse_position_scheme({"type": "rope", "layers": [12]})[0].active_layers(12)
    with pytest.raises(ValueError, match="selects none of the 12 layers"):
        parse_position_scheme({"type": "rope", "layers": "20:"})[0].active_layers(12)
    with pytest.raises(ValueError, match="except_layers has no layer 12"):
        parse_position_scheme({"type": "rope", "except_layers": [12]})[0].active_layers(12)
    with pytest.raises(ValueError, match="except_layers=':' leaves none"):
        parse_position_scheme({"type": "rope", "except_layers": ":"})[0].active_layers(12)


def test_schemes_are_listed_with_typed_and_documented_options() -> None:
    listing = hf_posenc.list_schemes()
    assert set(listing) >= {"learned", "sinusoidal", "rope", "alibi", "t5", "none"}
    for name, info in listing.items():
        assert info.name == name
        assert info.summary
        assert info.paper
        assert name in str(info)
        for option, about in info.options.items():
            assert about.doc, f"{name}.{option} has no documentation"
            assert about.type
    assert listing["t5"].options["num_buckets"].default == 32
    assert {"layers", "except_layers"} <= listing["rope"].options.keys()
    assert not {"layers", "except_layers"} & listing["learned"].options.keys()


def values_for(hint: Any) -> st.SearchStrategy[Any]:
    """Plausible and implausible values for an option of a type."""
    wild = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 5),
        st.text(max_size=3),
        st.floats(),
        st.lists(st.integers(0, 3), max_size=2),
    )
    if typing.get_origin(hint) is typing.Literal:
        return st.one_of(st.sampled_from(typing.get_args(hint)), wild)
    parts = (hint,) if typing.get_origin(hint) is list else typing.get_args(hint) or (hint,)
    sane = []
    for annotation in parts:
        if annotation is int:
            sane.append(st.integers(1, 80))
        elif annotation is float:
            sane.append(st.one_of(st.floats(0.01, 1.0), st.floats(1.5, 1e6)))
        elif annotation is bool:
            sane.append(st.booleans())
        elif annotation is type(None):
            sane.append(st.none())
        elif typing.get_origin(annotation) is typing.Literal:
            sane.append(st.sampled_from(typing.get_args(annotation)))
        elif typing.get_origin(annotation) is list:
            sane.append(st.lists(st.sampled_from(["c2p", "p2c"]), max_size=3))
        elif typing.get_origin(annotation) is dict:
            sane.append(
                st.fixed_dictionaries(
                    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "default", "bent"])},
                    optional={"factor": st.floats(-1, 8), "rope_theta": st.floats(-1, 1e4), "wobble": st.just(1)},
                )
            )
    return st.one_of(*sane, *sane, *sane, wild)


def item_strategy(name: str) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(SCHEMES[name].Options)
    options = {field.name: values_for(hints[field.name]) for field in dataclasses.fields(SCHEMES[name].Options)}
    for key in ("layers", "except_layers"):
        options[key] = st.one_of(
            st.sampled_from(["0:2", "1::2", "::", "9:", "x"]), st.lists(st.integers(-1, 4), max_size=3)
        )
    options["typo"] = st.integers()
    return st.fixed_dictionaries({"type": st.just(name)}, optional=options)


ITEMS = st.one_of(*[item_strategy(name) for name in sorted(SCHEMES)], st.sampled_from(sorted(SCHEMES)))
SCHEMES = st.one_of(ITEMS, st.lists(ITEMS, min_size=1, max_size=3))


def keys_of(scheme: Any) -> set[str]:
    items = scheme if isinstance(scheme, list) else [scheme]
    return {key for item in items if isinstance(item, dict) for key in item} - {"type"}


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(scheme=SCHEMES, architecture=st.sampled_from(["bert", "gpt2", "llama"]))
def test_every_value_builds_and_runs_or_names_the_offending_key(scheme: Any, architecture: str) -> None:
    try:
        model = tiny.MODEL_CLASSES[architecture](tiny.config(architecture, position_scheme=scheme)).eval()
    except ValueError as error:
        causal_only = any(name in str(scheme) for name in ("cope", "forget"))
        on_encoder = architecture == "bert" and causal_only and "causal models only" in str(error)
        contradictory = isinstance(scheme, list) and "none" in str(scheme) and "none" in str(error)
        assert on_encoder or contradictory or any(key in str(error) for key in keys_of(scheme)), (scheme, error)
        return
    try:
        with torch.no_grad():
            output = model(tiny.tokens(1, 6), use_cache=False)[0]
    except ValueError as error:
        # Fewer positions asked for than the input has, or a decay that leaves the dtype within it.
        assert any(key in str(error) for key in keys_of(scheme) | {"table serves"}), (scheme, error)
        return
    assert output.isfinite().all(), scheme


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(scheme=JSON)
def test_any_json_is_read_or_refused_with_a_value_error(scheme: Any) -> None:
    try:
        parse_position_scheme(scheme)
    except ValueError as error:
        assert "position_scheme" in str(error) or "unknown option" in str(error)
