"""Stands in for Inductor's launcher of Triton kernels: runs each by the interpreter, or keeps it for the assembler."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

DECORATORS = (
    "cooperative_reduction",
    "foreach",
    "persistent_reduction",
    "pointwise",
    "reduction",
    "split_scan",
    "template",
    "user_autotune",
)
"""How generated code says what kind of kernel follows."""
SIZES = {"XBLOCK": "xnumel", "YBLOCK": "ynumel", "ZBLOCK": "znumel", "R0_BLOCK": "r0_numel", "R1_BLOCK": "r1_numel"}
"""The tile sizes that Inductor would tune, each with the size that it divides."""
MAX_BLOCK = 1024


@dataclasses.dataclass
class Kernel:
    """A generated kernel.

    Attributes:
        kind: the decorator: `template` for flex_attention, `pointwise` and so on for what is around it.
        function: the Triton function.
        options: what the decorator was given: signature, constants, warps and stages.
    """

    kind: str
    function: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        """Called by generated code to launch the kernel."""
        LAUNCHES.append(self)
        if runs_kernels():
            self.interpret(*args)

    def interpret(self, *args: Any) -> None:
        """Run the kernel on CPU tensors."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        from . import bounds, speed

        meta = self.options["inductor_meta"]
        names = self.function.arg_names
        inputs = [name for name in names if name not in SIZES]
        arguments = dict(zip(inputs, args, strict=False))
        blocks = {name: self._block(name, arguments) for name in names if name in SIZES}
        grid_sizes = dict(zip(meta.get("extra_launcher_args", []), args[len(inputs) :], strict=True))
        grid = GridExpr.from_meta(meta, blocks).eval_slow({**arguments, **grid_sizes})
        with bounds.within(args), speed.patch_once():
            self.function[grid](**arguments, **blocks)

    def _block(self, name: str, arguments: dict[str, Any]) -> int:
        if name == "XBLOCK" and "reduction" in self.kind:
            return 1
        size = arguments[SIZES[name]]
        power = 1 << max(size - 1, 0).bit_length()
        return power if self.kind == "persistent_reduction" else min(power, MAX_BLOCK)


KERNELS: dict[str, Kernel] = {}
"""Every kernel that was generated since `forget`, by name."""
LAUNCHES: list[Kernel] = []
"""Every launch since `forget`."""
_changes: list[Callable[[str], str]] = []


def runs_kernels() -> bool:
    """Whether this process runs kernels, because TRITON_INTERPRET=1 was set before Triton was imported."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.zeros, InterpretedFunction)


def forget() -> None:
    """Clear the records."""
    KERNELS.clear()
    LAUNCHES.clear()


@contextlib.contextmanager
def changed_kernels(old: str, new: str) -> Iterator[None]:
    """Within it, kernels are generated with a change in their source, which must apply to at least one.

    Args:
        old: what the source says.
        new: what it says instead.
    """
    applied = []

    def change(source: str) -> str:
        applied.append(old in source)
        return source.replace(old, new)

    _changes.append(change)
    try:
        yield
    finally:
        _changes.remove(change)
    assert any(applied), f"no kernel has {old!r}"


def load_kernel(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
    """In place of `AsyncCompile.triton`, which compiles a generated kernel."""
    from torch._inductor.codecache import PyCodeCache

    for change in _changes:
        source_code = change(source_code)
    kernel = getattr(PyCodeCache.load(source_code), kernel_name)
    assert isinstance(kernel, Kernel)
    KERNELS[kernel_name] = kernel
    return kernel


class Launcher:
    """In place of `torch._inductor.runtime.triton_heuristics`, from which generated code takes its decorators."""

    def __getattr__(self, name: str) -> Any:
        if name in DECORATORS:
            return _decorator(name)
        return getattr(importlib.import_module("torch._inductor.runtime.triton_heuristics"), name)


def _decorator(kind: str) -> Callable[..., Callable[[Any], Kernel]]:
    return lambda **options: lambda function: Kernel(kind, function, options)
