"""Low-rank adapters through PEFT, on a variant whose positions are trained as well: saved, loaded again, merged.

python examples/peft_lora.py --model openai-community/gpt2 --scheme t5 --data text.txt --output-dir out

PEFT saves what it has added, and the modules that it was told to save. Those of a scheme are named by their place in
`position_scheme`, so that the adapter's file holds the low-rank matrices and a whole copy of the positions' parameters;
nothing else of the model. It goes with the variant that it was made on, which is why that is saved first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_posenc  # noqa: F401  gives the Auto classes `position_scheme`


def rows_of(path: Path, tokenizer: Any, length: int) -> torch.Tensor:
    """The text as token ids, (rows, length). What is left over is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


def train(model: Any, rows: torch.Tensor, given: argparse.Namespace) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.learning_rate, weight_decay=0.0)
    model.train()
    for step in range(1, given.steps + 1):
        ids = rows[torch.randint(len(rows), (given.batch_size,))].to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}")


def main(given: argparse.Namespace) -> None:
    set_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    rows = rows_of(given.data, tokenizer, given.length)
    variant, adapter, merged = (given.output_dir / name for name in ("variant", "adapter", "merged"))
    # Saved and loaded first: an adapter notes the name of its base, which a variant has once it is saved.
    AutoModelForCausalLM.from_pretrained(given.model, position_scheme=given.scheme).save_pretrained(variant)
    base = AutoModelForCausalLM.from_pretrained(variant)

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=given.rank,
        lora_alpha=2 * given.rank,
        target_modules="all-linear",
        exclude_modules=r".*position_scheme.*",
        modules_to_save=["position_scheme.0"],
    )
    model = get_peft_model(base, settings)
    model.print_trainable_parameters()
    train(model, rows, given)
    model.save_pretrained(adapter)

    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(variant), str(adapter))
    with torch.no_grad():
        expected, found = (one.eval()(rows[:1]).logits for one in (model.cpu(), again))
    print(f"loaded again: logits differ by {(expected - found).abs().max().item():.1e} at most")
    again.merge_and_unload().save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    print(f"merged, a variant without adapters: {merged}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a stock causal checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", required=True, help="the name of a position scheme that has parameters")
    parser.add_argument("--data", required=True, type=Path, help="a text file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
