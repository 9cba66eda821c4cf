"""Convert a checkpoint to another position scheme and export the result, without keeping the variant."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..spec import PositionScheme
from .convert import WarmStart, convert_checkpoint
from .export import Export, export_checkpoint
from .files import resolve_output_dir, scratch_directory
from .rotary_weights import RotaryChange
from .source import find_checkpoint


def convert_to_stock(
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
    max_positions: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Export:
    """Convert a checkpoint and write the result as a stock checkpoint, for schemes that have one.

    Args:
        source: A stock checkpoint: a directory or a Hub id.
        position_scheme: The new scheme.
        output_dir: The directory to write.
        force: Replace `output_dir` if it is not empty.
        seed: For schemes with random initial values.
        rotary_weights: As in `convert_checkpoint`.
        warm_start: As in `convert_checkpoint`.
        drift_text: A text file on which to compare the outputs of source and result.
        max_length: As in `convert_checkpoint`.
        max_positions: As in `export_checkpoint`.
        revision: Branch, tag or commit of a Hub id.
        token: A Hub token; by default the stored one.

    Returns:
        What was written.

    Raises:
        PosEncError: As `convert_checkpoint` and `export_checkpoint` do.

    Example:
        >>> convert_to_stock("my-llama", {"type": "rope", "theta": 500000.0}, "my-llama-long").model_type
        'llama'
    """
    checkpoint = find_checkpoint(source, revision, token)
    target = resolve_output_dir(output_dir, checkpoint, force)
    with scratch_directory(target) as temporary:
        variant = temporary / "variant"
        conversion = convert_checkpoint(
            source,
            position_scheme,
            variant,
            seed=seed,
            rotary_weights=rotary_weights,
            warm_start=warm_start,
            drift_text=drift_text,
            max_length=max_length,
            revision=revision,
            token=token,
        )
        export = export_checkpoint(variant, output_dir, max_positions=max_positions, force=force)
    return dataclasses.replace(export, drift=conversion.drift)
