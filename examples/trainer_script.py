"""The stock Trainer of transformers: fit the new scheme to the stock attention, then fine-tune.

python examples/trainer_script.py --model openai-community/gpt2 --scheme alibi --data text.txt --output-dir out
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import hf_posenc


def rows_of(path: Path, tokenizer: Any, length: int) -> list[dict[str, list[int]]]:
    """The text in rows. What is left over is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids
    rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(given: argparse.Namespace) -> None:
    set_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, position_scheme=given.scheme)
    rows = rows_of(given.data, tokenizer, given.length)
    last = get_last_checkpoint(str(given.output_dir)) if given.output_dir.is_dir() else None
    if last is None and given.fit_steps:
        stock_model = AutoModelForCausalLM.from_pretrained(given.model)
        input_ids = torch.tensor([row["input_ids"] for row in rows[: 2 * given.fit_steps]])
        hf_posenc.fit(stock_model, model, input_ids, projections=True, steps=given.fit_steps)
    arguments = TrainingArguments(
        output_dir=str(given.output_dir),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=given.save_every,
        report_to="none",
        seed=given.seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a stock causal checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", required=True, help="the name of a position scheme")
    parser.add_argument("--data", required=True, type=Path, help="a text file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fit-steps", type=int, default=100, help="on two rows each, before the training")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a process and step")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
