"""Train, convert, recover, measure, save, load, generate, report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

SCHEMES = ("rope", "alibi", "t5")


def main(directory: Path, steps: int, recovery_steps: int, size: int, test_size: int) -> int:
    from . import measure, page, recovery, stock, text

    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    _say(1, "text: sources of Python's standard library, byte by byte")
    texts = text.write_texts(directory / "text", size, test_size)
    _say(2, f"a stock GPT-2, trained for {steps} steps on {stock.TRAINED_LENGTH} tokens at a time")
    models = {measure.STOCK: directory / "stock"}
    parameters = stock.train_stock(texts.train, steps, directory / "stock")
    original = measure.watched(directory / "stock", texts)
    curves: dict[str, list[recovery.Look]] = {}
    for scheme in SCHEMES:
        _say(3, f"to {scheme}, with the recommended recipe")
        models[scheme] = directory / scheme
        curves[scheme] = recovery.recover(scheme, directory / "stock", texts, recovery_steps, models[scheme])
    _say(4, "all four, loaded from disk and measured at 1, 2, 4 and 8 times the trained length")
    evaluation = measure.measured(models, texts)
    evaluation.save_json(directory / "evaluation.json")
    print(f"\n{evaluation}\n")
    _say(5, "what they write, where they look, and the page")
    story = page.Story(
        evaluation=evaluation,
        original=original,
        curves=curves,
        attended=measure.attended(models, texts),
        table=measure.learned_table(directory / "stock"),
        samples=measure.sampled(models),
        parameters=parameters,
        longer_from=recovery.tokens_at(recovery.stages(recovery_steps)[0], recovery_steps),
        trained_tokens=steps * stock.ROWS_AT_ONCE * stock.TRAINED_LENGTH,
        seconds=time.monotonic() - began,
        directory=directory,
    )
    report = directory / "report.html"
    report.write_text(page.written(story), encoding="utf-8")
    broken = measure.broken_promises(evaluation)
    print("\n".join(["", *page.findings(evaluation), *(f"NOT AS PROMISED: {line}" for line in broken)]))
    print(f"\nThe page with all of it, after {time.monotonic() - began:.0f} seconds: {report.resolve()}")
    return 1 if broken else 0


def _say(number: int, what: str) -> None:
    print(f"[{number}/5] {what}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="where models and the page are written")
    parser.add_argument("--steps", type=int, default=700, help="of training the stock model")
    parser.add_argument("--recovery-steps", type=int, default=150, help="of training after each change of encoding")
    parser.add_argument("--size", type=int, default=2_000_000, help="bytes of text to train on")
    parser.add_argument("--test-size", type=int, default=65_536, help="bytes of text to measure on")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait busily slow down whatever else is running
    os.environ["HF_DATASETS_CACHE"] = str(arguments.directory.resolve() / "cache")

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sys.exit(main(**vars(arguments)))
