"""Training text sampled from the model itself, for when there is none: it resembles what the model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from ..errors import PosEncError
from ..text_data import INPUT_IDS

if TYPE_CHECKING:
    from datasets import Dataset

SELF_GENERATED_FILE = "self_generated.safetensors"


@torch.no_grad()
def generate_text(
    model: PreTrainedModel, rows: int, length: int, *, seed: int = 0, batch_size: int = 64, progress: bool = True
) -> torch.Tensor:
    """Sample text from a causal model at temperature 1.

    Args:
        model: The model; its generation settings are ignored.
        rows: Number of rows.
        length: Tokens per row, the first of which is the beginning-of-text token.
        seed: Seed of the sampling.
        batch_size: Rows sampled at a time.
        progress: Show a progress bar.

    Returns:
        Token ids of shape (rows, length).

    Raises:
        PosEncError: If the model has no token to start from or fewer positions than `length`.
    """
    config = model.config
    start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    if isinstance(start, list):
        start = start[0] if start else None
    if start is None:
        raise PosEncError("The model's config has no bos_token_id to start generating from: pass --data with text")
    if length > config.max_position_embeddings:
        raise PosEncError(
            f"Cannot generate rows of {length} tokens with a model of {config.max_position_embeddings} positions"
        )
    was_training, generation_config = model.training, model.generation_config
    model.eval()
    # Penalties and filters make text easier to read, but distort the distribution that the model has learned.
    model.generation_config = GenerationConfig()
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None}
    sampling |= {"max_new_tokens": length - 1, "pad_token_id": config.pad_token_id or 0}
    devices = [model.device] if model.device.type != "cpu" else []
    batches = []
    try:
        with (
            torch.random.fork_rng(devices=devices),
            tqdm(total=rows, desc="Generating text", unit="row", disable=not progress) as bar,
        ):
            torch.manual_seed(seed)
            for done in range(0, rows, batch_size):
                count = min(batch_size, rows - done)
                batches.append(model.generate(torch.full((count, 1), start, device=model.device), **sampling))
                bar.update(count)
    finally:
        model.generation_config = generation_config
        model.train(was_training)
    return torch.cat(batches).cpu()


def self_generated_dataset(
    model: PreTrainedModel, directory: Path, rows: int, length: int, source: dict[str, str]
) -> Dataset:
    """Text sampled from a model, kept in a directory so that a resumed run trains on the same.

    `source` identifies the model: text of another one, left by an aborted run, is replaced.
    """
    from datasets import Dataset

    path = directory / SELF_GENERATED_FILE
    metadata = {**source, "rows": f"{rows} of {length}"}
    if PartialState().is_main_process and _metadata(path) != metadata:
        input_ids = generate_text(model, rows, length)
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        save_file({INPUT_IDS: input_ids}, temporary, metadata=metadata)
        temporary.replace(path)
    PartialState().wait_for_everyone()
    return Dataset.from_dict({INPUT_IDS: load_file(path)[INPUT_IDS].tolist()})


def _metadata(path: Path) -> dict[str, str] | None:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata()
    except (OSError, SafetensorError):
        return None
