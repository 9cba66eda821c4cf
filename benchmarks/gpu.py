"""Speed and memory on a GPU: every attention path against stock models, written to benchmarks/GPU_SPEED.md.

    python -m benchmarks.gpu                # LLaMA-8B's layers in bfloat16, on the current GPU; about half an hour
    python -m benchmarks.gpu --toy --out .  # tiny layers on the CPU, which checks that the script runs

Each row is a model of a few layers: a forward pass, and a training step with gradient checkpointing off. Times are
medians, memory is the peak of what torch allocates. A case that fails is reported with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaModel

import hf_posenc
from hf_posenc.attention.dispatch import FLEX_SETTING
from hf_posenc.attention.triton_support import OLDEST_TRITON, TRITON_SETTING, has_triton

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "gpu.json", HERE / "GPU_SPEED.md"
VOCABULARY, ROUNDS, WARMUP = 1024, 10, 3
SCHEMES: dict[str, Any] = {
    "rope": "rope",
    "alibi": "alibi",
    "t5": {"type": "t5", "shared": False},
    "kerple": "kerple",
    "fire": "fire",
    "shaw (keys)": {"type": "shaw", "values": False},
    "shaw": "shaw",
    "transformer_xl": "transformer_xl",
    "deberta": "deberta",
    "tupe": "tupe",
    "cope": "cope",
}
STOCK_BACKENDS = ("sdpa", "flash_attention_2", "flex_attention")
PATHS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("sdpa", {}),
    "bias written out": ("sdpa", {FLEX_SETTING: "off"}),
    "Triton kernels": ("sdpa", {TRITON_SETTING: "1"}),
    "flex_attention": ("flex_attention", {}),
}
"""The backend of a variant, and environment variables that choose its path."""
TRITON_SCHEMES = ("alibi", "t5", "kerple")
"""Those that the Triton kernels are for; others would take the default path."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The layers and inputs that are measured."""

    hidden_size: int
    num_heads: int
    num_key_heads: int
    mlp_size: int
    num_layers: int
    lengths: tuple[int, ...]
    rounds: int


