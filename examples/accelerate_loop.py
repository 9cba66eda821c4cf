"""Convert a causal model to another position scheme and distill the original into it, in a plain accelerate loop.

    python examples/accelerate_loop.py --model openai-community/gpt2 --scheme t5 --data text.txt --output-dir out
    accelerate launch --config_file examples/configs/ddp.yaml examples/accelerate_loop.py --model ...

Rerun the same command to resume from the last checkpoint. For sharded training (FSDP), use `hf-posenc train`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
    set_seed,
)

import hf_posenc


def load_rows(path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Tokenize a text file and cut it into rows, (rows, length). An incomplete last row is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


def batches(accelerator: Accelerator, loader: DataLoader, first_step: int) -> Iterator[torch.Tensor]:
    """Endless batches from a step on: the same ones, whether the run was interrupted or not."""
    epoch, skipped = divmod(first_step, len(loader))
    while True:
        loader.set_epoch(epoch)  # accelerate adds this to prepared loaders
        yield from accelerator.skip_first_batches(loader, skipped) if skipped else loader
        epoch, skipped = epoch + 1, 0


def distillation_loss(student: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """KL divergence of the predictions, plus the relative error of the hidden states after each layer."""
    with torch.no_grad():
        target = teacher(ids, use_cache=False, output_hidden_states=True)
    output = student(ids, use_cache=False, output_hidden_states=True)
    log_probs, target_log_probs = (logits.log_softmax(-1).flatten(0, 1) for logits in (output.logits, target.logits))
    loss = F.kl_div(log_probs, target_log_probs, reduction="batchmean", log_target=True)
    # hidden_states[0] is the input of the first layer; without the old position table it cannot match.
    layers = list(zip(output.hidden_states[1:], target.hidden_states[1:], strict=True))
    # Relative to each row, so that the loss does not depend on how rows are divided among processes.
    errors = [((ours - theirs).square().mean((1, 2)) / theirs.var((1, 2))).mean() for ours, theirs in layers]
    return loss + torch.stack(errors).mean()


def save_checkpoint(accelerator: Accelerator, path: Path) -> None:
    """Write to a temporary name first, so that a killed run leaves no partial checkpoint; keep the last two."""
    temporary = path.with_name("unfinished")
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        temporary.rename(path)
        for old in sorted(path.parent.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_rows(args.data, tokenizer, args.length)
    checkpoints = sorted((args.output_dir / "checkpoints").glob("step-*"))

    # The stock model is the teacher. Before training, the new scheme is fitted to its attention.
    teacher = AutoModelForCausalLM.from_pretrained(args.model).to(accelerator.device).eval()
    scheme = json.loads(args.scheme) if args.scheme[0] in "[{" else args.scheme
    model = AutoModelForCausalLM.from_pretrained(args.model, position_scheme=scheme).to(accelerator.device).train()
    if args.fit_steps and not checkpoints:
        result = hf_posenc.fit(teacher, model, rows[: 2 * args.fit_steps], projections=True, steps=args.fit_steps)
        accelerator.print(f"fitted attention: divergence {result.before:.4f} -> {result.after:.4f} nats per query")

    # The scheme's parameters start untrained, so they learn faster than the rest.
    new = {name: parameter for name, parameter in model.named_parameters() if "position_scheme" in name}
    old = [parameter for name, parameter in model.named_parameters() if name not in new]
    groups = [{"params": old}, {"params": list(new.values()), "lr": 20 * args.learning_rate, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    processes = accelerator.num_processes  # accelerate steps the scheduler once per process
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20 * processes, args.steps * processes)
    loader = DataLoader(rows, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    first_step = 0
    if checkpoints:
        accelerator.load_state(str(checkpoints[-1]))
        first_step = int(checkpoints[-1].name.removeprefix("step-"))
        accelerator.print(f"resuming from step {first_step}")

    steps = range(first_step + 1, args.steps + 1)
    for step, ids in zip(steps, batches(accelerator, loader, first_step), strict=False):
        loss = distillation_loss(model, teacher, ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
        if step % args.save_every == 0:
            save_checkpoint(accelerator, args.output_dir / "checkpoints" / f"step-{step:07}")

    state_dict = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state_dict)
        tokenizer.save_pretrained(args.output_dir)
    accelerator.print(f"saved the variant to {args.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="stock causal checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", required=True, help="name of a position scheme, or JSON")
    parser.add_argument("--data", required=True, type=Path, help="text file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fit-steps", type=int, default=100, help="steps of fitting attention before training")
    parser.add_argument("--length", type=int, default=512, help="tokens per row, at most the model's context length")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process and step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
