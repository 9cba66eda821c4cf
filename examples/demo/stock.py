"""The model that all begins with: a small GPT-2 with a table of learned positions, trained from nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, get_cosine_schedule_with_warmup, set_seed

from .text import byte_tokenizer

TRAINED_LENGTH = 128
ROWS_AT_ONCE = 16
LEARNING_RATE = 4e-3


def train_stock(text: Path, steps: int, directory: Path) -> int:
    """Rows from anywhere in the text, and the checkpoint with its tokenizer in the directory; how many parameters."""
    set_seed(0)
    tokenizer = byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=TRAINED_LENGTH,
        n_embd=96,
        n_layer=4,
        n_head=4,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id),
        loss_type="ForCausalLM",
    )
    model = AutoModelForCausalLM.from_config(config)
    print(
        f"      GPT-2, {model.num_parameters():,} parameters, a table of {TRAINED_LENGTH} learned positions", flush=True
    )
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    with tqdm(range(steps), desc="training", unit="step") as bar:
        for step in bar:
            starts = torch.randint(len(ids) - TRAINED_LENGTH, (ROWS_AT_ONCE, 1))
            rows = ids[starts + torch.arange(TRAINED_LENGTH)]
            loss = model(rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                bar.set_postfix(perplexity=f"{loss.exp().item():.2f}")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.num_parameters()
