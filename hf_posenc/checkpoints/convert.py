"""Convert a checkpoint to another position scheme file by file.

Unchanged shards are hard-linked, shards that change are rewritten one at a time, and the parameters of the new scheme
go into a shard of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ..errors import PosEncError
from ..patches import (
    SchemePlan,
    init_scheme_weights,
    plan_schemes,
    register_variants,
    set_config_length,
    table_length,
    with_scheme,
)
from ..patches.compat import checkpoint_to_model_names
from ..spec import PositionScheme
from .companions import Companions, remove_code_fields
from .drift import Drift, measure_drift
from .export import Export, export_checkpoint, stock_rope_parameters
from .files import atomic_directory, resolve_output_dir, scratch_directory
from .inspection import base_prefix, build_meta_model, check_base_weights
from .lengths import write_max_length
from .source import FLOAT_DTYPES, Checkpoint, find_checkpoint, open_stock
from .weights import RotaryChange, reorder_rows, rotary_feature_order, write_shards

WarmStart = Callable[[Path, Path], None]
"""Called with the directories of the source and of the variant, which it changes in place."""


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
        warm_started: Whether there was a warm start; then all shards are rewritten.
        drift: How far outputs moved from the source's, if `drift_text` was given.
        stock_rope_parameters: `rope_parameters` with which the stock model computes the same, if there are any: then a
            stock config alone would do.
    """

    output_dir: Path
    position_scheme: PositionScheme
    dropped: dict[str, int]
    added: dict[str, int]
    kept: dict[str, int]
    linked_shards: tuple[str, ...]
    rewritten_shards: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    warm_started: bool = False
    drift: Drift | None = None
    stock_rope_parameters: dict[str, Any] | None = None

    def __str__(self) -> str:
        lines = [f"{self.output_dir}: position scheme {json.dumps(self.position_scheme)}"]
        for label, tensors in {"kept": self.kept, "dropped": self.dropped, "added": self.added}.items():
            lines.append(f"  {label:<8} {len(tensors):>6,} tensors {sum(tensors.values()):>15,} parameters")
            if label != "kept":
                lines.extend(f"    {name} ({numel:,})" for name, numel in sorted(tensors.items()))
        lines += [f"  left out: {name}" for name in self.left_out]
        if self.warm_started:
            lines.append("  started from the attention of the source")
        if self.drift is not None:
            lines.append(f"  drift from the source: {self.drift}")
        if self.stock_rope_parameters is not None:
            lines += [f"  {line}" for line in _stock_note(self.stock_rope_parameters).splitlines()]
        return "\n".join(lines)


def _stock_note(rope_parameters: dict[str, Any]) -> str:
    """How to have the result without a variant."""
    return (
        "note: the stock model computes the same, without hf_posenc, with this in its config.json:\n"
        f'  "rope_parameters": {json.dumps(rope_parameters)}\n'
        "`hf-posenc convert --stock` writes that checkpoint, and `hf-posenc export` one from the variant"
    )


