"""Export a variant as a stock checkpoint: plan, write shard by shard, compare, put in place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from transformers.utils import CONFIG_NAME

from ...config import STOCK_LENGTH_KEY
from ...errors import PosEncError
from ...patches import config_length
from ...patches.compat import set_attn_implementation
from ...spec import PositionScheme
from ..companions import Companions, remove_code_fields, to_json_bytes
from ..drift import Drift
from ..files import atomic_directory, resolve_output_dir
from ..lengths import write_max_length
from ..loading import load_tokenizer
from ..source import read_json_object
from ..weights import write_shards
from .deberta_v2 import DEBERTA_V2
from .gpt_neox import GPT_NEOX
from .mpnet import MPNET
from .phi3 import PHI3
from .plan import Exporter, ExportPlan, narrow_if_exact
from .position_table import POSITION_TABLE
from .roformer import ROFORMER
from .rotations import add_older_rope_fields
from .same_rotation import SAME_ROTATION
from .smollm3 import SMOLLM3
from .variant import NoStockEqual, Variant
from .verification import Verification, verify_export, verify_tokenizer

EXPORTERS = (SAME_ROTATION, SMOLLM3, PHI3, POSITION_TABLE, GPT_NEOX, ROFORMER, MPNET, DEBERTA_V2)
"""In order of preference."""
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class Export:
    """The result of `export_checkpoint`.

    Attributes:
        output_dir: Where the stock checkpoint was written.
        position_scheme: The position scheme of the variant.
        model_type: The model type of the stock checkpoint.
        architecture: The class to load it with.
        max_positions: How many positions it serves; None: as many as `max_position_embeddings` of a rotary model says,
            or more.
        linked_shards: Files that were hard-linked (or copied) unchanged.
        rewritten_shards: Files that were written anew.
        left_out: Tensors and files of the variant that the stock checkpoint has no use for.
        notes: What to know about the stock model.
        verification: How far its outputs are from the variant's; None if they were not compared.
        drift: How far outputs moved from those of the checkpoint that was converted, if that was measured.
    """

    output_dir: Path
    position_scheme: PositionScheme
    model_type: str
    architecture: str
    max_positions: int | None
    linked_shards: tuple[str, ...]
    rewritten_shards: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    verification: Verification | None
    drift: Drift | None = None

    def __str__(self) -> str:
        lines = [f"{self.output_dir}: {self.architecture} ({self.model_type}), loads without hf_posenc"]
        lines.append(f"  position scheme  {json.dumps(self.position_scheme)}")
        if self.max_positions is not None:
            lines.append(f"  positions        {self.max_positions:,}")
        lines.append(f"  {'not compared with the variant' if self.verification is None else self.verification}")
        if self.drift is not None:
            lines.append(f"  drift from the source: {self.drift}")
        lines += [f"  left out: {name}" for name in self.left_out]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def export_checkpoint(
    source: str | Path,
    output_dir: str | Path,
    *,
    max_positions: int | None = None,
    text: str | Path | None = None,
    verify: bool = True,
    force: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Export:
    """Write a variant as a stock checkpoint of an architecture that computes the same, which loads without hf_posenc.

    Weights are written shard by shard. Then both models are loaded, one after the other, in float32, and their outputs
    compared. The output directory is complete when this returns, and absent if anything fails.

    Args:
        source: The directory or Hub id of a variant.
        output_dir: The directory to write.
        max_positions: Positions of the stock model. Default: as many as the variant's config names.
        text: A text file on which to compare the models too, in addition to random tokens.
        verify: Compare the models. Turn it off if memory does not suffice for one of them in float32.
        force: Replace `output_dir` if it is not empty.
        revision: Branch, tag or commit of a Hub id.
        token: A Hub token; by default the stored one.

    Returns:
        What was written, and how close the outputs are.

    Raises:
        PosEncError: If no stock architecture computes the same, the outputs differ, or the files cannot be written.

    Example:
        >>> hf_posenc.export_checkpoint("gpt2-rope", "gpt2-rope-stock").model_type
        'gpt_neox'
    """
    variant = Variant.open(source, revision, token)
    target = resolve_output_dir(output_dir, variant.directory, force)
    companions = Companions.read(variant.directory)
    max_positions, plan = _plan_with_length(variant, max_positions)
    remove_code_fields(vars(plan.config))
    verification = None
    with atomic_directory(target, force) as directory:
        added = {name: narrow_if_exact(make(), variant.dtype).contiguous() for name, make in plan.added.items()}
        linked, rewritten = write_shards(
            variant.shards, directory, names=plan.names, transforms=plan.transforms, added=added
        )
        companions.copy_to(directory)
        set_attn_implementation(plan.config, "eager")  # not saved, but others may not fit a config's output_attentions
        plan.config.save_pretrained(directory)
        add_older_rope_fields(directory / CONFIG_NAME)
        _name_tokenizer_class(variant, directory)
        length = plan.max_positions or max_positions
        if length is not None:
            write_max_length(directory, length, lower=True)
        if verify:
            verify_tokenizer(variant, directory)
            verification = verify_export(variant, plan, directory, None if text is None else Path(text))
    return Export(
        output_dir=Path(output_dir).expanduser(),
        position_scheme=variant.config.position_scheme,
        model_type=plan.config.model_type,
        architecture=plan.model_class,
        max_positions=plan.max_positions,
        linked_shards=tuple(linked),
        rewritten_shards=tuple(rewritten),
        left_out=(*plan.left_out, *companions.left_out),
        notes=tuple(plan.notes),
        verification=verification,
    )


def _plan_with_length(variant: Variant, max_positions: int | None) -> tuple[int | None, ExportPlan]:
    """The number of positions, by default as many as the variant's config names if it was set, and the plan for it."""
    if max_positions is None and hasattr(variant.config, STOCK_LENGTH_KEY):
        length = config_length(variant.config)
        with contextlib.suppress(PosEncError):  # the stock model may not have another length than the trained one
            return length, plan_export(variant, length)
    return max_positions, plan_export(variant, max_positions)


def plan_export(variant: Variant, max_positions: int | None) -> ExportPlan:
    """Find the stock model that equals a variant. The error if there is none says why, and which schemes have one."""
    reasons: dict[Exporter, str] = {}
    for exporter in EXPORTERS:
        if exporter.applies(variant):
            try:
                return exporter.plan(variant, max_positions)
            except NoStockEqual as reason:
                reasons[exporter] = str(reason)
    lines = [f"No stock model computes {variant.model_type} with position scheme {variant.scheme_text}:"]
    lines += [f"  not {exporter.target}: {reason}" for exporter, reason in reasons.items()]
    lines += [f"Schemes of {variant.model_type} that can be exported:"]
    lines += [f"  {exporter.accepts} -> {exporter.target}" for exporter in reasons]
    raise NoStockEqual("\n".join(lines))


def _name_tokenizer_class(variant: Variant, directory: Path) -> None:
    """Name the tokenizer's class, which transformers would otherwise choose by model type."""
    path = directory / TOKENIZER_CONFIG
    tokenizer = load_tokenizer(variant.directory)
    if tokenizer is None:
        return
    fields = read_json_object(path) if path.is_file() else {}
    fields["tokenizer_class"] = fields.get("tokenizer_class") or type(tokenizer).__name__
    path.write_bytes(to_json_bytes(fields))
