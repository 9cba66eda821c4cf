"""Scheme options check their values, and parameter modules initialize theirs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import initialization as init

from hf_posenc.errors import PosEncError
from hf_posenc.schemes import LayerParameters, Options, describe_type, option
from hf_posenc.schemes.learned import PatchedPositionEmbedding
from hf_posenc.validation import MAX_INTEGER


class ExampleOptions(Options):
    count: int = option(4, "a whole number", minimum=2)
    rate: float = option(0.5, "a fraction", above=0, maximum=1)
    mode: Literal["a", "b"] | None = option(None, "a choice")
    names: list[Literal["x", "y"]] = option(["x"], "a list")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 1}, "count must be at least 2, got 1"),
        ({"count": True}, "count must be a whole number, got True"),
        ({"count": 2.0}, "count must be a whole number"),
        ({"count": MAX_INTEGER + 1}, "count must be at most 2,147,483,647"),
        ({"rate": 0}, "rate must be above 0"),
        ({"rate": 1.5}, "rate must be at most 1"),
        ({"rate": float("inf")}, "rate must be a finite number"),
        ({"rate": 10**400}, "rate must be a finite number"),
        ({"mode": "c"}, "mode must be 'a' or 'b' or None, got 'c'"),
        ({"names": ["x", "z"]}, "names must be a list of 'x' or 'y'"),
        ({"names": "x"}, "names must be a list"),
    ],
)
def test_bad_values_name_the_option_and_what_is_valid(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PosEncError, match=message):
        ExampleOptions(**values)


def test_good_values_are_kept_and_defaults_are_not_shared() -> None:
    options = ExampleOptions(count=2, rate=1, mode="b", names=["y", "x"])
    assert dataclasses.asdict(options) == {"count": 2, "rate": 1, "mode": "b", "names": ["y", "x"]}
    ExampleOptions().names.append("y")
    assert ExampleOptions().names == ["x"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.count = 3  # type: ignore[misc]


def test_types_are_described_in_words() -> None:
    hints = {float | None: "a finite number or None", bool: "true or false", dict[str, int]: "a dict"}
    assert {hint: describe_type(hint) for hint in hints} == hints


def test_layer_parameters_are_initialized_by_name_and_survive_copies() -> None:
    constant = functools.partial(init.constant_, val=3.0)
    module = LayerParameters(u=((2, 3), init.zeros_), v=((4,), constant))
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            copied.reset_parameters()
        assert {name: tuple(value.shape) for name, value in copied().items()} == {"u": (2, 3), "v": (4,)}
        assert not copied()["u"].any()
        assert (copied()["v"] == 3).all()
    assert list(module.state_dict()) == ["u", "v"]


def test_patched_embeddings_share_the_stock_weight() -> None:
    table, ids = nn.Embedding(4, 2), torch.arange(8)
    tiled = PatchedPositionEmbedding(table, "tile", max_positions=8, scheme_owned=False, first_row=0)
    assert tiled.weight is table.weight
    assert torch.equal(tiled(ids), table.weight[ids % 4])
    owned = PatchedPositionEmbedding(table, None, max_positions=4, scheme_owned=True, first_row=0)
    assert not owned(ids[:4]).any()
    assert torch.equal(owned(ids[:4], for_scheme=True), table(ids[:4]))
    after_padding = PatchedPositionEmbedding(table, "tile", max_positions=8, scheme_owned=False, first_row=1)
    assert torch.equal(after_padding(ids), table.weight[1 + ids % 3])
