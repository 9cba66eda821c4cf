"""Convert a checkpoint to another position scheme file by file.

Unchanged shards are hard-linked, shards that change are rewritten one at a time, and the parameters of the new scheme
go into a shard of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import PosEncError
from ..patches import SchemePlan, init_scheme_weights, plan_schemes, register_variants, with_scheme
from ..patches.compat import checkpoint_to_model_names
from ..spec import PositionScheme
from .companions import Companions, check_links, remove_code_fields
from .drift import Drift, measure_drift
from .files import atomic_directory, resolve_output_dir
from .inspection import base_prefix, build_meta_model, check_base_weights
from .lengths import check_max_length, set_config_length, write_max_length
from .source import Shard, Source, open_source

RotaryChange = Literal["interleaved_to_halves", "halves_to_interleaved"]
"""Meta's LLaMA files and GPT-J rotate neighbouring features together, transformers mostly those half a head apart."""
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The result of `convert_checkpoint`.

    Attributes:
        output_dir: Where the variant was written.
        position_scheme: Its position scheme.
        dropped: Parameter counts of removed tensors, by name.
        added: Parameter counts of the scheme's new tensors, by name.
        kept: Parameter counts of all other tensors, by name.
        linked_shards: Files that were hard-linked (or copied) unchanged.
        rewritten_shards: Files that lost a tensor or had rotary features reordered.
        left_out: Code and pickles of the source, and fields of its JSON files that name code.
        drift: How far outputs moved from the source's, if `drift_text` was given.
    """

    output_dir: Path
    position_scheme: PositionScheme
    dropped: dict[str, int]
    added: dict[str, int]
    kept: dict[str, int]
    linked_shards: tuple[str, ...]
    rewritten_shards: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    drift: Drift | None = None

    def __str__(self) -> str:
        lines = [f"{self.output_dir}: position scheme {json.dumps(self.position_scheme)}"]
        for label, tensors in {"kept": self.kept, "dropped": self.dropped, "added": self.added}.items():
            lines.append(f"  {label:<8} {len(tensors):>6,} tensors {sum(tensors.values()):>15,} parameters")
            if label != "kept":
                lines.extend(f"    {name} ({numel:,})" for name, numel in sorted(tensors.items()))
        lines += [f"  left out: {name}" for name in self.left_out]
        if self.drift is not None:
            lines.append(f"  drift from the source: {self.drift}")
        return "\n".join(lines)


def convert_checkpoint(
    source: str | Path,
    position_scheme: PositionScheme,
    output_dir: str | Path,
    *,
    force: bool = False,
    seed: int = 0,
    rotary_weights: RotaryChange | None = None,
    drift_text: str | Path | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Conversion:
    """Write a variant of a checkpoint with another position scheme, without building the model.

    At most one shard is held in memory. The output directory is complete when this returns, and absent if it fails.

    Args:
        source: A checkpoint directory or a Hub id. Only safetensors are read.
        position_scheme: A scheme name, a dict with options, or a list of schemes.
        output_dir: The directory to write.
        force: Replace `output_dir` if it is not empty.
        seed: For schemes with random initial values.
        rotary_weights: Reorder query and key features: "interleaved_to_halves" for weights in the order of
            Meta's files, "halves_to_interleaved" for rope with `layout="interleaved"`.
        drift_text: A text file on which to compare the outputs of source and variant. Loads both models.
        max_length: The longest input that the variant's files name, where other tools cut inputs; by default as in the
            source. The scheme must reach it.
        revision: Branch, tag or commit of a Hub id.
        token: A Hub token; by default the stored one.

    Returns:
        What was kept, dropped and added.

    Raises:
        PosEncError: If the source cannot be converted or the output cannot be written.

    Example:
        >>> print(hf_posenc.convert_checkpoint("openai-community/gpt2", "rope", "gpt2-rope"))
    """
    if rotary_weights not in (None, *get_args(RotaryChange)):
        expected = ", ".join(get_args(RotaryChange))
        raise PosEncError(f"Unknown rotary_weights {rotary_weights!r}; expected one of {expected}")
    checkpoint = open_source(source, revision=revision, token=token)
    target = resolve_output_dir(output_dir, checkpoint.directory, force)
    check_links(checkpoint.directory, (shard.path.name for shard in checkpoint.shards))
    companions = Companions.read(checkpoint.directory)
    config = with_scheme(checkpoint.config, position_scheme)
    left_out = (*(f"{field} in config.json" for field in remove_code_fields(vars(config))), *companions.left_out)
    config.record_base_model(source)
    register_variants(type(checkpoint.config))
    # Schemes are sized by the config, so the files must agree with it before they are built.
    check_base_weights(checkpoint.config, checkpoint.tensors)
    plan = plan_schemes(checkpoint.architecture, config)
    if max_length is not None:
        check_max_length(plan.schemes, max_length)
        set_config_length(config, max_length, plan.state.uses_stock_table)
    config.architectures = [f"PosEnc{name}" for name in checkpoint.config.architectures or []] or None
    layout = _ModelLayout.of(checkpoint)
    dropped, row_orders = _dropped_tensors(layout, plan), _row_orders(layout, plan, rotary_weights)
    added = _scheme_tensors(layout, plan, seed)
    drift = None
    with atomic_directory(target, force) as directory:
        linked, rewritten = _write_weights(checkpoint, dropped, row_orders, added, directory)
        companions.copy_to(directory)
        if max_length is not None:
            write_max_length(directory, max_length, lower=True)
        config.save_pretrained(directory)
        if drift_text is not None:
            drift = measure_drift(checkpoint.directory, directory, Path(drift_text))
    return Conversion(
        output_dir=Path(output_dir).expanduser(),
        position_scheme=config.position_scheme,
        dropped={name: checkpoint.tensors[name].numel() for name in dropped},
        added={name: tensor.numel() for name, tensor in added.items()},
        kept={name: tensor.numel() for name, tensor in checkpoint.tensors.items() if name not in dropped},
        linked_shards=tuple(linked),
        rewritten_shards=tuple(rewritten),
        left_out=left_out,
        drift=drift,
    )


@dataclasses.dataclass(frozen=True)
class _ModelLayout:
    """The names of a checkpoint's tensors, and of the modules of its model."""

    source: Source
    shapes: dict[str, torch.Size]
    """Shapes of the model's parameters, by name."""
    model_names: dict[str, str]
    """The parameter that each tensor is loaded into."""
    prefix: str
    """The prefix of the base model's parameters."""

    @classmethod
    def of(cls, source: Source) -> _ModelLayout:
        model = build_meta_model(source.config, source.architecture, base_only=True)
        shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
        names = checkpoint_to_model_names(model, source.tensors)
        return cls(source, shapes, names, base_prefix(model, source.architecture))

    def attention_path(self, layer: int) -> str:
        architecture = self.source.architecture
        return f"{self.prefix}{architecture.layers}.{layer}.{architecture.self_attention}"


