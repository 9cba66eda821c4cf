"""Results as plain tables, for a terminal or a page in a fixed-width font."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .estimates import Estimate
from .results import LengthResult, OrderResult, PasskeyResult, SimilarityResult, Stop

Notes = dict[tuple[str, int | str], str]
"""What stands below the tables, by what it is said of: a model that ends somewhere says so once, not at each length."""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head; the first column is aligned to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def told(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4g}"
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g})"


def times(length: int, trained: int | None) -> str:
    return f"{length:,}" if trained is None else f"{length:,} ({length / trained:.3g}x)"


def stopped(model: str, stop: Stop, notes: Notes) -> str:
    said_of = (model, stop.reason if stop.reaches is None else stop.reaches)
    notes.setdefault(said_of, f"{model}: {stop.reason}")
    where = f"ends at {stop.reaches:,}" if stop.reaches is not None else "not measured"
    return f"{where} [{list(notes).index(said_of) + 1}]"


def length_table(
    results: Sequence[LengthResult],
    models: Sequence[str],
    trained: int | None,
    ratios: dict[tuple[str, int], Estimate],
    notes: Notes,
) -> str:
    """Lengths downwards, models side by side, then each by the first."""
    compared = [model for model in models if any(name == model for name, _ in ratios)]
    rows = [["perplexity", *models, *(f"{model} / {models[0]}" for model in compared)]]
    for length in sorted({one.length for one in results}):
        found = {one.model: one for one in results if one.length == length}
        row = [times(length, trained)]
        for model in models:
            one = found.get(model)
            row.append("" if one is None else stopped(model, one.stop, notes) if one.stop else told(one.perplexity))
        rows.append([*row, *(told(ratios.get((model, length))) for model in compared)])
    return aligned(rows)


def passkey_table(results: Sequence[PasskeyResult], notes: Notes) -> str:
    """Keys found, by depth; the preference for the key over another one (a half is chance), and its rank."""
    depths = sorted({cell.depth for one in results for cell in one.depths})
    rows = [["passkey found", "length", *(f"at {depth:.0%}" for depth in depths), "preferred", "rank"]]
    for one in results:
        if one.stop:
            rows.append([one.model, f"{one.length:,}", *[""] * len(depths), stopped(one.model, one.stop, notes), ""])
            continue
        found = {cell.depth: cell for cell in one.depths}
        trials = sum(cell.trials for cell in one.depths)
        preferred = sum(cell.preference.value * cell.trials for cell in one.depths) / trials
        rank = math.exp(sum(math.log(cell.rank) * cell.trials for cell in one.depths) / trials)
        shares = [f"{found[depth].accuracy.value:.0%}" if depth in found else "" for depth in depths]
        rows.append([one.model, f"{one.length:,}", *shares, f"{preferred:.0%}", f"{rank:.1f}"])
    return aligned(rows)


def order_table(results: Sequence[OrderResult], notes: Notes) -> str:
    """How many nats a token shuffling costs, by the size of the blocks."""
    blocks = list(dict.fromkeys(cell.block for one in results for cell in one.shuffles))
    head = [f"blocks of {block}" if block is not None else "all" for block in blocks]
    rows = [["nats lost by shuffling", "length", *head]]
    for one in results:
        found = {cell.block: told(cell.increase) for cell in one.shuffles}
        cells = [found.get(block, "") for block in blocks]
        if one.stop:
            cells = [stopped(one.model, one.stop, notes), *cells[1:]]
        rows.append([one.model, f"{one.length:,}", *cells])
    if not blocks:
        rows = [[*row[:2], *(row[2:] or [""])] for row in rows]
    return aligned(rows)


def similarity_table(results: Sequence[SimilarityResult], notes: Notes) -> str:
    rows = [["likeness of embeddings", "to", "length", "cosine", "agreement on pairs"]]
    for one in results:
        cosine = stopped(one.model, one.stop, notes) if one.stop else told(one.cosine)
        agreement = "" if one.agreement is None else f"{one.agreement:.3f}"
        rows.append([one.model, one.original, f"{one.length:,}", cosine, agreement])
    return aligned(rows)
