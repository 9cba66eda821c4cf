"""Run the demo: train, convert, fine-tune, evaluate, generate, report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

SCHEMES = ("rope", "alibi", "t5")


def main(directory: Path, steps: int, finetuning_steps: int, train_size: int, test_size: int) -> int:
    from . import evaluate, finetune, pretrain, report, text

    start = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    _announce(1, "writing texts: source code of Python's standard library, one token per byte")
    texts = text.write_texts(directory / "text", train_size, test_size)
    _announce(2, f"training a stock GPT-2 for {steps} steps on {pretrain.TRAINED_LENGTH} tokens at a time")
    models = {evaluate.STOCK: directory / "stock"}
    num_parameters = pretrain.train_stock_model(texts.train, steps, directory / "stock")
    stock_perplexity = evaluate.validation_perplexity(directory / "stock", texts)
    curves: dict[str, list[finetune.CurvePoint]] = {}
    for scheme in SCHEMES:
        _announce(3, f"converting to {scheme} and fine-tuning with the recommended recipe")
        models[scheme] = directory / scheme
        curves[scheme] = finetune.finetune(scheme, directory / "stock", texts, finetuning_steps, models[scheme])
    _announce(4, "evaluating all four models at 1, 2, 4 and 8 times the trained length")
    evaluation = evaluate.evaluate_lengths(models, texts)
    evaluation.save_json(directory / "evaluation.json")
    print(f"\n{evaluation}\n")
    _announce(5, "generating text, measuring attention, writing the report")
    results = report.DemoResults(
        evaluation=evaluation,
        stock_perplexity=stock_perplexity,
        curves=curves,
        attention=evaluate.attention_by_distance(models, texts),
        position_table=evaluate.position_table(directory / "stock"),
        samples=evaluate.generate_samples(models),
        num_parameters=num_parameters,
        long_rows_from=finetune.tokens_at(finetune.stages(finetuning_steps)[0], finetuning_steps),
        pretraining_tokens=steps * pretrain.BATCH_SIZE * pretrain.TRAINED_LENGTH,
        seconds=time.monotonic() - start,
        directory=directory,
    )
    page = directory / "report.html"
    page.write_text(report.render(results), encoding="utf-8")
    failures = evaluate.failed_expectations(evaluation)
    print("\n".join(["", *report.summary_lines(evaluation), *(f"NOT AS EXPECTED: {line}" for line in failures)]))
    print(f"\nFinished in {time.monotonic() - start:.0f} seconds. Report: {page.resolve()}")
    return 1 if failures else 0


def _announce(number: int, message: str) -> None:
    print(f"[{number}/5] {message}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="output directory for models and report")
    parser.add_argument("--steps", type=int, default=700, help="training steps of the stock model")
    parser.add_argument("--finetuning-steps", type=int, default=150, help="fine-tuning steps per variant")
    parser.add_argument("--train-size", type=int, default=2_000_000, help="bytes of training text")
    parser.add_argument("--test-size", type=int, default=65_536, help="bytes of test text")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads slow down everything else
    os.environ["HF_DATASETS_CACHE"] = str(args.directory.resolve() / "cache")

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sys.exit(main(**vars(args)))
