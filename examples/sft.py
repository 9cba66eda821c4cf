"""Instruction-tune a variant with TRL's SFTTrainer (needs the extra `examples`).

    python examples/sft.py --model openai-community/gpt2 --scheme rope --data pairs.jsonl --output-dir out

Each line of the data has a "prompt" and a "completion". Examples are packed into rows; variants keep packed examples
apart by their position_ids on every attention backend.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

import hf_posenc  # noqa: F401  adds `position_scheme` to the Auto classes


def main(args: argparse.Namespace) -> None:
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    scheme = {} if args.scheme is None else {"position_scheme": args.scheme}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, **scheme),
        args=SFTConfig(
            output_dir=str(args.output_dir),
            max_steps=args.steps,
            max_length=args.length,
            packing=True,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=args.bf16,
            seed=args.seed,
        ),
        train_dataset=load_dataset("json", data_files=str(args.data), split="train"),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    config = AutoConfig.from_pretrained(args.output_dir)
    print(f"saved a variant with position_scheme={config.position_scheme!r} to {args.output_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="variant or stock checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", help="name of a position scheme, to convert a stock checkpoint")
    parser.add_argument("--data", required=True, type=Path, help="JSONL file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process and step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
