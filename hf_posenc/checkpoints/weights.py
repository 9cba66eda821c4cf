"""Write the weights of a checkpoint that was made from another.

Shards that do not change are hard-linked. Rotary features can be put into another order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import PosEncError
from .source import Shard

Transform = Callable[[torch.Tensor], torch.Tensor]
RotaryChange = Literal["interleaved_to_halves", "halves_to_interleaved"]
"""Meta's LLaMA files and GPT-J rotate neighbouring features together, transformers mostly those half a head apart."""


def write_shards(
    shards: Sequence[Shard],
    directory: Path,
    *,
    names: Mapping[str, str | None],
    transforms: Mapping[str, Transform],
    added: Mapping[str, torch.Tensor],
) -> tuple[list[str], list[str]]:
    """Write the shards of a new checkpoint one at a time, and an index if there are several.

    Args:
        shards: The shards of the old checkpoint.
        directory: The directory to write to.
        names: The new names of tensors, by the old ones, where they differ; None for tensors to leave out.
        transforms: How tensors change, by their old names.
        added: New tensors. They go into a shard of their own.

    Returns:
        The names of the files that were linked or copied, and of those that were written anew.
    """
    kept = [{name: names.get(name, name) for name in shard.tensors} for shard in shards]
    renamed = [{old: new for old, new in tensors.items() if new is not None} for tensors in kept]
    used = [(shard, tensors) for shard, tensors in zip(shards, renamed, strict=True) if tensors]
    num_shards = len(used) + bool(added)
    files = [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
    if num_shards == 1:
        files = [SAFE_WEIGHTS_NAME]
    linked, rewritten = [], []
    weight_map, total_size = dict.fromkeys(added, files[-1]), sum(tensor.nbytes for tensor in added.values())
    for file, (shard, tensors) in zip(files, used, strict=False):  # the last name may be that of the added tensors
        weight_map |= dict.fromkeys(tensors.values(), file)
        same_names = len(tensors) == len(shard.tensors) and all(old == new for old, new in tensors.items())
        if same_names and not shard.tensors.keys() & transforms.keys():
            _link_or_copy(shard, directory / file)
            total_size += sum(tensor.nbytes for tensor in shard.tensors.values())
            linked.append(file)
        else:
            total_size += _rewrite(shard, directory / file, tensors, transforms)
            rewritten.append(file)
    if added:
        save_file(dict(added), directory / files[-1], metadata={"format": "pt"})
    if num_shards > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return linked, rewritten


def _link_or_copy(shard: Shard, target: Path) -> None:
    """Hard-link a shard, or copy it. Saving over a link leaves the original alone: safetensors replaces files."""
    real_path = shard.path.resolve()
    try:
        os.link(real_path, target)
    except OSError:
        shutil.copyfile(real_path, target)


def _rewrite(shard: Shard, target: Path, names: Mapping[str, str], transforms: Mapping[str, Transform]) -> int:
    """Save a copy with only these tensors, renamed and changed; returns its size. Loads the whole shard."""
    stored, tensors = load_file(shard.path), {}
    for old, new in names.items():
        tensor = transforms[old](stored[old]) if old in transforms else stored[old]
        tensors[new] = tensor.contiguous()
    save_file(tensors, target, metadata=shard.metadata or None)
    return sum(tensor.nbytes for tensor in tensors.values())


def rotary_feature_order(change: RotaryChange, head_size: int, rotary_size: int) -> list[int]:
    """For each feature of a head, its index before the change. A partial rotation moves the first `rotary_size`."""
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise PosEncError(f"Rotary features come in pairs: cannot reorder {rotary_size} of {head_size} features")
    pairs = (-1, 2) if change == "interleaved_to_halves" else (2, -1)
    order = torch.arange(rotary_size).view(pairs).T.flatten()
    return [*order.tolist(), *range(rotary_size, head_size)]


def reorder_rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Reorder the rows of every head, for a weight or bias whose rows are the features of all heads."""
    return tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1).contiguous()
