"""`hf-posenc train` on tiny models in one process, or in two with DDP, FSDP2 or DeepSpeed ZeRO-3, all on CPUs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accelerate.state import AcceleratorState, GradientState

from hf_posenc.checkpoints import RUN_STATE_FILE
from tests.support import word_level_tokenizer as word_level
from tests.support.processes import run_processes

Kind = Literal["one", "ddp", "fsdp", "zero3"]
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        # Tiny models would otherwise stay gathered.
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}
STEPS, NO_VALUE = 6, ""


def save_sources(directory: Path) -> Path:
    """Stock checkpoints to start from, and text to train on."""
    for architecture in ("gpt2", "llama"):
        word_level.saved(architecture, directory / architecture)
    (directory / "text.txt").write_text(word_level.text(2000))
    return directory


def two_schemes(source: Path) -> dict[str, Any]:
    """Options of a run with a teacher, a warm start, and schemes with parameters shared by all layers and per layer."""
    scheme = '["t5", {"type": "deberta", "max_distance": 8}]'
    return {"model": source / "gpt2", "data": source / "text.txt", "scheme": scheme, "fit_ratio": 0.05}


def train(kind: Kind, out: Path, **options: Any) -> Path:
    """Train in forked processes; options as on the command line, with `_` for `-`. Returns the output directory."""
    defaults = {"train_length": 16, "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    defaults |= {"disable_tqdm": True, "per_device_train_batch_size": 4 if kind == "one" else 2}
    options = {**defaults, **options, "output_dir": out}
    if kind == "fsdp":
        options |= {"fsdp": "full_shard", "fsdp_config": json.dumps(FSDP)}
    options |= {"ddp_backend": "gloo"} if kind == "zero3" else {"use_cpu": True}  # which ignores DeepSpeed
    run_processes(_train, kind, options, count=1 if kind == "one" else 2)
    return out


def _train(kind: Kind, options: Mapping[str, Any]) -> None:
    if kind == "zero3":  # as `accelerate launch` does; --deepspeed does not work on CPUs
        config = Path(options["output_dir"]).with_name("zero3.json")
        config.write_text(json.dumps(ZERO3))
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
        os.environ |= {"DS_ACCELERATOR": "cpu"}
    if kind == "one":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)  # of earlier tests in the same process
    GradientState._reset_state()
    if kind in ("fsdp", "zero3"):
        from tests.fixtures import sharded_train  # noqa: F401 (patches what it imports)

    from hf_posenc.cli import app

    line = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    app(["train", *(text for text in line if text != NO_VALUE)], prog_name="hf-posenc")


def resume(kind: Kind, out: Path, **options: Any) -> None:
    """Undo the steps of a finished run since its last checkpoint but one, and train again."""
    shutil.rmtree(out / f"checkpoint-{STEPS}")
    kept = out / f"checkpoint-{STEPS - 2}" / "manifest.json"
    written = kept.stat().st_mtime_ns
    state = json.loads((out / RUN_STATE_FILE).read_text())
    (out / RUN_STATE_FILE).write_text(json.dumps({**state, "finished": False}))
    train(kind, out, **options)
    assert kept.stat().st_mtime_ns == written, "started over"


def losses(out: Path, name: str = "loss") -> list[float]:
    """A term of the loss at each step."""
    history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if "loss" in entry]
