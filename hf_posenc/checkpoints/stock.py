"""Convert a checkpoint to another position scheme and export the result, without keeping the variant."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..spec import PositionScheme
from .convert import convert_checkpoint
from .export import Export, export_checkpoint
from .files import resolve_output_dir, scratch_directory
from .source import find_checkpoint


def convert_to_stock(
    source: str | Path,
    position_scheme: PositionScheme,
    output_dir: str | Path,
    *,
    force: bool = False,
    max_positions: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **conversion_options: Any,
) -> Export:
    """Convert a checkpoint and write the result as a stock checkpoint, for schemes that have one.

    Args:
        source: A stock checkpoint: a directory or a Hub id.
        position_scheme: The new scheme.
        output_dir: The directory to write.
        force: Replace `output_dir` if it is not empty.
        max_positions: As in `export_checkpoint`.
        revision: Branch, tag or commit of a Hub id.
        token: A Hub token; by default the stored one.
        **conversion_options: More arguments of `convert_checkpoint`, such as `seed` or `drift_text`.

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
        conversion_options |= {"revision": revision, "token": token}
        conversion = convert_checkpoint(source, position_scheme, variant, **conversion_options)
        export = export_checkpoint(variant, output_dir, max_positions=max_positions, force=force)
    return dataclasses.replace(export, drift=conversion.drift)