def convert_checkpoint(
    source: str | Path,
    position_scheme: PositionScheme,
    output_dir: str | Path,
    *,
    force: bool = False,
    seed: int = 0,
    rotary_weights: RotaryChange | None = None,
    warm_start: WarmStart | None = None,
    drift_text: str | Path | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    notify: Callable[[str], object] | None = None,
) -> Conversion:
    """Write a variant of a checkpoint with another position scheme, without building the model.

    At most one shard is held in memory, unless there is a warm start. The output directory is complete when this
    returns, and absent if it fails.

    Args:
        source: A checkpoint directory or a Hub id. Only safetensors are read.
        position_scheme: A scheme name, a dict with options, or a list of schemes.
        output_dir: The directory to write.
        force: Replace `output_dir` if it is not empty.
        seed: For schemes with random initial values.
        rotary_weights: Reorder query and key features: "interleaved_to_halves" for weights in the order of
            Meta's files, "halves_to_interleaved" for rope with `layout="interleaved"`.
        warm_start: Changes the written variant to start closer to the source, such as
            `hf_posenc.training.ClosedFormStart(text_file)`. Loads both models.
        drift_text: A text file on which to compare the outputs of source and variant. Loads one model at a time.
        max_length: The longest input that the variant's files name, where other tools cut inputs; by default as in the
            source, or the length of a longer position table. The scheme must reach it.
        revision: Branch, tag or commit of a Hub id.
        token: A Hub token; by default the stored one.
        notify: Called with a text before anything is written if a stock config alone would do, such as `print`.

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
    checkpoint = open_stock(source, revision=revision, token=token)
    target = resolve_output_dir(output_dir, checkpoint.directory, force)
    companions = Companions.read(checkpoint.directory)
    config = with_scheme(checkpoint.config, position_scheme)
    left_out = (*(f"{field} in config.json" for field in remove_code_fields(vars(config))), *companions.left_out)
    config.record_base_model(source)
    register_variants(type(checkpoint.config))
    # Schemes are sized by the config, so the files must agree with it before they are built.
    check_base_weights(checkpoint.config, checkpoint.tensors)
    plan = plan_schemes(checkpoint.architecture, config)
    length = max_length or table_length(plan.schemes, checkpoint.config)
    if length is not None and not set_config_length(plan.schemes, config, length, required=max_length is not None):
        length = None
    config.architectures = [f"PosEnc{name}" for name in checkpoint.config.architectures or []] or None
    layout = _ModelLayout.of(checkpoint)
    dropped, row_orders = _dropped_tensors(layout, plan), _row_orders(layout, plan, rotary_weights)
    added = _scheme_tensors(layout, plan, seed)
    stock_parameters = None if row_orders else stock_rope_parameters(checkpoint.architecture, config, plan)
    if notify is not None and stock_parameters is not None:
        notify(_stock_note(stock_parameters))
    drift = None
    with atomic_directory(target, force) as directory:
        linked, rewritten = write_shards(
            checkpoint.shards,
            directory,
            names=dict.fromkeys(dropped),
            transforms={name: partial(reorder_rows, order=order) for name, order in row_orders.items()},
            added=added,
        )
        companions.copy_to(directory)
        if length is not None:
            write_max_length(directory, length, lower=max_length is not None)
        config.save_pretrained(directory)
        if warm_start is not None:
            warm_start(checkpoint.directory, directory)
        if drift_text is not None:
            drift = measure_drift(checkpoint.directory, directory, Path(drift_text))
    return Conversion(
        output_dir=Path(output_dir).expanduser(),
        position_scheme=config.position_scheme,
        dropped={name: checkpoint.tensors[name].numel() for name in dropped},
        added={name: tensor.numel() for name, tensor in added.items()},
        kept={name: tensor.numel() for name, tensor in checkpoint.tensors.items() if name not in dropped},
        linked_shards=() if warm_start is not None else tuple(linked),
        rewritten_shards=tuple(linked + rewritten) if warm_start is not None else tuple(rewritten),
        left_out=left_out,
        warm_started=warm_start is not None,
        drift=drift,
        stock_rope_parameters=stock_parameters,
    )


def convert_to_stock(
    source: str | Path,
    position_scheme: PositionScheme,
    output_dir: str | Path,
    *,
    force: bool = False,
    revision: str | None = None,
    **options: Any,
) -> Export:
    """Convert a checkpoint and export the result, for schemes that a stock model has, without keeping the variant.

    The arguments are those of `convert_checkpoint`.

    Example:
        >>> convert_to_stock("my-llama", {"type": "rope", "theta": 500000.0}, "my-llama-long").model_type
        'llama'
    """
    target = resolve_output_dir(output_dir, find_checkpoint(source, revision), force)
    with scratch_directory(target) as temporary:
        variant = temporary / "variant"
        conversion = convert_checkpoint(source, position_scheme, variant, revision=revision, **options)
        export = export_checkpoint(variant, output_dir, force=force)
    return dataclasses.replace(export, drift=conversion.drift)


@dataclasses.dataclass(frozen=True)
class _ModelLayout:
    """The names of a checkpoint's tensors, and of the modules of its model."""

    source: Checkpoint
    shapes: dict[str, torch.Size]
    """Shapes of the model's parameters, by name."""
    model_names: dict[str, str]
    """The parameter that each tensor is loaded into."""
    prefix: str
    """The prefix of the base model's parameters."""

    @classmethod
    def of(cls, source: Checkpoint) -> _ModelLayout:
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


@torch.no_grad()
def _scheme_tensors(layout: _ModelLayout, plan: SchemePlan, seed: int) -> dict[str, torch.Tensor]:
    """Initial parameters of the schemes, by their names in the model, in the dtype of most stock parameters."""
    modules: dict[str, nn.Module] = {}
    for number, scheme in enumerate(plan.schemes):
        modules[f"{layout.prefix}position_scheme.{number}"] = scheme
    for layer, layer_modules in plan.layer_modules.items():
        for index, module in layer_modules.items():
            modules[f"{layout.attention_path(layer)}.position_scheme.{index}"] = module
    tensors: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, module in modules.items():
            for child in module.modules():
                init_scheme_weights(child)
            for name, tensor in module.state_dict().items():
                tensors[f"{path}.{name}"] = tensor.to(layout.source.dtype).contiguous()
    return tensors
