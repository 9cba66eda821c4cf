"""Which heads a process has, and what is refused. tests/integration/test_tensor_parallel.py runs several processes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from hf_posenc.attention import ProcessRank, find_local_heads
from hf_posenc.attention.tensor_parallel import check_rotations
from hf_posenc.errors import PosEncError
from hf_posenc.patches import attention_modules, check_undivided
from hf_posenc.patches import tensor_parallel as divided_models
from hf_posenc.schemes import DistanceBias
from tests.support import tiny_models as tiny

SECOND_OF_TWO = ProcessRank(group=None, rank=1, size=2)  # type: ignore[arg-type]


def states(num_heads: int) -> torch.Tensor:
    return torch.zeros(1, num_heads, 3, 8)


def find(process: ProcessRank | None, num_heads: int, num_key_heads: int, group_size: int = 2) -> Any:
    """In a model with four heads in two groups."""
    module = types.SimpleNamespace(process_rank=lambda: process, num_key_value_groups=group_size)
    schemes = list(tiny.model("llama", "alibi").model.position_scheme)
    return find_local_heads(module, states(num_heads), states(num_key_heads), schemes)


def test_heads_are_divided_in_order() -> None:
    assert find(None, 4, 2) is None
    local_heads = find(SECOND_OF_TWO, 2, 1)
    values = torch.arange(4.0)[:, None]
    assert local_heads.select_term(DistanceBias(values)).values.tolist() == [[2.0], [3.0]]
    for shared in (values[:1], values[:2]):  # one for all heads, or already those of this process
        assert local_heads.select_term(DistanceBias(shared)).values is shared
    with pytest.raises(PosEncError, match="3 heads"):
        local_heads.select_term(DistanceBias(values[:3]))


@pytest.mark.parametrize(
    ("process", "num_heads", "num_key_heads"),
    [(None, 2, 1), (SECOND_OF_TWO, 1, 1), (SECOND_OF_TWO, 2, 2)],
    ids=["unknown processes", "uneven", "all key heads"],
)
def test_heads_that_cannot_be_told_are_refused(process: ProcessRank | None, num_heads: int, num_key_heads: int) -> None:
    with pytest.raises(PosEncError, match="'alibi' acts on the scores, and cannot tell which heads .* without tp_plan"):
        find(process, num_heads, num_key_heads)


def test_a_model_refuses_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the config says that there are more heads than the layers have."""
    model = tiny.model("llama", "alibi")
    for scheme in model.model.position_scheme:
        scheme.shape = type(scheme.shape)(**{**vars(scheme.shape), "num_heads": 8})
    with pytest.raises(PosEncError, match="4 query heads and 2 key heads in this process"):
        model(tiny.tokens())
    monkeypatch.setattr(attention_modules, "find_process_rank", lambda module: SECOND_OF_TWO)
    with torch.no_grad():
        model(tiny.tokens())


def test_trained_rotations_are_refused() -> None:
    (scheme,) = tiny.model("llama", {"type": "t5"}).model.position_scheme  # any scheme with parameters
    check_rotations(states(4), [scheme])
    with torch.no_grad():
        check_rotations(states(2), [scheme])
    with pytest.raises(PosEncError, match="freeze them"):
        check_rotations(states(2), [scheme])


def test_what_needs_the_whole_model_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama", "alibi")
    check_undivided(model, "This")
    monkeypatch.setattr(divided_models, "find_process_rank", lambda module: SECOND_OF_TWO)
    with pytest.raises(PosEncError, match="This needs all attention heads .* without tp_plan"):
        check_undivided(model, "This")
