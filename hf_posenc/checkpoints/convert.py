"""Convert a checkpoint to a position scheme, file by file: shards as they are, and one more for what is new."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..patches import SchemePlan, init_scheme_weights, plan_schemes, register_variants, with_scheme
from .atomic import atomic_directory, resolve_output_dir
from .drift import Drift, measure_checkpoint_drift
from .layout import RotaryChange, feature_order
from .shards import Shard
from .source import Source

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion did: tensors by name, and how many numbers they hold."""

    out: Path
    position_scheme: Any
    dropped: dict[str, int]
    added: dict[str, int]
    kept: dict[str, int]
    linked: tuple[str, ...]
    """Shards that went along as they were."""
    rewritten: tuple[str, ...]
    """Shards that were copied without what was dropped, or with features in another order."""
    drift: Drift | None = None
    """How far it is from the source before any training, where that was asked for."""

    def __str__(self) -> str:
        lines = [f"{self.out}: position scheme {json.dumps(self.position_scheme)}"]
        for word in ("kept", "dropped", "added"):
            tensors = getattr(self, word)
            lines.append(f"  {word:<8} {len(tensors):>6,} tensors {sum(tensors.values()):>15,} parameters")
            if word != "kept":
                lines.extend(f"    {name} ({numbers:,})" for name, numbers in sorted(tensors.items()))
        if self.drift is not None:
            lines.append(f"  drift from the source: {self.drift}")
        return "\n".join(lines)


def convert_checkpoint(
    source: str | Path,
    position_scheme: Any,
    out: str | Path,
    *,
    force: bool = False,
    seed: int = 0,
    rotary_weights: RotaryChange | None = None,
    measure: str | Path | None = None,
    **hub: Any,
) -> Conversion:
    """Write the variant of a checkpoint with a position scheme to the directory `out`, without building the model.

    `source` is a directory or a Hub id; `hub` goes to the download (`revision`, `token`, ...). Only safetensors are
    read. `out` is there in whole when this returns, or not at all; one that is there already is replaced with `force`
    only. `seed` is for the initial values of schemes that start at random. `rotary_weights` puts the features of
    LLaMA's queries and keys into another order: "interleaved_to_halves" for weights as Meta's own files have them,
    "halves_to_interleaved" for rope with that layout. `measure` names a text file on which the two are compared, for
    which both are loaded. Raises ValueError for what cannot be done.
    """
    if rotary_weights not in (None, *get_args(RotaryChange)):
        raise ValueError(f"rotary_weights is one of {', '.join(get_args(RotaryChange))}; got {rotary_weights!r}")
    found = Source.open(source, **hub)
    place = resolve_output_dir(out, found.directory, force)
    config = with_scheme(copy.deepcopy(found.config), position_scheme)
    config.record_base_model(source)
    register_variants(type(found.config))
    planned = plan_schemes(found.architecture, config)
    found.refuse_other_weights(planned.state.uses_stock_table)
    config.architectures = [f"PosEnc{name}" for name in found.config.architectures or []] or None
    dropped, row_orders = _dropped(found, planned), _row_orders(found, planned, rotary_weights)
    added = _new_tensors(found, planned, seed)
    with atomic_directory(place, force) as directory:
        linked, rewritten = _write_weights(found, dropped, row_orders, added, directory)
        for path in found.companions():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found.directory / path, directory / path)  # no link: tokenizers are saved into their files
        config.save_pretrained(directory)
        measured = None if measure is None else measure_checkpoint_drift(found.directory, directory, Path(measure))
    sizes = {name: shard.entries[name].numbers for name, shard in found.names.items()}
    return Conversion(
        out=Path(out).expanduser(),
        position_scheme=config.position_scheme,
        dropped={name: sizes[name] for name in dropped},
        added={name: tensor.numel() for name, tensor in added.items()},
        kept={name: numbers for name, numbers in sizes.items() if name not in dropped},
        linked=tuple(linked),
        rewritten=tuple(rewritten),
        drift=measured,
    )


def _prefix(source: Source) -> str:
    """What stands before the names of the base model's parameters: nothing, where it was saved without a head."""
    prefix = source.architecture.base.base_model_prefix + "."
    return prefix if any(name.startswith(prefix) for name in source.names) else ""


def _dropped(source: Source, planned: SchemePlan) -> list[str]:
    table = source.architecture.table
    if table is None or planned.state.uses_stock_table:
        return []
    return [name for name in source.names if name == f"{_prefix(source)}{table}.weight"]


