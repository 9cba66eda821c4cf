"""Text of a causal model's own, for those who have none: what it samples is what it was trained on, more or less."""

from __future__ import annotations

from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig

ROWS_AT_A_TIME = 64


@torch.no_grad()
def own_text(
    model: Any, rows: int, length: int, *, seed: int = 0, rows_at_a_time: int = ROWS_AT_A_TIME, progress: bool = True
) -> torch.Tensor:
    """Token ids, (rows, length), sampled from the model itself at temperature 1, each row from its first token on."""
    config = model.config
    first = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    if isinstance(first, list):
        first = first[0] if first else None
    if first is None:
        raise ValueError("the model's config names no bos_token_id to begin a text with: pass data of your own")
    if length > config.max_position_embeddings:
        raise ValueError(
            f"a model of {config.max_position_embeddings} positions cannot write rows of {length} tokens: ask for less"
        )
    was_training, own_settings = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()  # penalties and filters are for reading: they are not what it learnt
    devices = [model.device] if model.device.type != "cpu" else []
    pieces = []
    try:
        with torch.random.fork_rng(devices=devices), tqdm(total=rows, unit="row", disable=not progress) as bar:
            torch.manual_seed(seed)
            for done in range(0, rows, rows_at_a_time):
                count = min(rows_at_a_time, rows - done)
                start = torch.full((count, 1), first, device=model.device)
                settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None}
                pieces.append(
                    model.generate(start, max_new_tokens=length - 1, pad_token_id=config.pad_token_id or 0, **settings)
                )
                bar.update(count)
    finally:
        model.generation_config = own_settings
        model.train(was_training)
    return torch.cat(pieces).cpu()
