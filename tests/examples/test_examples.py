"""Every script and config in examples/, run as it stands, on tiny models made here."""

from __future__ import annotations

import importlib.util
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

import hf_posenc
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level

ROOT = Path(__file__).parents[2]
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "examples" / "configs"
SHARDED = Path(__file__).parents[1] / "fixtures" / "sharded_train.py"
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file"]
STEPS, HANDOVER, SAVED, LENGTH = 24, 14, 12, 16
"""Of the runs that hand over: the first checkpoint is from the way, the second from the end."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    word_level.saved("gpt2", directory / "stock")
    (directory / "text.txt").write_text(word_level.text(3000))
    pairs = [
        {"prompt": word_level.text(6, seed), "completion": f" {word_level.text(5, seed + 1)}"} for seed in range(64)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return directory


def run(*command: Any, **options: Any) -> str:
    """What it prints. An option that is True is a switch."""
    line = [text for name, value in options.items() for text in _told(name.replace("_", "-"), value)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *map(str, command), *line],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _told(name: str, value: Any) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def printed_losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", text, flags=re.MULTILINE)]


def logged_losses(checkpoint: Path) -> list[float]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def falls(losses: list[float]) -> bool:
    """Batches differ: some at the end against some at the start."""
    return len(losses) >= 6 and sum(losses[-3:]) < sum(losses[:3])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tiny.tokens(2, LENGTH)).logits


def loop(source: Path, out: Path, processes: int = 1) -> str:
    launcher = [*LAUNCH, CONFIGS / "ddp.yaml"] if processes == 2 else []
    return run(
        *launcher,
        EXAMPLES / "accelerate_loop.py",
        model=source / "stock",
        scheme='["t5", {"type": "kerple"}]',
        data=source / "text.txt",
        output_dir=out,
        steps=STEPS,
        handover_steps=HANDOVER,
        fit_steps=8,
        save_every=SAVED,
        length=LENGTH,
        batch_size=4 // processes,
        learning_rate=1e-3,
        cpu=True,
    )


@pytest.fixture(scope="module")
def looped(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    out = tmp_path_factory.mktemp("loop") / "out"
    return out, printed_losses(loop(source, out))


def test_the_loop_on_accelerate(source: Path, looped: tuple[Path, list[float]]) -> None:
    out, losses = looped
    assert len(losses) == STEPS
    assert losses[0] < 0.1 < losses[HANDOVER], "it starts as the teacher that it learns from"
    assert falls(losses[HANDOVER:]), "and once the old encoding is gone, it comes back"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.position_scheme == ["t5", {"type": "kerple"}]
    assert model(tiny.tokens(1, 2 * tiny.TRAINED_LENGTH)).logits.isfinite().all()
    untrained = AutoModelForCausalLM.from_pretrained(source / "stock", position_scheme=model.config.position_scheme)
    assert not torch.equal(logits(model), logits(untrained))


def test_the_loop_goes_on_where_it_was_cut(source: Path, looped: tuple[Path, list[float]], tmp_path: Path) -> None:
    whole, losses = looped
    checkpoints = tmp_path / "out" / "checkpoints"
    shutil.copytree(whole / "checkpoints", checkpoints)
    shutil.rmtree(checkpoints / f"step-{STEPS:07}")
    shutil.copytree(checkpoints / f"step-{SAVED:07}", checkpoints / "unfinished")  # of a run that was killed
    (checkpoints / "unfinished" / "model.safetensors").write_bytes(b"cut")
    told = loop(source, tmp_path / "out")
    assert f"going on from step {SAVED}" in told
    assert "attention fitted" not in told
    assert printed_losses(told) == losses[SAVED:]
    assert same(tmp_path / "out", whole), "to the bit, although it was cut while one encoding gave way to the other"


def test_the_loop_in_two_processes(source: Path, looped: tuple[Path, list[float]], tmp_path: Path) -> None:
    """With half the rows each, it is that of one, but for the order of sums in float32. A bias of keys changes no
    attention: what it learns is that rounding, which Adam makes steps of."""
    whole, losses = looped
    found = printed_losses(loop(source, tmp_path / "out", processes=2))
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
    seeds = {path.name for path in (tmp_path / "out" / "checkpoints").glob("*/random_states_*")}
    assert seeds == {"random_states_0.pkl", "random_states_1.pkl"}
    expected, before = weights(whole), weights(source / "stock")
    for name, weight in weights(tmp_path / "out").items():
        keys = slice(tiny.WIDTH, 2 * tiny.WIDTH) if name.endswith("c_attn.bias") else slice(0)
        weight[keys] = expected[name][keys]
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6, msg=name)
        assert name not in before or (weight - before[name]).abs().mean() > 1e-4, "training moves it further than that"


def test_the_stock_trainer(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": source / "stock", "scheme": "alibi", "data": source / "text.txt", "length": LENGTH}
    options |= {"steps": STEPS, "handover_steps": HANDOVER, "save_every": SAVED, "learning_rate": 3e-3, "batch_size": 8}
    out, again = tmp_path / "out", tmp_path / "again"
    run(EXAMPLES / "trainer_script.py", output_dir=out, **options)
    assert falls(logged_losses(out / f"checkpoint-{STEPS}"))
    on_the_way = json.loads((out / f"checkpoint-{SAVED}" / "config.json").read_text())["position_scheme"]
    assert on_the_way["handover"]["step"] == SAVED
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.position_scheme == {"type": "alibi"}
    assert "transformer.wpe.weight" not in model.state_dict()

    shutil.copytree(out / f"checkpoint-{SAVED}", again / f"checkpoint-{SAVED}")
    told = {"--" + name.replace("_", "-"): str(value) for name, value in {**options, "output_dir": again}.items()}
    monkeypatch.setattr(sys, "argv", ["trainer_script.py", *(text for pair in told.items() for text in pair)])
    runpy.run_path(str(EXAMPLES / "trainer_script.py"), run_name="__main__")
    assert logged_losses(again / f"checkpoint-{STEPS}") == logged_losses(out / f"checkpoint-{STEPS}")
    assert same(again, out), "gone on with from the middle of the handover"


def test_lora_with_positions_that_train(source: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    told = run(
        EXAMPLES / "peft_lora.py",
        model=source / "stock",
        scheme="t5",
        data=source / "text.txt",
        output_dir=tmp_path,
        steps=STEPS,
        rank=4,
        length=LENGTH,
        learning_rate=1e-2,
    )
    assert falls(printed_losses(told))
    assert "logits differ by 0.0e+00 at most" in told
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = [name for name in saved if "position_scheme" in name]
    assert own
    assert all(saved[name].any() for name in own), "they start at zero"
    assert all("lora_" in name or name in own for name in saved)

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    plain = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    expected = logits(adapted)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.position_scheme == "t5"
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)  # products are added in another order
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "position_scheme" in name:
                parameter.zero_()
    assert (logits(adapted) - expected).abs().max() > 1e-2, "without the positions, it is another model"
    assert (plain - expected).abs().max() > 1e-2


def test_instruction_tuning_with_trl(source: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install 'hf_posenc[examples]'")
    told = run(
        EXAMPLES / "sft.py",
        model=source / "stock",
        scheme="rope",
        data=source / "pairs.jsonl",
        output_dir=tmp_path,
        steps=12,
        length=32,
        learning_rate=3e-3,
    )
    assert falls([float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", told)])
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.position_scheme == "rope"


def trained(config: str, program: list[Any], source: Path, out: Path) -> list[float]:
    run(
        *LAUNCH,
        CONFIGS / config,
        *program,
        "train",
        model=source / "stock",
        scheme="t5",
        data=source / "text.txt",
        train_length=LENGTH,
        output_dir=out,
        max_steps=6,
        logging_steps=1,
        learning_rate=3e-3,
        per_device_train_batch_size=2,
        disable_tqdm="true",
        use_cpu="true",
    )
    assert (out / "checkpoint-6" / "rng_state_1.safetensors").is_file(), "there were two processes, and they met"
    assert AutoModelForCausalLM.from_pretrained(out).config.position_scheme == {"type": "t5"}
    return logged_losses(out / "checkpoint-6")


def test_train_under_the_configs_for_ddp_and_fsdp2(source: Path, tmp_path: Path) -> None:
    """accelerate has no shards on CPUs unless it is made to, which is all that the other program does. It also asserts
    that everything was sharded. That both do what one process does is tested in test_train_processes."""
    copies = trained("ddp.yaml", ["-m", "hf_posenc"], source, tmp_path / "ddp")
    shards = trained("fsdp2.yaml", [SHARDED], source, tmp_path / "fsdp2")
    assert falls(copies)
    torch.testing.assert_close(shards, copies, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_configs_are_what_accelerate_reads(name: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = CONFIGS / f"{name}.yaml"
    load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    known = {action.dest for action in launch_command_parser()._actions}
    parts = {**written.get("fsdp_config", {}), **written.get("deepspeed_config", {})}
    assert set(parts) <= known
    assert f"--config_file examples/configs/{name}.yaml -m hf_posenc train" in path.read_text()
    assert ("UNTESTED" in path.read_text()) == (name == "deepspeed_zero3")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text() + "no_such_field: 1\n")
    with pytest.raises(ValueError, match="no_such_field"):
        load_config_from_file(str(wrong))


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_fsdp2_finds_the_layers_of_variants(architecture: str) -> None:
    """The config names no classes: the model does."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    from hf_posenc.training.teacher import layers_of

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    for model in (tiny.model(architecture, "t5"), tiny.model(architecture)):
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        wrapped = {module for module in model.modules() if policy(module)}
        assert wrapped >= set(layers_of(model))
        assert model not in wrapped


def test_every_example_is_run_here_and_listed() -> None:
    tested = Path(__file__).read_text() + (Path(__file__).parent / "test_documents.py").read_text()
    listed = (ROOT / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *CONFIGS.glob("*.yaml")]:
        assert path.stem in tested, path
        assert f"examples/{path.relative_to(EXAMPLES)}" in listed, path
    assert Path(hf_posenc.__file__).parent.parent == ROOT