def _row_orders(source: Source, planned: SchemePlan, change: RotaryChange | None) -> dict[str, list[int]]:
    """The order of the rows of every query and key projection, where it is to change."""
    if change is None:
        return {}
    architecture, shape = source.architecture, source.architecture.shape(source.config)
    if architecture.rotary is None:
        raise ValueError(
            f"rotary_weights={change!r} is for architectures with a rotation of their own; "
            f"a {source.config.model_type} has none, so that its features have no order"
        )
    layout = "halves" if change == "interleaved_to_halves" else "interleaved"
    turned = shape.head_size
    for scheme in planned.schemes:
        if scheme.acts_at("rotate"):
            if getattr(scheme.options, "layout", "halves") != layout:
                raise ValueError(
                    f"rotary_weights={change!r} makes features turn together that {scheme.name} does not turn "
                    f'together: it goes with {{"type": "rope", "layout": "{layout}"}}'
                )
            turned = 2 * len(getattr(scheme, "frequencies", [])) or turned
    order = feature_order(change, shape.head_size, turned)
    ends = tuple(f".{name}.{kind}" for name in ("q_proj", "k_proj") for kind in ("weight", "bias"))
    found = {name: order for name in source.names if name.endswith(ends)}
    weights = [name for name in found if name.endswith(".weight")]
    odd = [name for name in found if source.names[name].entries[name].shape[0] % shape.head_size]
    packed = [name for name in found if source.names[name].entries[name].dtype not in DTYPES]
    if len(weights) != 2 * shape.num_layers or odd or packed:
        raise ValueError(
            f"rotary_weights={change!r} needs the plain weights of every query and key projection, and they are not "
            f"here as such ({(odd or packed or ['some are missing'])[0]}): convert it before it is quantised"
        )
    return found


@torch.no_grad()
def _new_tensors(source: Source, planned: SchemePlan, seed: int) -> dict[str, torch.Tensor]:
    """The parameters of the schemes as a model of them would have them, by their names in the checkpoint."""
    architecture, prefix = source.architecture, _prefix(source)
    modules: dict[str, nn.Module] = {}
    for number, scheme in enumerate(planned.schemes):
        modules[f"{prefix}position_scheme.{number}"] = scheme
    for layer, parts in planned.layer_modules.items():
        path = f"{prefix}{architecture.layers}.{layer}.{architecture.self_attention}.position_scheme"
        modules.update({f"{path}.{place}": part for place, part in parts.items()})
    tensors: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, module in modules.items():
            for child in module.modules():
                init_scheme_weights(child)
            for name, parameter in module.state_dict().items():
                tensors[f"{path}.{name}"] = parameter.to(_dtype(source)).contiguous()
    return tensors


def _dtype(source: Source) -> torch.dtype:
    """That of most of the checkpoint's numbers."""
    numbers: dict[str, int] = {}
    for name, shard in source.names.items():
        entry = shard.entries[name]
        numbers[entry.dtype] = numbers.get(entry.dtype, 0) + entry.numbers
    floating = {dtype: count for dtype, count in numbers.items() if dtype in DTYPES}
    return DTYPES[max(floating, key=lambda dtype: floating[dtype])] if floating else torch.float32


def _write_weights(
    source: Source,
    dropped: list[str],
    row_orders: dict[str, list[int]],
    added: dict[str, torch.Tensor],
    directory: Path,
) -> tuple[list[str], list[str]]:
    """Shards, and an index if there are several. Returns the names of those linked and those rewritten."""
    shards = [shard for shard in source.shards if set(shard.entries) - set(dropped)]
    total = len(shards) + bool(added)
    linked: list[str] = []
    rewritten: list[str] = []
    weight_map: dict[str, str] = {}
    bytes_in_all = 0
    for number, shard in enumerate(shards, start=1):
        name, own = _shard_name(number, total), set(dropped) & set(shard.entries)
        changed = bool(own or set(row_orders) & set(shard.entries))
        if changed:
            shard.write(directory / name, own, row_orders)
        else:
            shard.link_or_copy(directory / name)
        (rewritten if changed else linked).append(name)
        for tensor, entry in shard.entries.items():
            if tensor not in own:
                weight_map[tensor] = name
                bytes_in_all += entry.stop - entry.start
    if added:
        name = _shard_name(total, total)
        save_file(added, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(added, name))
        bytes_in_all += sum(tensor.nbytes for tensor in added.values())
    for name in set(weight_map.values()):
        Shard.read(directory / name)  # whatever happened to the disk meanwhile
    if total > 1:
        index = {"metadata": {"total_size": bytes_in_all}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return linked, rewritten


def _shard_name(number: int, total: int) -> str:
    return SAFE_WEIGHTS_NAME if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
