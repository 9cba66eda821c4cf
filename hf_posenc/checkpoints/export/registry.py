"""All exporters, and the choice of one for a variant."""

from __future__ import annotations

from .deberta_v2 import DEBERTA_V2
from .gpt_neox import GPT_NEOX
from .mpnet import MPNET
from .plan import Exporter, ExportPlan
from .position_table import POSITION_TABLE
from .roformer import ROFORMER
from .same_rotation import SAME_ROTATION
from .smollm3 import SMOLLM3
from .variant import NoStockEqual, Variant

EXPORTERS = (SAME_ROTATION, SMOLLM3, POSITION_TABLE, GPT_NEOX, ROFORMER, MPNET, DEBERTA_V2)
"""In order of preference."""


def plan_export(variant: Variant, max_positions: int | None) -> ExportPlan:
    """Find the stock model that equals a variant.

    Args:
        variant: The variant.
        max_positions: How many positions the stock model is to serve; None: as many as the variant was made for.

    Returns:
        How to write it.

    Raises:
        NoStockEqual: If there is none. The message says why, and which schemes have one.
    """
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
