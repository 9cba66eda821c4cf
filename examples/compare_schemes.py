"""Compare position encodings from scratch: train a small GPT-2 with each, then evaluate all at several lengths.

By default, it compares five schemes on the source code of Python's standard library, offline and on a CPU. Give your
own schemes as names or JSON, and your own text:

    python -m examples.compare_schemes --schemes rope alibi 't5={"type": "t5", "init": "paper"}' --data my.txt

It writes comparison.md (the table), two figures, all numbers as JSON, and the models, which the Auto classes load.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, get_cosine_schedule_with_warmup, set_seed
from transformers.utils import logging

import hf_posenc
from examples.demo.text import byte_tokenizer, write_texts
from hf_posenc.evaluation import EvaluationReport
from hf_posenc.plots import save_figure
from hf_posenc.plots.evaluation import length_curve_figure
from hf_posenc.plots.style import line_style, subplots

SCHEMES = ("learned", "rope", "alibi", 't5={"type": "t5", "init": "paper", "max_distance": 64}', "none")
"""T5's buckets beyond the trained length would never be trained, so they end before it."""
TEST_FRACTION, SMOOTHING = 32, 20


def main(args: argparse.Namespace) -> None:
    start = time.monotonic()
    schemes = dict(map(parse_scheme, args.schemes))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    train_ids, test_text = read_data(args.data, args.output_dir / "text")
    losses: dict[str, list[float]] = {}
    for name, scheme in schemes.items():
        losses[name] = train(name, scheme, train_ids, args)
    models = {name: str(model_directory(args.output_dir, name)) for name in schemes}
    report = hf_posenc.evaluate(models, test_text, lengths=["0.5x", "1x", "2x", "4x"], max_tokens=args.test_tokens)
    report.save_json(args.output_dir / "evaluation.json")
    (args.output_dir / "comparison.md").write_text(f"{report}\n", encoding="utf-8")
    save_figure(length_curve_figure(report), args.output_dir / "length_curve.png")
    save_figure(training_figure(losses), args.output_dir / "training_loss.png")
    print(f"\n{report}\n\n{best_by_length(report)}")
    print(f"\nFinished in {time.monotonic() - start:.0f} seconds. Table, figures and models: {args.output_dir}/")


def parse_scheme(text: str) -> tuple[str, Any]:
    """A name for the table, and the scheme: from a scheme name, JSON, or either after `name=`."""
    name, equals, scheme = text.partition("=")
    if not equals or "{" in name or "[" in name:
        name, scheme = text, text
    parsed = json.loads(scheme) if scheme.lstrip().startswith(("{", "[")) else scheme
    return name, parsed


def model_directory(output_dir: Path, name: str) -> Path:
    return output_dir / "models" / "".join(letter if letter.isalnum() else "-" for letter in name)


def read_data(data: Path | None, directory: Path) -> tuple[torch.Tensor, Path]:
    """Token ids to train on, one token per byte, and a file with the text to test on."""
    if data is None:
        texts = write_texts(directory, train_size=2_000_000, test_size=65_536)
        train_text, test_file = texts.train.read_text(encoding="utf-8"), texts.test
    else:
        text = data.read_text(encoding="utf-8")
        end = len(text) - len(text) // TEST_FRACTION  # the end of the text is held out
        train_text, test_file = text[:end], directory / "test.txt"
        directory.mkdir(parents=True, exist_ok=True)
        test_file.write_text(text[end:], encoding="utf-8")
    ids = byte_tokenizer()(train_text, return_tensors="pt", verbose=False)["input_ids"][0]
    return ids, test_file


def train(name: str, scheme: Any, ids: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Train one model on random rows, the same ones for every scheme, save it and return its losses."""
    set_seed(args.seed)
    tokenizer = byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        position_scheme=scheme,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id),
        loss_type="ForCausalLM",
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)
    rows_drawn = torch.Generator().manual_seed(args.seed)  # schemes draw different numbers of initial values
    losses = []
    with tqdm(range(args.steps), desc=f"training {name}", unit="step") as progress:
        for _ in progress:
            starts = torch.randint(len(ids) - args.length, (args.batch_size, 1), generator=rows_drawn)
            rows = ids[starts + torch.arange(args.length)]
            loss = model(rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    directory = model_directory(args.output_dir, name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return losses


def training_figure(losses: dict[str, list[float]]) -> Any:
    """The training loss of each model, averaged over some steps."""
    figure, (axes,) = subplots(1, 1, 5.0, 3.6)
    for number, (name, values) in enumerate(losses.items()):
        window = min(SMOOTHING, len(values))
        smooth = torch.tensor(values).unfold(0, window, 1).mean(-1).tolist()
        steps = range(window, len(values) + 1)
        axes.plot(steps, smooth, label=name, linewidth=1.3, **line_style(number))
    axes.set(xlabel="training step", ylabel="loss (nats per byte)")
    axes.legend()
    return figure


def best_by_length(report: EvaluationReport) -> str:
    """Which model has the lowest perplexity at each length, and which do not run there."""
    lines = []
    for length in sorted({result.length for result in report.perplexity}):
        values = {
            result.model: result.perplexity.value
            for result in report.perplexity
            if result.length == length and result.perplexity is not None
        }
        missing = [name for name in report.models if name not in values]
        stopped = f"; {', '.join(missing)} cannot read that far" if missing else ""
        best = min(values, key=lambda name: values[name], default="none")
        lines.append(f"{length:,} tokens: lowest perplexity {best}{stopped}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.compare_schemes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), help="scheme names or JSON, or name=scheme")
    parser.add_argument("--data", type=Path, help="a text file; its end is held out (default: Python's own source)")
    parser.add_argument("--output-dir", type=Path, default=Path("comparison"), help="default: comparison")
    parser.add_argument("--steps", type=int, default=200, help="training steps per scheme (default: 200)")
    parser.add_argument("--length", type=int, default=128, help="tokens per training row (default: 128)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step (default: 16)")
    parser.add_argument("--width", type=int, default=64, help="hidden size, a multiple of 4 (default: 64)")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="default: 0.004")
    parser.add_argument("--test-tokens", type=int, default=32_768, help="tokens to evaluate on (default: 32768)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(parser.parse_args())
