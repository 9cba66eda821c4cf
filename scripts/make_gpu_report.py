"""Assemble the GPU kernels of every scheme and write benchmarks/GPU.md (`make gpu-report`). Needs no GPU.

Results are kept in benchmarks/gpu_kernels.json as they come, so an interrupted run resumes. The page says what was not
measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.gpu_report_page import render_page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "gpu_kernels.json"
PAGE = ROOT / "benchmarks" / "GPU.md"
LENGTH = 512
"""A multiple of the block sizes, as long inputs usually are; in kernels for other such lengths, constants differ."""
SCHEMES: dict[str, Any] = {
    "none": "none",
    "t5": "t5",
    "alibi": "alibi",
    "alibi, learned": {"type": "alibi", "learned": True},
    "kerple": "kerple",
    "sandwich": "sandwich",
    "shaw, keys only": {"type": "shaw", "values": False},
    "deberta": "deberta",
    "tupe": "tupe",
    "transformer_xl": "transformer_xl",
    "fire": "fire",
    "cope": "cope",
}
SHAPES = ("llama-8b", "bert-base")
PATHS = ("training", "packed training", "decoding")
GPUS = ("h100", "a100")


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, scheme and way to run it, on one GPU."""

    gpu: str
    shape: str
    path: str
    scheme: str

    @property
    def key(self) -> str:
        return " | ".join(dataclasses.astuple(self))


def all_rows() -> Iterator[Row]:
    """Every row of the report, the most common ones first."""
    for path in PATHS:
        for shape in SHAPES:
            for scheme in SCHEMES:
                if shape == "bert-base" and (path != "training" or scheme == "cope"):
                    continue  # an encoder neither packs rows nor decodes, and cope is for decoders
                for gpu in GPUS:
                    yield Row(gpu, shape, path, scheme)


def build_model(shape: str, scheme: Any) -> Any:
    """One layer with the heads of the model. What does not reach the kernels is small."""
    import torch
    from transformers import AutoModel, BertConfig, LlamaConfig

    import hf_posenc  # noqa: F401, without it the configs have no position_scheme

    common: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    if shape == "llama-8b":
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        config: Any = LlamaConfig(**common, **heads, hidden_size=32, intermediate_size=32, position_scheme=scheme)
    else:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**common, **dropout, intermediate_size=32, position_scheme=scheme)
    return AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="flex_attention")


def run_model(row: Row) -> None:
    """Run the model with kernels that do nothing."""
    import torch
    from transformers import DynamicCache

    from tests.gpu_harness import backend

    model, ids = build_model(row.shape, SCHEMES[row.scheme]), torch.zeros(1, LENGTH, dtype=torch.long)
    if row.path == "decoding":
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            model.eval()(ids[:, 1:], past_key_values=cache)
            model.set_attn_implementation("flex_attention")
            with backend.gpu_kernels():
                model(ids[:, :1], past_key_values=cache)
        return
    options: dict[str, Any] = {} if row.shape == "bert-base" else {"use_cache": False}
    if row.path == "packed training":
        options["position_ids"] = (torch.arange(LENGTH) % (LENGTH // 2))[None]
    with backend.gpu_kernels():
        model.train()(ids, **options).last_hidden_state.float().sum().backward()


def measure(row: Row) -> dict[str, Any]:
    """Assemble the kernels of a row.

    Returns:
        For "forward" and "backward", what the kernel needs; or an "error".
    """
    from tests.gpu_harness import assembler, backend, fake_device, launcher

    gpu = fake_device.GPUS[row.gpu]
    backend.install(gpu)
    try:
        run_model(row)
    except Exception as error:  # the report says what failed, and the other rows are measured
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    result: dict[str, Any] = {}
    for kernel in launcher.LAUNCHES:
        if kernel.kind == "template":
            direction = "backward" if "backward" in kernel.name else "forward"
            try:
                result[direction] = dataclasses.asdict(assembler.assemble(kernel, gpu))
            except Exception as error:
                result[direction] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    return result or {"error": "no kernel was launched"}


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"versions": {}, "rows": {}}


def write_results(results: dict[str, Any]) -> None:
    """Write the results and the page."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(render_page(results, list(all_rows()), LENGTH), encoding="utf-8")


def measure_gpu(gpu: str, rows: list[Row]) -> None:
    """Measure rows of one GPU in this process, and keep each result at once."""
    import torch
    import transformers
    import triton

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton.__version__}
    for row in rows:
        started = time.perf_counter()
        result = measure(row)
        results = read_results()
        results["versions"] = {**versions, "python": platform.python_version()}
        results["rows"][row.key] = result
        write_results(results)
        print(f"{row.key}: {time.perf_counter() - started:.0f} s {result}", flush=True)


def main() -> None:
    """Measure what is missing, in one process per GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure only rows that have this text in their key")
    parser.add_argument("--limit", type=int, default=None, help="measure at most as many rows per GPU")
    parser.add_argument("--again", action="store_true", help="measure rows again that have a result")
    parser.add_argument("--gpu", choices=GPUS, help="measure in this process, for one GPU")
    options = parser.parse_args()
    from tests.gpu_harness.assembler import missing_tool

    reason = missing_tool()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    if options.gpu is None:
        for gpu in GPUS:
            subprocess.run([sys.executable, "-m", "scripts.make_gpu_report", *sys.argv[1:], "--gpu", gpu], check=True)
        return
    results = {} if options.again else read_results()["rows"]
    known = {key for key, result in results.items() if "error" not in result}
    rows = [row for row in all_rows() if row.gpu == options.gpu and options.only in row.key and row.key not in known]
    measure_gpu(options.gpu, rows[: options.limit])


if __name__ == "__main__":
    main()