LLAMA_8B = Size(4096, 32, 8, 14336, 2, (2048, 8192), ROUNDS)
TOY = Size(32, 4, 2, 32, 1, (16,), 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: a scheme, or None for the stock model, on a path."""

    scheme: str | None
    path: str
    packed: bool

    @property
    def backend(self) -> str:
        return self.path if self.scheme is None else PATHS[self.path][0]

    @property
    def settings(self) -> dict[str, str]:
        return {} if self.scheme is None else PATHS[self.path][1]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one model needs for rows of a length. `error` says why there are no numbers."""

    case: Case
    length: int
    forward_ms: float | None = None
    training_ms: float | None = None
    forward_mb: float | None = None
    training_mb: float | None = None
    error: str = ""


def all_cases() -> Iterator[Case]:
    """Stock models first, then every scheme on every path; packed rows on the default path and by Triton kernels."""
    for packed in (False, True):
        for backend in STOCK_BACKENDS:
            yield Case(None, backend, packed)
        for scheme in SCHEMES:
            for path in PATHS if not packed else ("default", "Triton kernels"):
                if path != "Triton kernels" or scheme in TRITON_SCHEMES:
                    yield Case(scheme, path, packed)


@contextlib.contextmanager
def path_settings(values: dict[str, str]) -> Iterator[None]:
    """Set the environment variables that choose paths to these values, and unset the others."""
    before = {name: os.environ.pop(name) for name in (FLEX_SETTING, TRITON_SETTING) if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def build_model(case: Case, size: Size, length: int, device: torch.device) -> Any:
    """A model without a head, in bfloat16, its scheme parameters not neutral."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_heads,
        intermediate_size=size.mlp_size,
        max_position_embeddings=length,
        attn_implementation=case.backend,
        dtype=torch.bfloat16,
    )
    with device:
        model: Any = LlamaModel(config).to(torch.bfloat16)
    if case.scheme is not None:
        hf_posenc.retrofit(model, SCHEMES[case.scheme])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_scheme" in name:
                parameter.normal_(std=0.1).abs_()
    return model.to(device)


def inputs_of(case: Case, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One row of tokens; if packed, of four documents."""
    inputs = {"input_ids": torch.randint(VOCABULARY, (1, length), device=device)}
    if case.packed:
        inputs["position_ids"] = torch.arange(length // 4, device=device).repeat(4)[None]
    return inputs


def measure(case: Case, size: Size, length: int, device: torch.device) -> Result:
    """Time a forward pass and a training step, and record their peak memory."""
    numbers: dict[str, float] = {}
    try:
        if TRITON_SETTING in case.settings and device.type == "cuda" and not has_triton():
            raise ImportError(f"Triton {'.'.join(map(str, OLDEST_TRITON))} or newer is not installed")
        with path_settings(case.settings):
            model, inputs = build_model(case, size, length, device), inputs_of(case, length, device)
            for name in ("forward", "training"):
                milliseconds, megabytes = _time(model, inputs, name == "training", size.rounds)
                numbers |= {f"{name}_ms": milliseconds, f"{name}_mb": megabytes}
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:  # out of memory, refused, not there
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Result(case, length, **numbers, error=lines[0][:160])
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Result(case, length, **numbers)


def _time(model: Any, inputs: dict[str, torch.Tensor], training: bool, rounds: int) -> tuple[float, float]:
    """The median time in milliseconds, and the peak memory in megabytes; 0 on a CPU, where torch does not count."""
    on_gpu = model.device.type == "cuda"
    model.train(training)
    times = []
    for number in range(WARMUP + rounds if on_gpu else 1 + rounds):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            output = model(**inputs, use_cache=False).last_hidden_state
            if training:
                output.float().square().mean().backward()
                model.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        if number >= (WARMUP if on_gpu else 1):
            times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else 0.0
    return 1000 * statistics.median(times), peak


def describe_machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; Python {platform.python_version()}, {versions}"


def render_page(results: dict[str, Any] | None) -> str:
    """The results as Markdown; without any, a page that says so."""
    lines = ["# Speed and memory on a GPU", "", "Generated by `python -m benchmarks.gpu`; do not edit.", ""]
    if results is None:
        lines += [
            "**Not yet run.** Nothing in this repository was measured on a GPU. On a machine with one, the command",
            "above measures every attention path against stock models, a forward pass and a training step, and",
            "writes the numbers here.",
        ]
        return "\n".join(lines) + "\n"
    size = results["size"]
    lines += [
        f"{results['machine']}. {size['num_layers']} layers of width {size['hidden_size']}",
        f"with {size['num_heads']} heads and {size['num_key_heads']} key heads, bfloat16, batch 1. Stock rows name",
        "the attention backend.",
    ]
    header = ["model", "path", "forward", "training step", "tokens/s, training", "memory, forward", "memory, training"]
    for packed in (False, True):
        for length in size["lengths"]:
            rows = [row for row in results["rows"] if row["length"] == length and row["case"]["packed"] == packed]
            title = f"{length:,} tokens" + (", four documents in a row" if packed else "")
            lines += ["", f"## {title}", "", f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
            lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    case = row["case"]
    names = [case["scheme"] or "stock", case["path"]]
    times = [f"{row[name]:.2f} ms" if row[name] is not None else "" for name in ("forward_ms", "training_ms")]
    speed = f"{1000 * row['length'] / row['training_ms']:,.0f}" if row["training_ms"] else ""
    memory = [f"{row[name]:,.0f} MB" if row[name] else "" for name in ("forward_mb", "training_mb")]
    if row["error"]:
        speed = row["error"].replace("|", "/")
    return [*names, *times, speed, *memory]


def run(size: Size, device: torch.device, cases: Sequence[Case]) -> dict[str, Any]:
    """Measure all cases at all lengths."""
    rows = []
    for length in size.lengths:
        for case in cases:
            result = measure(case, size, length, device)
            rows.append(dataclasses.asdict(result))
            print(*_cells(rows[-1]), sep=" | ", file=sys.stderr, flush=True)
    return {"machine": describe_machine(device), "size": dataclasses.asdict(size), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny layers on the CPU")
    parser.add_argument(
        "--out", type=Path, help="the directory of gpu.json and GPU_SPEED.md; default: that of this file"
    )
    parsed = parser.parse_args(arguments)
    if not parsed.toy and not torch.cuda.is_available():
        parser.error("there is no GPU here; --toy runs tiny layers on the CPU")
    if parsed.toy and parsed.out is None:
        parser.error("--toy needs --out, so that its numbers do not replace those of a GPU")
    directory = parsed.out or HERE
    size, device = (TOY, torch.device("cpu")) if parsed.toy else (LLAMA_8B, torch.device("cuda"))
    results = run(size, device, list(all_cases()))
    (directory / RESULTS.name).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (directory / PAGE.name).write_text(render_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
