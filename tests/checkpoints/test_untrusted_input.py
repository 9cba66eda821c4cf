"""A config.json or a checkpoint from a stranger: refused with words, before memory is taken or anything is run."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import validation as limits
from hf_posenc.cli import app
from hf_posenc.registry import SCHEMES
from hf_posenc.spec import parse_position_scheme
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level

MOST_BYTES, MOST_SECONDS = 200 * 2**20, 5.0
HUGE = 10**12


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = "rope"
    for _ in range(depth):
        value = [value] if kind == "list" else {"type": value}
    return value


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Neither memory nor time is spent. Where the system does not say what was, only time is watched."""
    reset = Path("/proc/self/clear_refs")
    watched = reset.exists()
    if watched:
        reset.write_text("5")
        before = _peak()
    start = time.monotonic()
    yield
    assert time.monotonic() - start < MOST_SECONDS
    if watched:
        assert _peak() - before < MOST_BYTES


def test_the_bound_sees_memory_that_is_taken_and_given_back() -> None:
    with pytest.raises(AssertionError), bounded():
        torch.ones(MOST_BYTES // 4 + 2**22)


def _options_of(name: str) -> list[str]:
    hints = {key: info.type for key, info in hf_posenc.list_schemes()[name].options.items()}
    return [key for key, kind in hints.items() if "number" in kind and key != "layers"]


NUMBERS = [(name, key) for name in SCHEMES for key in _options_of(name)]
WRONG: list[Any] = [10**30, -1, math.nan, math.inf, True, "8", [8], {"a": 8}, nested(5)]


@pytest.mark.parametrize(("name", "key"), NUMBERS)
def test_no_option_takes_what_is_no_number_of_its_kind(name: str, key: str) -> None:
    optional = {"mix": "concat"} if key == "position_size" else {}
    for value in WRONG:
        whole = "whole" in hf_posenc.list_schemes()[name].options[key].type
        if value == 10**30 and not whole:
            continue
        with bounded(), pytest.raises(ValueError, match=key) as error:
            parse_position_scheme({"type": name, **optional, key: value})
        assert len(str(error.value)) < 1000


SCHEMES: dict[str, Any] = {
    "buckets": {"type": "t5", "num_buckets": HUGE, "max_distance": HUGE + 1},
    "buckets within a number": {"type": "t5", "num_buckets": 2**31 - 2, "max_distance": 2**31 - 1},
    "buckets a layer": {"type": "t5", "num_buckets": 2**28, "max_distance": 2**29, "shared": False},
    "shaw": {"type": "shaw", "max_distance": 2**30},
    "deberta": {"type": "deberta", "max_distance": 2**30},
    "tupe": {"type": "tupe", "max_positions": 2**30},
    "cope": {"type": "cope", "max_positions": 2**30},
    "window": {"type": "window", "window_size": 2**30},
    "concat": {"type": "sinusoidal", "mix": "concat", "position_size": 2**30},
    "learned": {"type": "learned", "max_positions": HUGE},
    "degree": {"type": "polynomial", "degree": 2**30},
    "rates": {"type": "exponential", "rates": 2**30},
    "units": {"type": "fire", "units": 10**9},
    "deep lists": nested(100),
    "deep dicts": nested(100, "dict"),
    "deep scaling": {"type": "rope", "scaling": {"rope_type": "linear", "factor": nested(100)}},
    "many": ["alibi"] * 100_000,
    "many tables": [{"type": "tupe", "max_positions": 2**22}] * 32,
    "many layers": {"type": "rope", "layers": list(range(100_000))},
    "far layer": {"type": "rope", "layers": [HUGE]},
    "long slice": {"type": "rope", "layers": "0:" + "9" * 5000},
    "long name": "x" * 1_000_000,
    "long key": {"type": "rope", "y" * 5000: 1},
    "long factors": {"type": "rope", "scaling": {"rope_type": "longrope", "short_factor": [1.0] * 30_000}},
    "handover steps": {"type": "rope", "handover": {"from": "stock", "steps": 10**30}},
    "handover step": {"type": "rope", "handover": {"from": "stock", "steps": 5, "step": 10**30}},
    "handover shape": {"type": "rope", "handover": {"from": "stock", "steps": 5, "shape": nested(6)}},
    "handover from": {"type": "rope", "handover": {"from": {"model": "x"}, "steps": 5}},
    "handover": {"type": "rope", "handover": [1] * 15_000},
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_level.saved("gpt2", tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def variant(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("variants") / "variant"
    hf_posenc.convert_checkpoint(stock, "t5", out)
    return out


def with_fields(source: Path, directory: Path, **fields: Any) -> Path:
    shutil.copytree(source, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return directory


def refused(*line: Any) -> str:
    """What the command says when it exits with 2."""
    with bounded():
        done = CliRunner().invoke(app, list(map(str, line)))
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 4000
    return done.stderr


def training(model: Path, tmp_path: Path, *more: Any) -> list[Any]:
    (tmp_path / "text.txt").write_text(word_level.text(400))
    line = ["train", "--model", model, "--data", tmp_path / "text.txt", "--train-length", 16, "--max-steps", 1]
    return [*line, "--output-dir", tmp_path / "out", "--report-to", "none", "--use-cpu", "--recipe", "naive", *more]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_hostile_scheme_in_a_config_is_refused(name: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    directory = with_fields(variant, tmp_path / "variant", position_scheme=scheme)
    with bounded(), pytest.raises(ValueError) as error:  # noqa: PT011
        AutoModel.from_pretrained(directory)
    assert len(str(error.value)) < 2000
    for architecture in ("bert", "gpt2", "llama"):
        with bounded(), pytest.raises(ValueError):  # noqa: PT011
            AutoModel.from_config(tiny.config(architecture, position_scheme=scheme))
    with bounded(), pytest.raises(ValueError):  # noqa: PT011
        hf_posenc.convert_checkpoint(stock, scheme, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
    refused("inspect", directory)


@pytest.mark.parametrize("name", ["buckets within a number", "deep lists", "many"])
def test_commands_that_are_given_one_refuse_it(name: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    scheme = json.dumps(SCHEMES[name])
    refused("convert", stock, "--out", tmp_path / "converted", "--scheme", scheme)
    refused(*training(stock, tmp_path, "--scheme", scheme))
    refused(*training(with_fields(variant, tmp_path / "variant", position_scheme=SCHEMES[name]), tmp_path))


@pytest.mark.parametrize("depth", [10_000, 400])
def test_nesting_beyond_what_json_is_read_to(depth: int, stock: Path, tmp_path: Path) -> None:
    deep = "[" * depth + "]" * depth
    directory = Path(shutil.copytree(stock, tmp_path / "deep"))
    text = (directory / "config.json").read_text().rstrip()[:-1]
    (directory / "config.json").write_text(f'{text}, "position_scheme": {deep}}}')
    with bounded(), pytest.raises((ValueError, RecursionError)):  # transformers reads the file before we see it
        AutoConfig.from_pretrained(directory)
    with bounded(), pytest.raises(ValueError, match="config of transformers"):
        hf_posenc.convert_checkpoint(directory, "rope", tmp_path / "converted")
    refused("convert", stock, "--out", tmp_path / "converted", "--scheme", deep)
    refused("inspect", directory)
    refused(*training(directory, tmp_path, "--scheme", "rope"))


SIZES: dict[str, Any] = {
    "n_embd": [HUGE, -1, 0, "32", 32.5, True, [32]],
    "n_layer": [10**9, 1000, -1, "3"],
    "n_head": [10**9, 0],
    "n_positions": [HUGE, 0],
    "vocab_size": [HUGE],
    "n_inner": [HUGE],
    "num_labels": [10**9],
}


@pytest.mark.parametrize("field", SIZES)
def test_hostile_sizes_of_a_model_are_refused(field: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    for number, value in enumerate(SIZES[field]):
        fields = {"model_type": "gpt2", field: value}
        bad = with_fields(stock, tmp_path / f"stock-{number}", **fields)
        with bounded(), pytest.raises(ValueError, match="config"):
            hf_posenc.convert_checkpoint(bad, "transformer_xl", tmp_path / "converted")
        refused("inspect", bad)
        if value != 1000:  # which a model may have, but not this one
            refused(*training(bad, tmp_path, "--scheme", "alibi"))
            with bounded(), pytest.raises(ValueError, match=f"config's {field}"):
                AutoConfig.from_pretrained(with_fields(variant, tmp_path / f"variant-{number}", **{field: value}))


def test_sizes_that_are_each_possible_but_not_together() -> None:
    with bounded(), pytest.raises(ValueError, match="parameters, more than"):
        limits.refuse_sizes({"hidden_size": 2**16, "num_hidden_layers": 1024})
    limits.refuse_sizes(
        {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248, "vocab_size": 128256}
    )


def test_a_config_set_by_hand_is_looked_at_when_a_model_is_built() -> None:
    config = tiny.config("llama", position_scheme="alibi")
    config.__dict__["num_hidden_layers"] = 10**9
    with bounded(), pytest.raises(ValueError, match="num_hidden_layers"):
        AutoModelForCausalLM.from_config(config)


def test_large_schemes_that_are_meant_are_built() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(
            tiny.config("llama", position_scheme={"type": "learned", "max_positions": 1_000_000})
        )
        wide = tiny.config("llama", hidden_size=8192, num_attention_heads=64, position_scheme="transformer_xl")
        AutoModel.from_config(wide)
    assert model.position_scheme[0].weight.shape == (1_000_000, tiny.WIDTH)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["stock", "variant"])
def test_a_pickle_is_never_read(kind: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    directory = with_fields(stock if kind == "stock" else variant, tmp_path / kind)
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    scheme = ["--scheme", "alibi"] if kind == "stock" else []
    lines = [["inspect", directory], training(directory, tmp_path, *scheme)]
    lines += [["convert", directory, "--scheme", "rope", "--out", tmp_path / "converted"]] if kind == "stock" else []
    lines += [["push", directory, "me/model"]] if kind == "variant" else []
    for line in lines:
        assert "pytorch_model.bin, a pickle" in refused(*line), line
    teacher = training(stock, tmp_path, "--scheme", "alibi", "--teacher", "--teacher-model", directory)
    assert "a pickle" in refused(*teacher)
    assert not sprung.exists()
    pickle.loads((directory / "pytorch_model.bin").read_bytes())
    assert sprung.exists(), "the trap is none"


@pytest.mark.parametrize("model_type", ["gpt2", "posenc_gpt2", "stranger"])
def test_code_that_a_config_names_is_not_run(model_type: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    fields = {"model_type": model_type, "auto_map": dict.fromkeys(classes, "trap.Trap")}
    source = variant if model_type == "posenc_gpt2" else stock
    directory = with_fields(source, tmp_path / "bad", **fields)
    (directory / "trap.py").write_text(f"open({str(sprung)!r}, 'w').close()\nclass Trap: pass\n")
    tokenizer = directory / "tokenizer_config.json"
    told = {"auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}, "tokenizer_class": "Trap"}
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), **told}))
    scheme = [] if model_type == "posenc_gpt2" else ["--scheme", "alibi"]
    (tmp_path / "measured.txt").write_text(word_level.text(200))
    for line in (
        ["inspect", directory],
        ["convert", directory, "--scheme", "rope", "--out", tmp_path / "converted"],
        ["convert", directory, "--scheme", "rope", "--out", tmp_path / "two", "--measure", tmp_path / "measured.txt"],
        ["push", directory, "me/model"],
        training(directory, tmp_path, *scheme),
    ):
        done = CliRunner().invoke(app, list(map(str, line)), input="y\n" * 9)
        assert done.exit_code in (0, 2), (line, done.output, done.exception)
        assert not sprung.exists(), line
    if (tmp_path / "converted").exists():
        assert "trap" not in (tmp_path / "converted" / "config.json").read_text()
