"""The scripts and configs in examples/ run on tiny models.

Fast runs execute each script once, in this process. Interrupted and distributed runs are slow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level

ROOT = Path(__file__).parents[2]
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "examples" / "configs"
LAUNCHER = ["-m", "accelerate.commands.launch", "--config_file"]
STEPS, SAVED_STEP, LENGTH = 12, 6, 16
Options = dict[str, Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a stock checkpoint, a text and prompt-completion pairs."""
    directory = tmp_path_factory.mktemp("source")
    word_level.saved("gpt2", directory / "stock")
    (directory / "text.txt").write_text(word_level.text(3000))
    pairs = [
        {"prompt": word_level.text(6, seed), "completion": f" {word_level.text(5, seed + 1)}"} for seed in range(64)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return directory


def arguments(options: Options) -> list[str]:
    """Command-line arguments; a value of True makes a flag without a value."""
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [text for flag, value in pairs for text in ([flag] if value is True else [flag, str(value)])]


def run_here(script: str, options: Options) -> str:
    """Run a script in this process, which saves the time of importing torch, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [script, *arguments(options)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def run_process(command: list[Any], options: Options) -> str:
    """Run a command of this Python and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command), *arguments(options)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def printed_losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", text, flags=re.MULTILINE)]


def logged_losses(checkpoint: Path) -> list[float]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def decreases(losses: list[float]) -> bool:
    """Compare means over several batches, since batches differ."""
    return len(losses) >= 6 and sum(losses[-3:]) < sum(losses[:3])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same_weights(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tiny.tokens(2, LENGTH)).logits


def test_quickstart(tmp_path: Path) -> None:
    printed = run_here("quickstart.py", {"directory": tmp_path})
    assert "IndexError" in printed
    assert printed.count("identical") == 3
    assert "unchanged" in printed
    assert (tmp_path / "alibi" / "model.safetensors").exists()


def loop_options(source: Path, output_dir: Path, batch_size: int = 4) -> Options:
    return {
        "model": source / "stock",
        "scheme": '["t5", {"type": "kerple"}]',
        "data": source / "text.txt",
        "output_dir": output_dir,
        "steps": STEPS,
        "fit_steps": 8,
        "save_every": SAVED_STEP,
        "length": LENGTH,
        "batch_size": batch_size,
        "cpu": True,
    }


