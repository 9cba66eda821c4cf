"""Convert a real LLM, SmolLM2-135M-Instruct, with `hf-posenc train`, and write REAL_LLM.md.

Rows of 256 tokens are from the validation split of WikiText-2; perplexity is that of the beginning of its test split.
Runs that are in the results file are not repeated, and one that is interrupted resumes:

    python -m benchmarks.recovery.real_llm MODEL_DIRECTORY WIKITEXT_DIRECTORY [--tokens 20000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc  # noqa: F401 (loads variants)

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "real_llm.json", HERE.parent / "REAL_LLM.md"
SCHEMES: tuple[Any, ...] = (
    {"type": "none", "layers": "3::4"},
    {"type": "t5", "shared": False},
    {"type": "alibi", "learned": "per_layer"},
)
TEST_CHARACTERS = 32_000
TRAIN_LENGTH = 256
WARM_UP_STEPS = 10
QUESTION = "What is the capital of France?"
COLUMNS = {
    "original": "original",
    "swapped": "swapped",
    "started": "after the warm start",
    "trained": "after training",
}


def convert(model: Path, text: Path, scheme: Any, tokens: int, directory: Path) -> dict[str, Any]:
    """Train one variant and return its measurements."""
    test_file = directory / "test.txt"
    directory.mkdir(parents=True, exist_ok=True)
    test_file.write_text((text / "test.txt").read_text(encoding="utf-8")[:TEST_CHARACTERS], encoding="utf-8")
    output = directory / "variant"
    command = [sys.executable, "-m", "hf_posenc", "train", "--model", str(model), "--scheme", json.dumps(scheme)]
    command += ["--data", str(text / "valid.txt"), "--eval-data", str(test_file), "--tokens", str(tokens)]
    command += ["--passes", "1", "--train-length", str(TRAIN_LENGTH), "--logging-steps", "1", "--save-total-limit", "1"]
    subprocess.run([*command, "--output-dir", str(output)], check=True)
    recovery = json.loads((output / "recovery.json").read_text(encoding="utf-8"))
    stages = {name: recovery if name == "trained" else recovery.get(name, {}) for name in COLUMNS}
    return {
        **{name: values.get("eval_perplexity") for name, values in stages.items()},
        "tokens": recovery["tokens_unique"],
        "seconds": round(recovery["train_seconds"]),
        "gradient_spike": gradient_spike(output),
        "answer": answer(output),
    }


def gradient_spike(directory: Path) -> float | None:
    """The largest gradient norm after warm-up, divided by the median of those before it."""
    states = sorted(directory.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    if not states:
        return None
    history = json.loads(states[-1].read_text(encoding="utf-8"))["log_history"]
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    return max(
        (norms[step] / statistics.median(norms[:step]) for step in range(WARM_UP_STEPS, len(norms))), default=None
    )


@torch.no_grad()
def answer(directory: Path) -> str:
    """What the model answers to a question, greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.eval().generate(**inputs, max_new_tokens=24, do_sample=False)
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def make_page(results: dict[str, Any]) -> str:
    """REAL_LLM.md."""
    titles = ["scheme", "tokens", *COLUMNS.values(), "above the original", "largest gradient", "minutes", "answer"]
    lines = [
        "# A real LLM",
        "",
        "SmolLM2-135M-Instruct (weights from a 4-bit release) under other encodings, by `hf-posenc train` with its "
        "defaults. Perplexity on the beginning of WikiText-2's test split, in rows of 256 tokens; training rows are "
        "from its validation split. The largest gradient norm after ten steps is given in multiples of the median of "
        f'those before it. The answer is that to "{QUESTION}" Minutes are those of two busy CPU cores. One run each:',
        "`python -m benchmarks.recovery.real_llm MODEL_DIRECTORY WIKITEXT_DIRECTORY`.",
        "",
        f"| {' | '.join(titles)} |",
        f"|{' --- |' * len(titles)}",
    ]
    for result in results.values():
        stages = [f"{result[name]:.2f}" for name in COLUMNS]
        spike = "" if result["gradient_spike"] is None else f"{result['gradient_spike']:.1f}"
        cells = [f"`{json.dumps(result['scheme'])}`", f"{result['tokens']:,}", *stages]
        cells += [f"{result['trained'] / result['original'] - 1:.1%}", spike, f"{result['seconds'] / 60:.0f}"]
        lines.append(f"| {' | '.join([*cells, result['answer'].splitlines()[0]])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing in the results file, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("text", type=Path, help="directory with valid.txt and test.txt of WikiText-2")
    parser.add_argument("--tokens", type=int, default=20_000, help="training tokens")
    parser.add_argument("--schemes", type=json.loads, nargs="+", default=SCHEMES, help="schemes, as JSON")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "hf_posenc_real_llm")
    options = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for index, scheme in enumerate(options.schemes):
        name = f"{json.dumps(scheme)}, {options.tokens} tokens"
        if name not in results:
            directory = options.directory / f"{options.tokens}-{index}"
            results[name] = {
                "scheme": scheme,
                **convert(options.model, options.text, scheme, options.tokens, directory),
            }
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(make_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
