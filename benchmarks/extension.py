"""Longer inputs without training: perplexity, passkeys and cost of methods that extend a rotary model: EXTENSION.md.

Rerun the command to resume; `--cost` measures the cost again:

    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.extension
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posenc

from .recovery.tasks import STORY_LENGTH, data_path, load_stories, story_rows

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "extension.json", HERE / "EXTENSION.md"
LENGTHS, TRAINED_LENGTH = ("1x", "2x", "4x"), 512
STORIES, PASSKEY_TRIALS = 64, 3
COST_LENGTH, COST_HEADS, COST_HEAD_SIZE, COST_ROUNDS = 4096, 4, 64, 5
METHODS: dict[str, Any] = {
    "plain": "rope",
    "Self-Extend": {"type": "rope", "extend": {"method": "self_extend"}},
    "ReRoPE": {"type": "rope", "extend": {"method": "rerope"}},
    "dual chunk attention": {"type": "rope", "extend": {"method": "dca"}},
    "YaRN": {"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic NTK": {"type": "rope", "scaling": {"rope_type": "dynamic", "factor": 1.0}},
    "Leaky ReRoPE": {"type": "rope", "extend": {"method": "leaky_rerope"}},
}
"""All with their default options; factor 1 of dynamic NTK grows with the length alone."""


def measure_quality(name: str) -> dict[str, dict[str, float]]:
    """Perplexity, and how often the hidden passkey is preferred to a random one, by multiple of the trained length."""
    text, model = story_rows()["input_ids"][:STORIES], load_stories()
    if METHODS[name] != "rope":
        hf_posenc.retrofit(model, METHODS[name])
    report = hf_posenc.evaluate(
        {name: model},
        text.flatten(),
        lengths=LENGTHS,
        metrics=("perplexity", "passkey"),
        tokenizer=data_path("checkpoints", "stories260k"),
        passkey_trials=PASSKEY_TRIALS,
        progress=False,
    )
    return {
        multiple: {
            "perplexity": perplexity.perplexity.value,
            "interval": list(perplexity.perplexity.confidence_interval),
            "passkey": sum(depth.preference.value for depth in passkey.depths) / len(passkey.depths),
        }
        for multiple, perplexity, passkey in zip(LENGTHS, report.perplexity, report.passkey, strict=True)
    }


@torch.no_grad()
def measure_cost() -> dict[str, dict[str, float]]:
    """The CPU time of the attention function alone, on one thread, as a ratio to plain rotary attention."""
    shape = (1, COST_HEADS, COST_LENGTH, COST_HEAD_SIZE)
    states = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def attention(scheme: Any) -> Callable[[], object]:
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=COST_HEADS * COST_HEAD_SIZE,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=COST_HEADS,
            max_position_embeddings=COST_LENGTH // 4,
            attn_implementation="sdpa",
            position_scheme=scheme,
        )
        base = LlamaModel(config).eval()
        module: Any = base.layers[0].self_attn
        positions = base.prepare_inputs({"input_ids": torch.zeros(1, COST_LENGTH, dtype=torch.long)}).positions  # type: ignore[operator]
        attend, layer = ALL_ATTENTION_FUNCTIONS["hf_posenc"], module.layer_schemes(positions)
        return lambda: attend(module, *states, None, posenc=layer, scaling=COST_HEAD_SIZE**-0.5)

    runs = {name: attention(scheme) for name, scheme in METHODS.items() if "extend" in scheme or name == "plain"}
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(COST_ROUNDS + 1):
        for name, run in runs.items():
            start = time.process_time()  # unlike elapsed time, the same on a busy machine
            run()
            times[name].append(time.process_time() - start)
    ratios = {name: [t / plain for t, plain in zip(times[name], times["plain"], strict=True)][1:] for name in runs}
    summaries = {name: statistics.quantiles(values, n=4) for name, values in ratios.items()}
    return {name: {"ratio": middle, "low": low, "high": high} for name, (low, middle, high) in summaries.items()}


def quality_table(results: dict[str, Any]) -> list[list[str]]:
    """A row per method: perplexity and passkeys at each length, and the cost."""
    rows = []
    for name, quality in results["quality"].items():
        perplexities = [f"{quality[multiple]['perplexity']:.2f}" for multiple in LENGTHS]
        passkeys = [f"{quality[multiple]['passkey']:.0%}" for multiple in LENGTHS]
        cost = results["cost"].get(name)
        rows.append([name, *perplexities, *passkeys, "" if cost is None else f"{cost['ratio']:.2f}"])
    return rows


HEADER = [
    "method",
    *(f"perplexity, {multiple}" for multiple in LENGTHS),
    *(f"passkey, {multiple}" for multiple in LENGTHS),
    "cost",
]


def render_page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Longer inputs without training", "", "Generated by `python -m benchmarks.extension`; do not edit.", ""]
    lines += [
        f"stories260k (a LLaMA with 260,000 parameters, trained on {TRAINED_LENGTH} tokens) reads a concatenation of",
        f"{STORIES} stories of {STORY_LENGTH} tokens that it generated itself, in windows of 1, 2 and 4 times its",
        "trained length. Every method has its default options, and nothing is trained.",
        "",
        "- Passkey: how often the model prefers a number that is hidden in the text to a random one, over 5 depths",
        f"  with {PASSKEY_TRIALS} trials each. Chance is 50%.",
        "- Cost: the CPU time of the attention function on one thread",
        f"  ({COST_LENGTH:,} tokens, {COST_HEADS} heads of {COST_HEAD_SIZE}, float32, `sdpa`, no gradients), as a",
        "  ratio to plain attention. YaRN and NTK only change angles, so they cost nothing.",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{' --- |' * len(HEADER)}",
        *(f"| {' | '.join(row)} |" for row in quality_table(results)),
        "",
        "Intervals (95%) of the perplexity at 4x: "
        + "; ".join(
            "{} {:.2f} to {:.2f}".format(name, *quality["4x"]["interval"])
            for name, quality in results["quality"].items()
        )
        + ".",
        "",
        "Quartiles of the cost: "
        + "; ".join(
            f"{name} {cost['low']:.2f} to {cost['high']:.2f}"
            for name, cost in results["cost"].items()
            if name != "plain"
        )
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost", action="store_true", help="measure the cost again")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"quality": {}, "cost": {}}
    if arguments.cost or not results["cost"]:
        results["cost"] = measure_cost()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(results["cost"])
    for name in METHODS:
        if name not in results["quality"]:
            results["quality"][name] = measure_quality(name)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(name, results["quality"][name], flush=True)
    PAGE.write_text(render_page(results))


if __name__ == "__main__":
    main()
