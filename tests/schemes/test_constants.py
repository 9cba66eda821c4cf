"""What is the same in every forward pass is copied to the device once, so that CUDA graphs can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.schemes import constants
from hf_posenc.schemes.constants import device_constant
from tests.support import tiny_models as tiny

CPU = torch.device("cpu")
SCHEMES: dict[str, Any] = {
    "alibi": "alibi",
    "rope": {"type": "rope", "theta": 500.0},
    "deberta": {"type": "deberta", "max_distance": 32, "buckets": 8},
    "polynomial": "polynomial",
    "t5": "t5",
}


def forget_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this test, as if none had been made."""
    monkeypatch.setattr(constants, "_names", {})
    monkeypatch.setattr(constants, "_constants", constants._Constants())


class HostCopies(TorchDispatchMode):
    """Counts the tensors that are made from Python numbers."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SCHEMES)
def test_no_forward_pass_but_the_first_copies_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_constants(monkeypatch)
    model, ids = tiny.model("llama", SCHEMES[name]), tiny.tokens(2, 8)  # stock GPT-2 looks for padding from the host
    with torch.no_grad():
        model(ids, use_cache=False)
        with HostCopies() as copies:
            model(ids, use_cache=False)
            assert copies.count == 0
            torch.tensor([1.0])  # control
    assert copies.count == 1


def test_constants_of_inference_mode_serve_training(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_constants(monkeypatch)
    model, ids = tiny.model("gpt2", "alibi"), tiny.tokens(2, 8)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits.clone()
    logits = model(ids, use_cache=False).logits
    logits.sum().backward()
    torch.testing.assert_close(logits.detach(), expected)


def test_constants_by_value_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_constants(monkeypatch)
    monkeypatch.setattr(constants, "CACHE_SIZE", 3)
    first = device_constant([1.0, 0.1], CPU, torch.float64)
    assert first is device_constant((1.0, 0.1), CPU, torch.float64)
    assert first.tolist() == [1.0, 0.1]
    assert device_constant([1.0, 0.1], CPU, torch.float32).dtype == torch.float32
    for number in range(9):
        assert device_constant([float(number)], CPU, torch.float32).item() == number
        assert len(constants._names) == len(vars(constants._constants)) <= 3


def compile_and_list_graphs(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True), graphs


def scaled(states: torch.Tensor) -> torch.Tensor:
    """States times one constant plus another."""
    factors, summands = ((1.0, 2.0), (0.5, 3.0))
    factor = device_constant(factors, states.device, states.dtype)
    return states * factor + device_constant(summands, states.device, states.dtype)


@pytest.mark.slow
def test_compiled_code_holds_them() -> None:
    compiled, graphs = compile_and_list_graphs(scaled)
    assert compiled(torch.ones(2)).tolist() == [1.5, 5.0]
    assert all("tensor" not in str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function")


@pytest.mark.slow
def test_compiled_code_with_two_of_them_in_the_real_compiler() -> None:
    torch._dynamo.reset()
    assert torch.compile(scaled, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist() == [1.5, 5.0]


@pytest.mark.slow
def test_compiled_code_follows_when_they_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other constants of the same size are not taken for those that were dropped, and further ones change nothing."""
    forget_constants(monkeypatch)
    compiled, graphs = compile_and_list_graphs(scaled)
    assert compiled(torch.ones(2)).tolist() == [1.5, 5.0]
    device_constant([9.0, 9.0], CPU, torch.float32)
    assert compiled(torch.ones(2)).tolist() == [1.5, 5.0]
    assert len(graphs) == 1
    monkeypatch.setattr(constants, "CACHE_SIZE", 1)
    for number in (7.0, 8.0):
        device_constant([number, number], CPU, torch.float32)
    monkeypatch.setattr(constants, "CACHE_SIZE", 8)
    assert compiled(torch.ones(2)).tolist() == [1.5, 5.0]
    assert len(graphs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_contain_them(strict: bool) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return scaled(states)

    program = torch.export.export(Scaled(), (torch.ones(2),), strict=strict).module()
    assert program(torch.ones(2)).tolist() == [1.5, 5.0]


@pytest.mark.slow
def test_compiled_code_in_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot tell whether a program is exported."""
    monkeypatch.setattr(constants, "_is_strict_export", lambda: False)
    compiled, _ = compile_and_list_graphs(scaled)
    assert compiled(torch.ones(2)).tolist() == [1.5, 5.0]
