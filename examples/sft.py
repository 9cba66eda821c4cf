"""Instruction tuning of a variant with TRL's SFTTrainer: pip install 'hf_posenc[examples]'

python examples/sft.py --model openai-community/gpt2 --scheme rope --data pairs.jsonl --output-dir out

Each line of the data has a "prompt" and a "completion". Several of them are packed into a row: a variant tells them
apart by their positions, on every attention backend.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

import hf_posenc  # noqa: F401  gives the Auto classes `position_scheme`


def main(given: argparse.Namespace) -> None:
    set_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    wanted = {} if given.scheme is None else {"position_scheme": given.scheme}
    model = AutoModelForCausalLM.from_pretrained(given.model, **wanted)
    arguments = SFTConfig(
        output_dir=str(given.output_dir),
        max_steps=given.steps,
        max_length=given.length,
        packing=True,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=given.bf16,
        seed=given.seed,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(given.data), split="train"),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    print(f"saved with the position scheme {AutoConfig.from_pretrained(given.output_dir).position_scheme!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory or a Hub id: a variant, or a stock checkpoint")
    parser.add_argument("--scheme", help="of a stock checkpoint: the name of a position scheme")
    parser.add_argument("--data", required=True, type=Path, help="a JSONL file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a process and step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
