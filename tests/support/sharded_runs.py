"""`hf-posenc train` on tiny models in one process, or in two with DDP, FSDP2 or DeepSpeed ZeRO-3, all on CPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accelerate.state import AcceleratorState, GradientState

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
        from tests.fixtures import sharded_train  # noqa: F401, PLC0415: makes sure that models are sharded

    from hf_posenc.cli import app

    line = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    app(["train", *(text for text in line if text != NO_VALUE)], prog_name="hf-posenc", standalone_mode=False)


def losses(out: Path, name: str = "loss") -> list[float]:
    """A term of the loss at each step."""
    history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if "loss" in entry]
