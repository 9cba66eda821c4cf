"""Hostile configs and checkpoints are refused before memory is allocated or code is run."""

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
from hf_posenc.cli import app
from hf_posenc.registry import SCHEMES
from hf_posenc.spec import parse_position_scheme
from hf_posenc.validation import check_model_sizes
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.evidence import count_cases
from tests.support.sampling import some

MAX_BYTES, MAX_SECONDS = 200 * 2**20, 10.0
HUGE = 10**12


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = "rope"
    for _ in range(depth):
        value = [value] if kind == "list" else {"type": value}
    return value


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])


@contextlib.contextmanager
def limited_resources(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Assert that little memory and time are used. Without /proc, only time is checked.

    Pages of libraries that the system has dropped from an idle process, and reads again, do not count.
    """
    reset = Path("/proc/self/clear_refs")
    can_measure = reset.exists()
    if can_measure:
        reset.write_text("5")
        before, files_before = _memory("VmHWM"), _memory("RssFile")
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds
    if can_measure:
        read_again = max(_memory("RssFile") - files_before, 0)
        assert _memory("VmHWM") - before - read_again < MAX_BYTES


def test_limit_notices_memory_that_was_freed() -> None:
    with pytest.raises(AssertionError), limited_resources():
        torch.ones(MAX_BYTES // 2)  # float32: twice the limit, as pages that are read again meanwhile do not count


def _numeric_options(name: str) -> list[str]:
    options = hf_posenc.list_schemes()[name].options
    return [key for key, info in options.items() if "number" in info.type and key not in ("layers", "except_layers")]


NUMERIC_OPTIONS = [(name, key) for name in SCHEMES for key in _numeric_options(name)]
INVALID_NUMBERS: list[Any] = [10**30, -1, math.nan, math.inf, True, "8", [8], {"a": 8}, nested(5)]


@pytest.mark.parametrize(("name", "key"), NUMERIC_OPTIONS)
def test_invalid_numbers_in_options(name: str, key: str) -> None:
    required = {"mix": "concat"} if key == "position_size" else {}
    for value in INVALID_NUMBERS:
        is_integer = "whole" in hf_posenc.list_schemes()[name].options[key].type
        if value == 10**30 and not is_integer:
            continue
        with limited_resources(), pytest.raises(ValueError, match=key) as error:
            parse_position_scheme({"type": name, **required, key: value})
        assert len(str(error.value)) < 1000
    count_cases("hostile schemes", len(INVALID_NUMBERS))


HOSTILE_SCHEMES: dict[str, Any] = {
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
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_level.saved("gpt2", tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def variant(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("variants") / "variant"
    hf_posenc.convert_checkpoint(stock, "t5", out)
    return out


def copy_with_config(source: Path, directory: Path, **fields: Any) -> Path:
    shutil.copytree(source, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return directory


def check_refused(*arguments: Any) -> str:
    """Run a command that must exit with 2, and return its error message."""
    with limited_resources():
        done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 4000
    return done.stderr


def train_command(model: Path, tmp_path: Path, *options: Any) -> list[Any]:
    (tmp_path / "text.txt").write_text(word_level.text(400))
    command = ["train", "--model", model, "--data", tmp_path / "text.txt", "--train-length", 16, "--max-steps", 1]
    command += ["--output-dir", tmp_path / "out", "--report-to", "none", "--use-cpu", "--recipe", "naive"]
    return [*command, *options]


@pytest.mark.parametrize("name", HOSTILE_SCHEMES)
def test_hostile_scheme(name: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    scheme = HOSTILE_SCHEMES[name]
    directory = copy_with_config(variant, tmp_path / "variant", position_scheme=scheme)
    with limited_resources(), pytest.raises(ValueError) as error:  # noqa: PT011
        AutoModel.from_pretrained(directory)
    assert len(str(error.value)) < 2000
    for architecture in ("bert", "gpt2", "llama"):
        with limited_resources(), pytest.raises(ValueError):  # noqa: PT011
            AutoModel.from_config(tiny.config(architecture, position_scheme=scheme))
    with limited_resources(), pytest.raises(ValueError):  # noqa: PT011
        hf_posenc.convert_checkpoint(stock, scheme, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
    check_refused("inspect", directory)
    count_cases("hostile schemes", 1)


@some("name", ["buckets within a number", "deep lists", "many"], fast=["deep lists"])
def test_commands_refuse_hostile_schemes(name: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    scheme = json.dumps(HOSTILE_SCHEMES[name])
    check_refused("convert", stock, "--out", tmp_path / "converted", "--scheme", scheme)
    check_refused(*train_command(stock, tmp_path, "--scheme", scheme))
    check_refused(
        *train_command(copy_with_config(variant, tmp_path / "variant", position_scheme=HOSTILE_SCHEMES[name]), tmp_path)
    )


@pytest.mark.parametrize("depth", [10_000, 400])
def test_deeply_nested_config(depth: int, stock: Path, tmp_path: Path) -> None:
    deep = "[" * depth + "]" * depth
    directory = Path(shutil.copytree(stock, tmp_path / "deep"))
    text = (directory / "config.json").read_text().rstrip()[:-1]
    (directory / "config.json").write_text(f'{text}, "position_scheme": {deep}}}')
    with limited_resources(), pytest.raises((ValueError, RecursionError)):  # transformers parses the file first
        AutoConfig.from_pretrained(directory)
    with limited_resources(), pytest.raises(ValueError, match="config.json"):
        hf_posenc.convert_checkpoint(directory, "rope", tmp_path / "converted")
    check_refused("convert", stock, "--out", tmp_path / "converted", "--scheme", deep)
    check_refused("inspect", directory)
    check_refused(*train_command(directory, tmp_path, "--scheme", "rope"))
    count_cases("hostile checkpoints", 1)


HOSTILE_SIZES: dict[str, Any] = {
    "n_embd": [HUGE, -1, 0, "32", 32.5, True, [32]],
    "n_layer": [10**9, 1000, -1, "3"],
    "n_head": [10**9, 0],
    "n_positions": [HUGE, 0],
    "vocab_size": [HUGE],
    "n_inner": [HUGE],
    "num_labels": [10**9],
}


@pytest.mark.parametrize("field", HOSTILE_SIZES)
def test_hostile_model_sizes(field: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    for number, value in enumerate(HOSTILE_SIZES[field]):
        fields = {"model_type": "gpt2", field: value}
        bad = copy_with_config(stock, tmp_path / f"stock-{number}", **fields)
        with limited_resources(), pytest.raises(ValueError, match="config"):
            hf_posenc.convert_checkpoint(bad, "transformer_xl", tmp_path / "converted")
        check_refused("inspect", bad)
        if value != 1000:  # valid for a model, but not for these weights
            check_refused(*train_command(bad, tmp_path, "--scheme", "alibi"))
            with limited_resources(), pytest.raises(ValueError, match=field):
                AutoConfig.from_pretrained(copy_with_config(variant, tmp_path / f"variant-{number}", **{field: value}))
    count_cases("hostile checkpoints", len(HOSTILE_SIZES[field]))


def test_sizes_that_are_only_possible_separately() -> None:
    with limited_resources(), pytest.raises(ValueError, match="parameters"):
        check_model_sizes({"hidden_size": 2**16, "num_hidden_layers": 1024})
    check_model_sizes(
        {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248, "vocab_size": 128256}
    )


def test_config_is_checked_when_a_model_is_built() -> None:
    config = tiny.config("llama", position_scheme="alibi")
    config.__dict__["num_hidden_layers"] = 10**9
    with limited_resources(), pytest.raises(ValueError, match="num_hidden_layers"):
        AutoModelForCausalLM.from_config(config)


def test_large_but_valid_schemes_are_built() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(
            tiny.config("llama", position_scheme={"type": "learned", "max_positions": 1_000_000})
        )
        wide = tiny.config("llama", hidden_size=8192, num_attention_heads=64, position_scheme="transformer_xl")
        AutoModel.from_config(wide)
    assert model.position_scheme[0].weight.shape == (1_000_000, tiny.WIDTH)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["stock", "variant"])
def test_pickles_are_never_read(kind: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    created = tmp_path / "created"
    directory = copy_with_config(stock if kind == "stock" else variant, tmp_path / kind)
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(created)))
    scheme = ["--scheme", "alibi"] if kind == "stock" else []
    commands = [["inspect", directory], train_command(directory, tmp_path, *scheme)]
    commands += [["convert", directory, "--scheme", "rope", "--out", tmp_path / "converted"]] if kind == "stock" else []
    commands += [["push", directory, "me/model"]] if kind == "variant" else []
    for command in commands:
        assert "pytorch_model.bin, a pickle" in check_refused(*command), command
    teacher = train_command(stock, tmp_path, "--scheme", "alibi", "--teacher", "--teacher-model", directory)
    assert "a pickle" in check_refused(*teacher)
    assert not created.exists()
    pickle.loads((directory / "pytorch_model.bin").read_bytes())
    assert created.exists(), "the trap does not work"
    count_cases("hostile checkpoints", 1)


@pytest.mark.parametrize("model_type", ["gpt2", "posenc_gpt2", "stranger"])
def test_code_named_in_a_config_is_not_run(model_type: str, stock: Path, variant: Path, tmp_path: Path) -> None:
    created = tmp_path / "created"
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    fields = {"model_type": model_type, "auto_map": dict.fromkeys(classes, "trap.Trap")}
    source = variant if model_type == "posenc_gpt2" else stock
    directory = copy_with_config(source, tmp_path / "bad", **fields)
    (directory / "trap.py").write_text(f"open({str(created)!r}, 'w').close()\nclass Trap: pass\n")
    tokenizer = directory / "tokenizer_config.json"
    changes = {"auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}, "tokenizer_class": "Trap"}
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), **changes}))
    scheme = [] if model_type == "posenc_gpt2" else ["--scheme", "alibi"]
    (tmp_path / "measured.txt").write_text(word_level.text(200))
    for command in (
        ["inspect", directory],
        ["convert", directory, "--scheme", "rope", "--out", tmp_path / "converted"],
        [
            "convert",
            directory,
            "--scheme",
            "rope",
            "--out",
            tmp_path / "two",
            "--drift-text",
            tmp_path / "measured.txt",
        ],
        ["push", directory, "me/model"],
        train_command(directory, tmp_path, *scheme),
    ):
        done = CliRunner().invoke(app, list(map(str, command)), input="y\n" * 9)
        assert done.exit_code in (0, 2), (command, done.output, done.exception)
        assert not created.exists(), command
    if (tmp_path / "converted").exists():
        assert "trap" not in (tmp_path / "converted" / "config.json").read_text()
    count_cases("hostile checkpoints", 1)
