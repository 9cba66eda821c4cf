"""The page of small budgets shows every scheme and piece, and leaves cells empty that were not run."""

from __future__ import annotations

from benchmarks.recovery.small_budgets import WITHOUT, render_page


def test_the_page_shows_the_best_rate_and_what_is_missing() -> None:
    results = {
        "t5: recipe": {"swapped": 9.0, "closed form": 2.0, "fit": 1.0, "trained": 0.25, "seconds": 3},
        "t5: recipe, seed 1": {"swapped": 9.0, "trained": 0.35},
        "t5: naive 0.001": {"swapped": 9.0, "trained": 4.0, "seconds": 3},
        "t5: naive 0.005": {"swapped": 9.0, "trained": 3.0, "seconds": 3},
        "alibi: without attention fit": {"trained": 1.5},
    }
    page = render_page(results)
    assert "| t5 | 9.000 | 2.000 | 1.000 | 0.300 (0.250 to 0.350) |  | 3.000 |" in page
    assert '| `{"type": "t5", "shared": false}` |  |  |  |  |  |  |' in page
    assert "| nothing | 0.250 |  |" in page
    assert "| attention fit |  | 1.500 |" in page
    assert all(f"| {piece} |" in page for piece in WITHOUT)
