"""Read and rewrite safetensors shards.

`safetensors` validates headers and sizes. Tensor data is read only to rewrite a shard, one shard at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import PosEncError
from .files import list_pickles

RotaryChange = Literal["interleaved_to_halves", "halves_to_interleaved"]
"""Meta's LLaMA files and GPT-J rotate neighbouring features together, transformers features half a head apart."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A valid safetensors file: its tensors by name, on the meta device, and its metadata."""

    path: Path
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Read the header of a file. Raises `PosEncError` if the file is missing, damaged or incomplete."""
        if not path.is_file():
            raise PosEncError(f"{path} is missing" if not path.exists() else f"{path} is not a file")
        tensors = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    header = file.get_slice(name)
                    # Quantized formats such as F4 are not in the table; their shapes are enough to link or list them.
                    dtype = str_to_torch_dtype.get(header.get_dtype(), torch.uint8)
                    tensors[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
                return cls(path, tensors, file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise PosEncError(f"{path} is damaged, incomplete or not a safetensors file: {error}") from error

    def link_or_copy(self, target: Path) -> None:
        """Hard-link the file, or copy it. Saving over a link leaves the original alone: safetensors replaces files."""
        real_path = self.path.resolve()
        try:
            os.link(real_path, target)
        except OSError:
            shutil.copyfile(real_path, target)

    def rewrite(self, target: Path, dropped: set[str], row_orders: dict[str, list[int]]) -> None:
        """Save a copy without the dropped tensors and with the rows of others reordered. Loads the whole shard."""
        tensors = {name: tensor for name, tensor in load_file(self.path).items() if name not in dropped}
        for name in row_orders.keys() & tensors.keys():
            tensors[name] = reorder_rows(tensors[name], row_orders[name])
        save_file(tensors, target, metadata=self.metadata or None)


def read_shards(directory: Path) -> tuple[Shard, ...]:
    """Read the headers of a checkpoint's shards. Raises `PosEncError` if any is missing or damaged."""
    if (directory / SAFE_WEIGHTS_NAME).is_file():  # transformers also prefers the single file if both exist
        return (Shard.open(directory / SAFE_WEIGHTS_NAME),)
    index_path = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index_path.is_file():
        pickles = list_pickles(directory)
        warning = f" Found {pickles[0]}, a pickle, which can run arbitrary code when loaded." if pickles else ""
        raise PosEncError(
            f"{directory} has no {SAFE_WEIGHTS_NAME}; only safetensors are supported.{warning} If you trust it, load "
            "it and save it again with save_pretrained"
        )
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise PosEncError(f"{index_path} is not an index of shards: {error!r}") from None
    if any(not isinstance(name, str) or Path(name).name != name for name in files):
        raise PosEncError(f"{index_path} lists files outside of {directory}")
    shards = {name: Shard.open(directory / name) for name in files}
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise PosEncError(f"{index_path} lists tensor {name!r} in {file}, which does not contain it")
    return tuple(shards.values())


def rotary_feature_order(change: RotaryChange, head_size: int, rotary_size: int) -> list[int]:
    """For each feature of a head, its index before the change. A partial rotation moves the first `rotary_size`."""
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise PosEncError(f"Rotary features come in pairs: cannot reorder {rotary_size} of {head_size} features")
    order = [*range(0, rotary_size, 2), *range(1, rotary_size, 2)]
    if change == "halves_to_interleaved":
        order = [order.index(feature) for feature in range(rotary_size)]
    return [*order, *range(rotary_size, head_size)]


def reorder_rows(weight: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Reorder the rows within every consecutive block of `len(order)` rows."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1).contiguous()
