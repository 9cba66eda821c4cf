"""Every scheme that adds to the scores, through the kernels that Inductor generates for it, against eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu_harness.interpreted.comparison import Situation, wrong
from tests.support.cases import CASES

SITUATIONS = [
    Situation("llama", "plain"),
    Situation("llama", "padded"),
    Situation("llama", "packed"),
    Situation("llama", "decode"),
    Situation("llama", "padded", torch.bfloat16),
    Situation("llama", "packed", torch.bfloat16),
    Situation("gpt2", "padded"),
    Situation("bert", "plain", torch.bfloat16),
    Situation("bert", "padded"),
]
NEEDS_MORE_LAYERS = ("xl-and-t5", "alternating")
SCORE_CASES = [case for case in CASES if case.scores and not case.values and case.id not in NEEDS_MORE_LAYERS]
ROWS = [
    pytest.param(situation, case.scheme, id=f"{case.id}-{situation}")
    for case in SCORE_CASES
    for situation in SITUATIONS
    if not (case.causal and situation.architecture == "bert")
]


@pytest.mark.parametrize(("situation", "scheme"), ROWS)
def test_kernels_match_eager_attention(situation: Situation, scheme: Any) -> None:
    assert wrong(situation, scheme) == {}
