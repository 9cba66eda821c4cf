"""Fuzzing of what others write: whatever a config.json, a position_scheme or a safetensors header says, a checkpoint is
either read or refused with `PosEncError`, within bounded memory."""

from __future__ import annotations

import copy
import functools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.checkpoints import read_shards
from hf_posenc.spec import parse_position_scheme
from tests.checkpoints.stock_checkpoints import save_stock
from tests.checkpoints.test_untrusted_input import limited_resources
from tests.support.evidence import count_cases

FAST = {"configs": 50, "schemes": 150, "headers": 100}
SLOW = {"configs": 3000, "schemes": 4000, "headers": 4000}


def examples(name: str) -> pytest.MarkDecorator:
    """Run a fuzzer with few cases, and with many: more than 10,000 in total."""
    many = pytest.param(SLOW[name], id="slow", marks=pytest.mark.slow)
    return pytest.mark.parametrize("examples", [pytest.param(FAST[name], id="fast"), many])


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
)
CONFIG_NAMES = [
    *(
        "architectures",
        "attribute_map",
        "sub_configs",
        "transformers_weights",
        "hidden_size",
        "max_position_embeddings",
    ),
    *("_attn_implementation", "_experts_implementation", "_auto_class", "__dict__", "stock_class", "_position_specs"),
    *("save_pretrained", "to_json_file", "to_dict", "validate", "_get_generation_parameters"),
]
"""Names that mean something to transformers' configs; the last are methods."""
WORDS = st.sampled_from(
    [
        "",
        "rope",
        "alibi",
        "t5",
        "learned",
        "gpt2",
        "posenc_gpt2",
        "posenc_bert",
        "llama",
        "nobody/code",
        "auto",
        "F32",
        "\0",
        *CONFIG_NAMES,
    ]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8))
JSON = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(WORDS | st.text(max_size=8), values, max_size=4),
    max_leaves=12,
)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of a fuzzer: the same cases in every run, without a limit on the time of each."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    source = save_stock(tmp_path / "source")
    hf_posenc.convert_checkpoint(source, [{"type": "t5", "num_buckets": 8}, "alibi"], tmp_path / "variant")
    return tmp_path / "variant"


def accepts(read: Callable[[], object]) -> bool:
    """Whether something was read, with little memory and time; any error but `PosEncError` is a failure of the test."""
    with limited_resources():
        try:
            read()
        except PosEncError as error:
            assert 0 < len(str(error)) < 5000
            return False
    return True


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


@st.composite
def changed(draw: st.DrawFn, original: Any) -> Any:
    """The original with one to three values replaced, removed or added."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_in(value))
        if not paths:
            return draw(JSON)
        *parents, last = draw(st.sampled_from(paths))
        container = functools.reduce(lambda item, key: item[key], parents, value)
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del container[last]
        elif action == "add" and isinstance(container, dict):
            container[draw(st.sampled_from([*container]) | WORDS | st.text(max_size=8))] = draw(JSON)
        else:
            container[last] = draw(JSON)
    return value


@examples("configs")
def test_configs(examples: int, checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    original = json.loads(path.read_text())
    accepted: list[bool] = []

    @fuzz(examples)
    @given(changed(original))
    def check(fields: Any) -> None:
        path.write_text(json.dumps(fields))
        accepted.append(accepts(lambda: hf_posenc.inspect_checkpoint(checkpoint)))

    hf_posenc.inspect_checkpoint(checkpoint)  # imports the model
    check()
    assert {True, False} == set(accepted), "some configs are read, and others refused"
    count_cases("fuzzed configs", len(accepted))


@examples("schemes")
def test_position_schemes(examples: int) -> None:
    schemes = list(hf_posenc.list_schemes())
    known = st.fixed_dictionaries({"type": st.sampled_from(schemes)})
    options = sorted({option for info in hf_posenc.list_schemes().values() for option in info.options})
    spec = st.builds(
        lambda base, rest: {**base, **rest}, known, st.dictionaries(st.sampled_from(options), JSON, max_size=3)
    )
    accepted: list[bool] = []

    @fuzz(examples)
    @given(spec | st.lists(spec | st.sampled_from(schemes), max_size=3) | JSON)
    def check(scheme: Any) -> None:
        accepted.append(accepts(lambda: parse_position_scheme(scheme)))

    check()
    assert {True, False} == set(accepted), "some schemes are accepted, and others refused"
    count_cases("fuzzed schemes", len(accepted))


@examples("headers")
def test_safetensors_headers(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    data = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int8)}, metadata={"format": "pt"})
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header_bytes = st.one_of(
        changed(header).map(lambda fields: json.dumps(fields).encode()),
        st.binary(max_size=64),
        st.builds(
            lambda at, byte: data[8:][:at] + byte + data[9:][at:size], st.integers(0, size), st.binary(max_size=2)
        ),
    )
    sizes = st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 2 * size)
    accepted: list[bool] = []

    @fuzz(examples)
    @given(header_bytes, sizes, st.integers(0, len(body)))
    def check(content: bytes, claimed: int | None, kept: int) -> None:
        length = len(content) if claimed is None else claimed
        path.write_bytes(struct.pack("<Q", length) + content + body[: len(body) if claimed is None else kept])
        accepted.append(accepts(lambda: read_shards(tmp_path)))

    check()
    path.write_bytes(data)
    assert accepts(lambda: read_shards(tmp_path))
    assert False in accepted
    count_cases("fuzzed safetensors headers", len(accepted))