def _dropped_tensors(layout: _ModelLayout, plan: SchemePlan) -> set[str]:
    """The stock position table, unless the scheme uses it; then it must fit config.json."""
    source = layout.source
    table = f"{layout.prefix}{source.architecture.table}.weight"
    stored = {name for name, model_name in layout.model_names.items() if model_name == table}
    if not plan.state.uses_stock_table:
        return stored
    expected = source.architecture.table_shape(source.config)
    shape = next((tuple(source.tensors[name].shape) for name in stored), None)
    if shape != expected:
        raise PosEncError(f"{table} has shape {shape}, but config.json requires {expected}")
    return set()


def _row_orders(layout: _ModelLayout, plan: SchemePlan, change: RotaryChange | None) -> dict[str, list[int]]:
    """The new row order of everything that has rotary features as rows: query and key projections, and their norms."""
    if change is None:
        return {}
    source = layout.source
    if not source.architecture.rotary:
        raise PosEncError(f"rotary_weights={change!r} needs rotary features; {source.config.model_type} has none")
    shape = source.architecture.shape(source.config)
    feature_layout, rotary_size = change.rpartition("_")[2], shape.head_size
    for scheme in plan.schemes:
        if scheme.acts_at("rotate"):
            if getattr(scheme, "layout", "halves") != feature_layout:
                required = f'{{"type": "rope", "layout": "{feature_layout}"}}'
                raise PosEncError(f"rotary_weights={change!r} needs the scheme {required}, got {scheme.name!r}")
            rotary_size = 2 * len(getattr(scheme, "frequencies", [])) or rotary_size
    attentions = [layout.attention_path(layer) for layer in range(shape.num_layers)]
    modules = tuple(f"{path}.{name}" for path in attentions for name in ("q_", "k_"))
    weights = {f"{path}.{name}.weight" for path in attentions for name in ("q_proj", "k_proj")}
    stored = {name: model_name for name, model_name in layout.model_names.items() if model_name.startswith(modules)}
    for name, model_name in stored.items():
        tensor = source.tensors[name]
        if tensor.shape[0] % shape.head_size or tensor.dtype not in FLOAT_DTYPES:
            raise PosEncError(f"rotary_weights={change!r} cannot reorder {name}: convert it before quantization")
        if tensor.shape != layout.shapes.get(model_name):
            raise PosEncError(f"rotary_weights={change!r} cannot reorder {name}, which holds more than {model_name}")
    num_weights = len(weights & set(stored.values()))
    if num_weights != len(weights):
        raise PosEncError(
            f"rotary_weights={change!r} needs {len(weights)} query and key weights (q_proj, k_proj), found "
            f"{num_weights}; fused projections cannot be reordered"
        )
    return dict.fromkeys(stored, rotary_feature_order(change, shape.head_size, rotary_size))


