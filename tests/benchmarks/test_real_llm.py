"""The benchmark that converts a real LLM: gradient spikes and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recovery.real_llm import WARM_UP_STEPS, gradient_spike, make_page


def test_a_spike_is_measured_against_the_norms_before_it(tmp_path: Path) -> None:
    assert gradient_spike(tmp_path) is None
    norms = [50.0, *[2.0] * WARM_UP_STEPS, 3.0, 8.0, 1.0]
    history = [{"grad_norm": norm} for norm in norms] + [{"eval_loss": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert gradient_spike(tmp_path) == pytest.approx(4.0)


def test_the_page_compares_with_the_original() -> None:
    result = {"original": 40.0, "swapped": 90.0, "started": 50.0, "trained": 42.0, "tokens": 20_000, "seconds": 600}
    page = make_page({"none": {**result, "scheme": "none", "gradient_spike": 2.04, "answer": "Paris.\nIndeed"}})
    assert '| `"none"` | 20,000 | 40.00 | 90.00 | 50.00 | 42.00 | 5.0% | 2.0 | 10 | Paris. |' in page
