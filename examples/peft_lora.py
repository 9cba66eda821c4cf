"""Train LoRA adapters on a variant together with its position parameters; save, reload and merge them.

    python examples/peft_lora.py --model openai-community/gpt2 --scheme t5 --data text.txt --output-dir out

`modules_to_save` makes PEFT train the scheme's parameters in full and save them with the adapter. An adapter belongs to
the variant it was trained on, so the variant is saved first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed

import hf_posenc  # noqa: F401  adds `position_scheme` to the Auto classes


def load_rows(path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Tokenize a text file and cut it into rows, (rows, length). An incomplete last row is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


def train(model: PeftModel, rows: torch.Tensor, args: argparse.Namespace) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, weight_decay=0.0)
    model.train()
    for step in range(1, args.steps + 1):
        ids = rows[torch.randint(len(rows), (args.batch_size,))].to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}")


def main(args: argparse.Namespace) -> None:
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_rows(args.data, tokenizer, args.length)
    variant_dir, adapter_dir, merged_dir = (args.output_dir / name for name in ("variant", "adapter", "merged"))
    # Save and reload the variant, so that the adapter records its directory as the base model.
    AutoModelForCausalLM.from_pretrained(args.model, position_scheme=args.scheme).save_pretrained(variant_dir)

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        exclude_modules=r".*position_scheme.*",
        modules_to_save=["position_scheme.0"],
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(variant_dir), config)
    model.print_trainable_parameters()
    train(model, rows, args)
    model.save_pretrained(adapter_dir)

    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(variant_dir), str(adapter_dir))
    with torch.no_grad():
        difference = model.cpu().eval()(rows[:1]).logits - reloaded.eval()(rows[:1]).logits
    print(f"reloaded the adapter: largest difference of logits {difference.abs().max().item():.1e}")
    reloaded.merge_and_unload().save_pretrained(merged_dir)
    tokenizer.save_pretrained(merged_dir)
    print(f"saved the merged variant to {merged_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="stock causal checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", required=True, help="name of a position scheme with parameters")
    parser.add_argument("--data", required=True, type=Path, help="text file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
