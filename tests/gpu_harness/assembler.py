"""Generated kernels as machine code: what ptxas says about registers, spills and shared memory. Nothing runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re

from .fake_device import FakeGPU
from .launcher import Kernel, runs_kernels

REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
ATOMIC = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)\.", re.MULTILINE)
"""`atom` returns the old value, `red` does not; both may be predicated."""


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What a kernel needs of a GPU.

    Attributes:
        shared_memory: bytes per block.
        registers: per thread. 255 is the most that there are.
        spilled: bytes per thread that are written to memory for want of registers.
        atomics: atomic instructions in the code. Those in the loop over keys run once for every one.
        warps: per block.
        stages: of the pipelined loop.
    """

    shared_memory: int
    registers: int
    spilled: int
    atomics: int
    warps: int
    stages: int


def missing_tool() -> str | None:
    """Why kernels cannot be assembled here, or None if they can."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas
    except ImportError:
        return "triton is not installed: it is in the extra triton"
    if runs_kernels():
        return "TRITON_INTERPRET=1 is set"
    try:
        get_ptxas(90)
    except RuntimeError as error:
        return f"ptxas was not found: {error}"
    return None


def assemble(kernel: Kernel, gpu: FakeGPU) -> Assembly:
    """Assemble a kernel of flex_attention with Triton and ptxas.

    Args:
        kernel: the kernel, of the kind `template`.
        gpu: what to assemble for.

    Returns:
        What ptxas reports, and what the code shows.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not runs_kernels()
    assert kernel.kind == "template"
    meta = kernel.options["triton_meta"]
    source = ASTSource(
        fn=kernel.function,
        signature=meta["signature"],
        constexprs=meta.get("constants", {}),
        attrs=meta["configs"][0],
    )
    options = {"num_warps": kernel.options["num_warps"], "num_stages": kernel.options["num_stages"]}
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True  # a cached kernel would have no log
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                source, target=GPUTarget("cuda", gpu.architecture, gpu.warp_size), options=options
            )
    return read_log(log.getvalue(), compiled.asm["ptx"], compiled.metadata.shared, options)


def read_log(log: str, ptx: str, shared_memory: int, options: dict[str, int]) -> Assembly:
    """Read the output of `ptxas -v`, and count the atomic instructions of the code that it assembled."""
    registers, spills = REGISTERS.search(log), SPILLS.search(log)
    if registers is None or spills is None:
        raise ValueError(f"unexpected output of ptxas: {log}")
    return Assembly(
        shared_memory=shared_memory,
        registers=int(registers[1]),
        spilled=int(spills[2]),
        atomics=len(ATOMIC.findall(ptx)),
        warps=options["num_warps"],
        stages=options["num_stages"],
    )