def rotary_feature_order(change: RotaryChange, head_size: int, rotary_size: int) -> list[int]:
    """For each feature of a head, its index before the change. A partial rotation moves the first `rotary_size`."""
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise PosEncError(f"Rotary features come in pairs: cannot reorder {rotary_size} of {head_size} features")
    pairs = (-1, 2) if change == "interleaved_to_halves" else (2, -1)
    order = torch.arange(rotary_size).view(pairs).T.flatten()
    return [*order.tolist(), *range(rotary_size, head_size)]


@torch.no_grad()
def _scheme_tensors(layout: _ModelLayout, plan: SchemePlan, seed: int) -> dict[str, torch.Tensor]:
    """Initial parameters of the schemes, by their names in the model, in the dtype of most stock parameters."""
    modules: dict[str, nn.Module] = {}
    for number, scheme in enumerate(plan.schemes):
        modules[f"{layout.prefix}position_scheme.{number}"] = scheme
    for layer, layer_modules in plan.layer_modules.items():
        for index, module in layer_modules.items():
            modules[f"{layout.attention_path(layer)}.position_scheme.{index}"] = module
    sizes: Counter[torch.dtype] = Counter()
    for tensor in layout.source.tensors.values():
        sizes[tensor.dtype] += tensor.numel()
    dtype = next((dtype for dtype, _ in sizes.most_common() if dtype in FLOAT_DTYPES), torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, module in modules.items():
            for child in module.modules():
                init_scheme_weights(child)
            for name, tensor in module.state_dict().items():
                tensors[f"{path}.{name}"] = tensor.to(dtype).contiguous()
    return tensors


def _write_weights(
    source: Source,
    dropped: set[str],
    row_orders: dict[str, list[int]],
    added: dict[str, torch.Tensor],
    directory: Path,
) -> tuple[list[str], list[str]]:
    """Write the shards, and an index if there are several; returns the names of the linked and the rewritten ones."""
    shards = [shard for shard in source.shards if shard.tensors.keys() - dropped]
    num_shards = len(shards) + bool(added)
    names = [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
    if num_shards == 1:
        names = [SAFE_WEIGHTS_NAME]
    linked, rewritten = [], []
    weight_map = dict.fromkeys(added, names[-1])
    for name, shard in zip(names, shards, strict=False):  # the last name may be that of the scheme's shard
        weight_map |= dict.fromkeys(shard.tensors.keys() - dropped, name)
        if shard.tensors.keys() & (dropped | row_orders.keys()):
            _rewrite(shard, directory / name, dropped, row_orders)
            rewritten.append(name)
        else:
            _link_or_copy(shard, directory / name)
            linked.append(name)
    if added:
        save_file(added, directory / names[-1], metadata={"format": "pt"})
    if num_shards > 1:
        tensors = {**source.tensors, **added}
        metadata = {"total_size": sum(tensors[name].nbytes for name in weight_map)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return linked, rewritten


def _link_or_copy(shard: Shard, target: Path) -> None:
    """Hard-link a shard, or copy it. Saving over a link leaves the original alone: safetensors replaces files."""
    real_path = shard.path.resolve()
    try:
        os.link(real_path, target)
    except OSError:
        shutil.copyfile(real_path, target)


def _rewrite(shard: Shard, target: Path, dropped: set[str], row_orders: dict[str, list[int]]) -> None:
    """Save a copy without the dropped tensors and with the rows of others reordered. Loads the whole shard."""
    tensors = {name: tensor for name, tensor in load_file(shard.path).items() if name not in dropped}
    for name in row_orders.keys() & tensors.keys():
        order = row_orders[name]  # of the rows of one head
        tensors[name] = tensors[name].unflatten(0, (-1, len(order)))[:, order].flatten(0, 1).contiguous()
    save_file(tensors, target, metadata=shard.metadata or None)