@pytest.fixture(scope="module")
def loop_run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output directory of accelerate_loop.py, and what it printed."""
    output_dir = tmp_path_factory.mktemp("loop") / "out"
    return output_dir, run_here("accelerate_loop.py", loop_options(source, output_dir))


def test_accelerate_loop(source: Path, loop_run: tuple[Path, str]) -> None:
    output_dir, printed = loop_run
    before, after = map(float, re.findall(r"divergence ([\d.]+) -> ([\d.]+)", printed)[0])
    assert after < before
    assert len(printed_losses(printed)) == STEPS
    assert decreases(printed_losses(printed))
    model = AutoModelForCausalLM.from_pretrained(output_dir)
    assert model.config.position_scheme == ["t5", {"type": "kerple"}]
    assert model(tiny.tokens(1, 2 * tiny.TRAINED_LENGTH)).logits.isfinite().all()
    untrained = AutoModelForCausalLM.from_pretrained(source / "stock", position_scheme=model.config.position_scheme)
    assert not torch.equal(logits(model), logits(untrained))


@pytest.mark.slow
def test_accelerate_loop_resumes(source: Path, loop_run: tuple[Path, str], tmp_path: Path) -> None:
    complete, printed = loop_run
    checkpoints = tmp_path / "out" / "checkpoints"
    shutil.copytree(complete / "checkpoints", checkpoints)
    shutil.rmtree(checkpoints / f"step-{STEPS:07}")
    shutil.copytree(checkpoints / f"step-{SAVED_STEP:07}", checkpoints / "unfinished")  # left by a killed run
    (checkpoints / "unfinished" / "model.safetensors").write_bytes(b"truncated")
    resumed = run_process([EXAMPLES / "accelerate_loop.py"], loop_options(source, tmp_path / "out"))
    assert f"resuming from step {SAVED_STEP}" in resumed
    assert "fitted" not in resumed
    assert printed_losses(resumed) == printed_losses(printed)[SAVED_STEP:]
    assert same_weights(tmp_path / "out", complete)


@pytest.mark.slow
def test_accelerate_loop_in_two_processes(source: Path, loop_run: tuple[Path, str], tmp_path: Path) -> None:
    """With half the rows per process, it equals one process up to the order of float32 sums."""
    complete, printed = loop_run
    command = [*LAUNCHER, CONFIGS / "ddp.yaml", EXAMPLES / "accelerate_loop.py"]
    distributed = run_process(command, loop_options(source, tmp_path / "out", batch_size=2))
    torch.testing.assert_close(printed_losses(distributed), printed_losses(printed), rtol=1e-3, atol=1e-5)
    seeds = {path.name for path in (tmp_path / "out" / "checkpoints").glob("*/random_states_*")}
    assert seeds == {"random_states_0.pkl", "random_states_1.pkl"}
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")),
        logits(AutoModelForCausalLM.from_pretrained(complete)),
        rtol=0,
        atol=1e-3,
    )


def trainer_options(source: Path, output_dir: Path) -> Options:
    return {
        "model": source / "stock",
        "scheme": "alibi",
        "data": source / "text.txt",
        "output_dir": output_dir,
        "steps": STEPS,
        "fit_steps": 4,
        "save_every": SAVED_STEP,
        "length": LENGTH,
        "batch_size": 8,
        "learning_rate": 3e-3,
    }


@pytest.fixture(scope="module")
def trainer_run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("trainer") / "out"
    run_here("trainer_script.py", trainer_options(source, output_dir))
    return output_dir


def test_trainer_script(trainer_run: Path) -> None:
    assert decreases(logged_losses(trainer_run / f"checkpoint-{STEPS}"))
    model = AutoModelForCausalLM.from_pretrained(trainer_run)
    assert model.config.position_scheme == "alibi"
    assert "transformer.wpe.weight" not in model.state_dict()


@pytest.mark.slow
def test_trainer_script_resumes(source: Path, trainer_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trainer_run / f"checkpoint-{SAVED_STEP}", tmp_path / f"checkpoint-{SAVED_STEP}")
    run_here("trainer_script.py", trainer_options(source, tmp_path))
    assert logged_losses(tmp_path / f"checkpoint-{STEPS}") == logged_losses(trainer_run / f"checkpoint-{STEPS}")
    assert same_weights(tmp_path, trainer_run)


def test_peft_lora(source: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    options = {"model": source / "stock", "scheme": "t5", "data": source / "text.txt", "output_dir": tmp_path}
    options |= {"steps": 16, "rank": 4, "length": LENGTH, "learning_rate": 1e-2}
    printed = run_here("peft_lora.py", options)
    assert decreases(printed_losses(printed))
    assert "largest difference of logits 0.0e+00" in printed
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    position_parameters = [name for name in saved if "position_scheme" in name]
    assert position_parameters
    assert all(saved[name].any() for name in position_parameters), "trained from zero"
    assert all("lora_" in name or name in position_parameters for name in saved)

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    untrained = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    expected = logits(adapted)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.position_scheme == "t5"
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)  # a different order of sums
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "position_scheme" in name:
                parameter.zero_()
    assert (logits(adapted) - expected).abs().max() > 1e-2, "the position parameters matter"
    assert (untrained - expected).abs().max() > 1e-2


def test_sft(source: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: it is in the extra examples")
    options = {"model": source / "stock", "scheme": "rope", "data": source / "pairs.jsonl", "output_dir": tmp_path}
    options |= {"steps": 8, "length": 32, "learning_rate": 3e-3}
    printed = run_here("sft.py", options)
    assert decreases([float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)])
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.position_scheme == "rope"


def train_with_config(config: str, program: list[Any], source: Path, output_dir: Path) -> list[float]:
    """Run `hf-posenc train` under an accelerate config and return the losses."""
    options = {
        "model": source / "stock",
        "scheme": "t5",
        "data": source / "text.txt",
        "train_length": LENGTH,
        "output_dir": output_dir,
        "max_steps": 6,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 2,
        "disable_tqdm": "true",
        "use_cpu": "true",
    }
    run_process([*LAUNCHER, CONFIGS / config, *program, "train"], options)
    assert (output_dir / "checkpoint-6" / "rng_state_1.safetensors").is_file(), "there were two processes"
    assert AutoModelForCausalLM.from_pretrained(output_dir).config.position_scheme in ("t5", {"type": "t5"})
    return logged_losses(output_dir / "checkpoint-6")


@pytest.mark.slow
def test_train_with_the_ddp_and_fsdp2_configs(source: Path, tmp_path: Path) -> None:
    """accelerate ignores FSDP on CPUs, so tests/fixtures/sharded_train.py forces it and checks for sharded weights."""
    ddp = train_with_config("ddp.yaml", ["-m", "hf_posenc"], source, tmp_path / "ddp")
    fsdp2 = train_with_config("fsdp2.yaml", ["-m", "tests.fixtures.sharded_train"], source, tmp_path / "fsdp2")
    assert decreases(ddp)
    torch.testing.assert_close(fsdp2, ddp, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_accelerate_accepts_the_configs(name: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = CONFIGS / f"{name}.yaml"
    load_config_from_file(str(path))
    config = yaml.safe_load(path.read_text())
    accepted = {action.dest for action in launch_command_parser()._actions}
    assert {*config.get("fsdp_config", {}), *config.get("deepspeed_config", {})} <= accepted
    (tmp_path / "wrong.yaml").write_text(path.read_text() + "no_such_field: 1\n")
    with pytest.raises(ValueError, match="no_such_field"):
        load_config_from_file(str(tmp_path / "wrong.yaml"))


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_fsdp2_wraps_the_layers_of_variants(architecture: str) -> None:
    """The config names no layer class; the model does, through `_no_split_modules`."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    for model in (tiny.model(architecture, "t5"), tiny.model(architecture)):
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        wrapped = {name for name, module in model.named_modules() if policy(module)}
        layers = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers"}[architecture]
        assert wrapped >= {f"{layers}.{number}" for number in range(tiny.LAYERS)}
        assert "" not in wrapped
