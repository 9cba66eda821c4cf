"""A torch.compile backend that has Inductor generate GPU kernels for a graph of CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from . import fake_device, launcher

GPU = torch.device("cuda", 0)
_installed: list[fake_device.FakeGPU] = []


def install(gpu: fake_device.FakeGPU) -> None:
    """Prepare this process to compile for the GPU.

    Args:
        gpu: the GPU. A process compiles for one only.
    """
    if _installed:
        assert _installed == [gpu], f"this process compiles for {_installed[0].name}"
        return
    _installed.append(gpu)
    fake_device.install(gpu)
    _patch_inductor()
    if launcher.runs_kernels():
        from .bfloat16 import correct_interpreter
        from .bounds import check_accesses
        from .speed import speed_up_interpreter

        correct_interpreter()
        check_accesses()
        speed_up_interpreter()


def _patch_inductor() -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config
    import torch._inductor.runtime as runtime
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers

    config.compile_threads = 1
    config.fx_graph_cache = functorch_config.enable_autograd_cache = False
    config.triton.cudagraphs = False
    config.joint_graph_constant_folding = False  # it would evaluate constants on the GPU
    joint_graph.lazy_init = lambda *args, **kwargs: None
    AsyncCompile.triton = launcher.load_kernel  # type: ignore[method-assign]
    runtime.triton_heuristics = launcher.Launcher()
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._C._dynamo.guards._empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cpu
    if launcher.runs_kernels():
        import triton.language as tl

        triton_helpers.libdevice = triton_helpers.math = tl


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Within it, flex_attention runs the kernels of the GPU, on CPU tensors.

    Example:
        >>> install(H100)
        >>> with gpu_kernels():
        ...     model(input_ids)
    """
    import torch.nn.attention.flex_attention as module

    uncompiled = module.flex_attention
    torch._dynamo.reset()
    launcher.forget()
    module.flex_attention = torch.compile(uncompiled, backend=compile_for_gpu)
    try:
        yield
    finally:
        module.flex_attention = uncompiled


def compile_for_gpu(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
    """Compile as `torch.compile` does by default, but for the GPU."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def forward(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return _lower(graph, inputs)

    def backward(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return _lower(graph, inputs, is_backward=True)

    compiled = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    return compiled(graph_module, example_inputs)


def _lower(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    mode = detect_fake_mode(inputs)
    assert mode is not None
    move_to_gpu(graph, mode)
    compiled = compile_fx_inner(graph, [_on_gpu(value, mode) for value in inputs], **options)

    def call(args: list[Any]) -> Any:
        return compiled(args)  # garbage if kernels are not run but kept for the assembler

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def move_to_gpu(graph: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Replace the CPU by the GPU in a traced graph and its subgraphs."""
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            node.args = tree_map(_gpu_device, node.args)
            node.kwargs = tree_map(_gpu_device, node.kwargs)
            node.meta.pop("tensor_meta", None)
            if "val" in node.meta:
                node.meta["val"] = tree_map(lambda value: _on_gpu(value, mode), node.meta["val"])
        module.recompile()


def _gpu_device(value: Any) -> Any:
    return GPU if isinstance(value, torch.device) and value.type == "cpu" else value


def _on_gpu(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    fake = value if isinstance(value, FakeTensor) else mode.from_tensor(value)
    with mode, torch.no_grad():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=GPU)
