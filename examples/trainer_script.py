"""Convert a causal model to another position scheme and fine-tune it with the stock Trainer.

    python examples/trainer_script.py --model openai-community/gpt2 --scheme alibi --data text.txt --output-dir out

Rerun the same command to resume from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import hf_posenc


def load_rows(path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Tokenize a text file and cut it into rows, (rows, length). An incomplete last row is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


def main(args: argparse.Namespace) -> None:
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_rows(args.data, tokenizer, args.length)
    model = AutoModelForCausalLM.from_pretrained(args.model, position_scheme=args.scheme)
    checkpoint = get_last_checkpoint(str(args.output_dir)) if args.output_dir.is_dir() else None
    if args.fit_steps and checkpoint is None:
        # Optional warm start: fit the new scheme to the attention of the stock model.
        stock_model = AutoModelForCausalLM.from_pretrained(args.model)
        hf_posenc.fit(stock_model, model, rows[: 2 * args.fit_steps], projections=True, steps=args.fit_steps)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output_dir),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_steps=args.save_every,
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="stock causal checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", required=True, help="name of a position scheme")
    parser.add_argument("--data", required=True, type=Path, help="text file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fit-steps", type=int, default=100, help="steps of fitting attention before training")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process and step")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
