"""Context and sequence parallelism: schemes that act on single tokens are right, all others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny
from tests.support.cases import CASES, Case
from tests.support.processes import run_processes

KINDS = ["context parallelism", "DeepSpeed's sequence parallelism"]
STATIC = [case for case in CASES if not case.scores and not case.id.endswith("context")]
REFUSED = [case for case in CASES if case not in STATIC]
LENGTH = 16
stock_sdpa = functional.scaled_dot_product_attention


class Divided:
    """A sequence divided between two processes, as torch (by both ends, for balance) or DeepSpeed (in order) does."""

    def __init__(self, kind: str) -> None:
        quarters = torch.arange(LENGTH).chunk(4)
        ends = [torch.cat([quarters[0], quarters[3]]), torch.cat([quarters[1], quarters[2]])]
        self.slots = ends if kind == KINDS[0] else list(torch.arange(LENGTH).chunk(2))

    @property
    def local_slots(self) -> torch.Tensor:
        return self.slots[dist.get_rank()]

    def gather(self, states_BHQD: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(states_BHQD) for _ in self.slots]
        dist.all_gather(parts, states_BHQD.contiguous())
        return torch.cat(parts, 2)[:, :, torch.cat(self.slots).argsort()]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """SDPA on the whole sequence."""
        assert kwargs.get("attn_mask") is None
        output = stock_sdpa(*map(self.gather, (query, key, value)), *args, **kwargs)
        return output[:, :, self.local_slots]

    def interface(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        """What DeepSpeed registers: drops masks, and needs position_ids."""
        assert "position_ids" in kwargs
        stock = ALL_ATTENTION_FUNCTIONS["posenc_test_sdpa"]
        output, _ = stock(module, *map(self.gather, (query, key, value)), None, **kwargs)
        return output[:, self.local_slots], None


def install(kind: str, put: Callable[[Any, str, Any], None], divided: Divided | None) -> None:
    """Replace the function that a library replaces; `put` is like `setattr`."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        assert divided is not None, "attention on a part of the sequence"
        return (divided.attend if kind == KINDS[0] else divided.interface)(*args, **kwargs)

    if kind == KINDS[0]:
        replacement.__module__ = context_parallel.__module__
        put(functional, "scaled_dot_product_attention", replacement)
    else:
        replacement.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
        ALL_ATTENTION_FUNCTIONS["posenc_test_sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = replacement


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    install(request.param, monkeypatch.setattr, None)
    yield request.param
    if "posenc_test_sdpa" in ALL_ATTENTION_FUNCTIONS:
        del ALL_ATTENTION_FUNCTIONS["posenc_test_sdpa"], ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=[pytest.mark.slow] * bool(i % 3)) for i, case in enumerate(REFUSED)],
)
def test_schemes_that_need_other_tokens_are_refused(case: Case, kind: str) -> None:
    ids = tiny.tokens()
    with pytest.raises(PosEncError, match=f"{kind} divides sequences .* or divide the model"):
        tiny.model("llama", case.scheme)(ids, position_ids=torch.arange(ids.shape[1])[None])


def test_what_a_part_of_a_sequence_leaves_unknown_is_refused(kind: str) -> None:
    ids, position_ids = tiny.tokens(), torch.arange(12)[None]
    with pytest.raises(PosEncError, match="pass position_ids"):
        tiny.model("llama", "rope")(ids)
    dynamic = {"type": "rope", "scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(PosEncError, match="length of the whole sequence"):
        tiny.model("llama", dynamic)(ids, position_ids=position_ids)
    with pytest.raises(PosEncError, match="packed"):
        tiny.model("llama", "rope")(ids, position_ids=position_ids % 7)
    if kind == KINDS[0]:
        eager = tiny.model("llama", "rope")
        eager.set_attn_implementation("eager")
        with pytest.raises(PosEncError, match='needs attn_implementation="sdpa"'):
            eager(ids, position_ids=position_ids)


def test_older_deepspeed_replaces_the_function_that_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    install(KINDS[1], monkeypatch.setattr, None)
    try:
        ALL_ATTENTION_FUNCTIONS["hf_posenc"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        with pytest.raises(PosEncError, match="update DeepSpeed"):
            tiny.model("llama", "xpos")(tiny.tokens(), position_ids=torch.arange(12)[None])
    finally:
        for name in ("hf_posenc", "sdpa", "posenc_test_sdpa"):
            del ALL_ATTENTION_FUNCTIONS[name]


def compare_with_one_process(kind: str, directory: Path) -> None:
    dist.init_process_group("gloo")
    divided = Divided(kind)
    slots, positions = divided.local_slots, torch.arange(LENGTH)[None]
    models = {case.id: tiny.model("llama", case.scheme) for case in STATIC}
    ids = tiny.tokens(2, LENGTH)
    with torch.no_grad():
        expected = {name: model(ids, use_cache=False).logits[:, slots] for name, model in models.items()}
        install(kind, setattr, divided)
        for name, model in models.items():
            logits = model(ids[:, slots], position_ids=positions[:, slots].expand(2, -1), use_cache=False).logits
            torch.testing.assert_close(logits, expected[name], **tiny.tolerances("llama"), msg=name)
        wrong = models["sinusoidal"](ids[:, slots], position_ids=positions[:, : len(slots)], use_cache=False).logits
        assert dist.get_rank() == 0 or (wrong - expected["sinusoidal"]).abs().max() > 1e-2  # the control
    (directory / str(dist.get_rank())).touch()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_schemes_of_single_tokens_equal_one_process(kind: str, tmp_path: Path) -> None:
    """The attention is a stand-in, because torch's runs on GPUs only, and DeepSpeed is not installed."""
    run_processes(compare_with_one_process, kind, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def enter_context(directory: Path) -> None:
    dist.init_process_group("gloo")
    mesh, ids = dist.init_device_mesh("cpu", (1,)), tiny.tokens()
    model = tiny.model("llama", "alibi")
    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]), pytest.raises(PosEncError, match=KINDS[0]):
        model(ids)
    model(ids)
    (directory / "done").touch()


@pytest.mark.slow
def test_torch_context_parallelism_is_recognized(tmp_path: Path) -> None:
    run_processes(enter_context, tmp_path, count=1)
    assert (tmp_path / "done").exists()
