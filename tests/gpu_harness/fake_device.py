"""A GPU that Inductor believes in: enough of torch.cuda to generate code for it, and nothing that runs."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import subprocess
import types
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class FakeGPU:
    """The properties that code generation reads, by the names that CUDA gives them."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 * 1024
    total_memory: int = 80 << 30
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def architecture(self) -> int:
        """The number in sm_90."""
        return 10 * self.major + self.minor


H100 = FakeGPU("NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 50 << 20)
A100 = FakeGPU("NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 40 << 20)
GPUS = {"h100": H100, "a100": A100}


class _NoDeviceGuard:
    """Stands in for the context managers that switch devices."""

    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> _NoDeviceGuard:
        return self

    def __exit__(self, *args: Any) -> None: ...


def install(gpu: FakeGPU) -> None:
    """Make this process believe that it has the GPU. There is no way back: use a process of its own.

    Args:
        gpu: `H100` or `A100`.
    """
    ctypes.CDLL(str(_build_device_guard())).set_device_guard()
    _patch_torch_cuda(gpu)
    _patch_device_interface(gpu)
    _patch_triton_driver(gpu)
    _patch_flex_attention()


def _build_device_guard() -> Path:
    """Compile device_guard.cpp, or find it in the cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils.cpp_extension import include_paths, library_paths

    source = Path(__file__).with_name("device_guard.cpp")
    key = hashlib.sha256(f"{torch.__version__} {source.read_text()}".encode()).hexdigest()[:16]
    library = Path(cache_dir()) / f"device_guard_{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-std=c++20", *(f"-I{path}" for path in include_paths())]
        libraries = [*(f"-L{path}" for path in library_paths()), "-lc10"]
        subprocess.run(["g++", *flags, str(source), "-o", str(unfinished), *libraries], check=True)
        unfinished.replace(library)
    return library


def _patch_torch_cuda(gpu: FakeGPU) -> None:
    constants = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": gpu,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "is_bf16_supported": True,
        "synchronize": None,
        "set_device": None,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "mem_get_info": (gpu.total_memory, gpu.total_memory),
        "set_rng_state": None,
        "_lazy_init": None,
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, _returning(value))
    torch.cuda.device = torch.cuda._DeviceGuard = _NoDeviceGuard  # type: ignore[misc, assignment]
    torch.cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    torch.version.cuda = "12.8"
    torch._C._cuda_getCurrentRawStream = _returning(0)


def _patch_device_interface(gpu: FakeGPU) -> None:
    from torch._dynamo.device_interface import CudaInterface

    constants = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": gpu,
        "get_compute_capability": gpu.architecture,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
        "synchronize": None,
    }
    for name, value in constants.items():
        setattr(CudaInterface, name, staticmethod(_returning(value)))
    for name in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, name, staticmethod(_returning(constants[name])))


def _patch_triton_driver(gpu: FakeGPU) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", gpu.architecture, gpu.warp_size),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
        )
    )


def _patch_flex_attention() -> None:
    """Treat CPU tensors as flex_attention treats those of a GPU, and create block masks without compiling."""
    import torch.nn.attention.flex_attention as module
    from transformers import masking_utils

    on_cpu = module._apply_kernel_options

    def on_gpu(
        query: Any, key: Any, value: Any, return_lse: bool, kernel_options: Any, return_aux: Any = None
    ) -> dict[str, Any]:
        options = on_cpu(query, key, value, return_lse, kernel_options, return_aux)
        options["OUTPUT_LOGSUMEXP"] = options["OUTPUT_LOGSUMEXP"] or torch.is_grad_enabled()
        return options

    create_block_mask = module.create_block_mask

    def create_uncompiled_block_mask(*args: Any, **kwargs: Any) -> Any:
        return create_block_mask(*args, **{**kwargs, "_compile": False})

    module._validate_device = lambda query, key, value: None
    module._apply_kernel_options = on_gpu
    module.create_block_mask = masking_utils.create_block_mask = create_uncompiled_block_mask


def _returning(value: Any) -> Any:
    return lambda *args, **kwargs: value
