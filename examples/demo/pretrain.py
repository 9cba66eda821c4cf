"""Train the stock model of the demo: a small GPT-2 with learned positions."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, get_cosine_schedule_with_warmup, set_seed

from .text import byte_tokenizer

TRAINED_LENGTH = 128
BATCH_SIZE = 16
LEARNING_RATE = 4e-3


def train_stock_model(text: Path, steps: int, output_dir: Path) -> int:
    """Train on random windows of the text and save model and tokenizer; return the number of parameters."""
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
    print(f"      GPT-2, {model.num_parameters():,} parameters, {TRAINED_LENGTH} learned positions", flush=True)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    with tqdm(range(steps), desc="training", unit="step") as progress:
        for step in progress:
            starts = torch.randint(len(ids) - TRAINED_LENGTH, (BATCH_SIZE, 1))
            rows = ids[starts + torch.arange(TRAINED_LENGTH)]
            loss = model(rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                progress.set_postfix(perplexity=f"{loss.exp().item():.2f}")
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return model.num_parameters()
