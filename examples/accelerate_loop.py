"""A training loop of one's own, on accelerate: a causal checkpoint learns a new encoding from the model as it was.

python examples/accelerate_loop.py --model openai-community/gpt2 --scheme t5 --data text.txt --output-dir out
accelerate launch --config_file examples/configs/ddp.yaml examples/accelerate_loop.py --model ...

Given again after it was cut short, the same command goes on from the last checkpoint. In many processes each has a
copy of the model (DDP); `hf-posenc train` also does it in shards.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup, set_seed

import hf_posenc
from hf_posenc.training.rates import parameter_groups
from hf_posenc.training.teacher import Teacher, Weights, layers_of, recorded


def rows_of(path: Path, tokenizer: Any, length: int) -> torch.Tensor:
    """The text as token ids, (rows, length). What is left over is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


def batches(accelerator: Accelerator, loader: Any, step: int) -> Iterator[torch.Tensor]:
    """From a step on, epoch after epoch: the same ones, whether the run was cut short or not."""
    epoch, seen = divmod(step, len(loader))
    while True:
        loader.set_epoch(epoch)
        yield from accelerator.skip_first_batches(loader, seen) if seen else loader
        epoch, seen = epoch + 1, 0


def save(accelerator: Accelerator, place: Path) -> None:
    """Under its name only once it is whole, so that a run that is killed leaves no half of a checkpoint."""
    unfinished = place.with_name("unfinished")
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(place)
        for old in sorted(place.parent.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main(given: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=given.cpu, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(given.seed)
    kept = sorted((given.output_dir / "checkpoints").glob("step-*"))
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    rows = rows_of(given.data, tokenizer, given.length)

    # The stock model is the teacher. Its attention is also what the new scheme is fitted to, before any training.
    stock_model = AutoModelForCausalLM.from_pretrained(given.model).to(accelerator.device)
    teacher = Teacher(stock_model)
    scheme = json.loads(given.scheme) if given.scheme[0] in "[{" else given.scheme
    model = AutoModelForCausalLM.from_pretrained(given.model, position_scheme=scheme).to(accelerator.device).train()
    if not kept and given.fit_steps:
        input_ids = rows[: 2 * given.fit_steps]
        result = hf_posenc.fit(stock_model, model, input_ids, projections=True, steps=given.fit_steps)
        accelerator.print(f"attention fitted: {result.before:.4f} to {result.after:.4f} nats from the stock attention")

    optimizer = torch.optim.AdamW(parameter_groups(model, given.learning_rate, weight_decay=0.01), betas=(0.9, 0.98))
    # accelerate moves the schedule on once for each process.
    whole = given.steps * accelerator.num_processes
    schedule = get_cosine_schedule_with_warmup(optimizer, whole // 20, whole)
    loader = DataLoader(rows, batch_size=given.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    done = 0
    if kept:
        accelerator.load_state(str(kept[-1]))
        done = int(kept[-1].name.removeprefix("step-"))
        accelerator.print(f"going on from step {done}")

    layers = layers_of(accelerator.unwrap_model(model))
    for step, ids in enumerate(batches(accelerator, loader, done), start=done + 1):
        if step > given.steps:
            break
        lesson = teacher.look_at({"input_ids": ids})
        with recorded(layers) as states:
            logits = model(ids, use_cache=False).logits
        # states[0] is what goes into the first layer: without the old table, no training makes that the same.
        loss = sum(lesson.parts(Weights(), logits, states[1:], None).values())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
        if step % given.save_every == 0:
            save(accelerator, given.output_dir / "checkpoints" / f"step-{step:07}")

    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(given.output_dir, state_dict=weights)
        tokenizer.save_pretrained(given.output_dir)
    accelerator.print(f"The variant is in {given.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a stock causal checkpoint: a directory or a Hub id")
    parser.add_argument("--scheme", required=True, help="the name of a position scheme, or JSON")
    parser.add_argument("--data", required=True, type=Path, help="a text file")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fit-steps", type=int, default=100, help="on two rows each, before the training")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row; no more than the model was made for")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a process and step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--cpu", action="store_true", help="without this, several processes need a GPU each")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
