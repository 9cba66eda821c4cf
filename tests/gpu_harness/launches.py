"""The package's own Triton kernels as they would be launched on a GPU, for the assembler. Nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.attention import triton_bias
from hf_posenc.attention.key_spans import spans_from_mask
from hf_posenc.attention.triton_bias import Tiling

from .launcher import Kernel

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
DIVISIBLE = [["tt.divisibility", 16]]


def training_launches(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    visible: str = "causal",
    dropout: float = 0.0,
) -> dict[str, Kernel]:
    """The kernels of a forward and backward pass over 512 tokens, by name, with gradients of all inputs.

    Args:
        monkeypatch: keeps the kernels from running.
        heads: heads and key heads.
        head_size: the size of each.
        dtype: of queries, keys and values.
        visible: `causal`, `all`, or `spans` for packed rows.
        dropout: the probability with which weights are dropped.
    """
    kernels: dict[str, Kernel] = {}

    def record(
        kernel: Any, num_programs: int, tiling: Tiling, tensors: Any, numbers: Any, constants: dict[str, Any]
    ) -> None:
        options = {**constants, **triton_bias._options(tiling)}
        kernels[kernel.fn.__name__] = _as_kernel(kernel, (*tensors, *numbers), options)

    monkeypatch.setattr(triton_bias, "_launch", record)
    length = 512
    query, key, value = (
        torch.zeros(1, length, num_heads, head_size, dtype=dtype).transpose(1, 2).requires_grad_()
        for num_heads in (heads[0], heads[1], heads[1])
    )
    bias = torch.zeros(heads[0], 2 * length - 1, requires_grad=True)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    triton_bias.attention_with_distance_bias(
        *(query, key, value, bias),
        scaling=head_size**-0.5,
        causal=visible == "causal",
        spans=spans_from_mask(mask, 1) if visible == "spans" else None,
        dropout=dropout,
    ).sum().backward()
    return kernels


def _as_kernel(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Kernel:
    """What Triton would compile for these arguments: it has tensors aligned, and compiles ones into the code."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(function.arg_names):
        if index >= len(args):
            signature[name], constants[index,] = "constexpr", options[name]
            continue
        argument = args[index]
        if isinstance(argument, tuple):
            kinds = [_kind(item, (index, place), constants, attributes) for place, item in enumerate(argument)]
            signature[name] = tuple(kinds)
        else:
            signature[name] = _kind(argument, (index,), constants, attributes)
    meta = {"signature": signature, "constants": constants, "configs": [attributes]}
    warps = {name: options[name] for name in ("num_warps", "num_stages")}
    return Kernel("template", function, {"triton_meta": meta, **warps})


def _kind(argument: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> str:
    if isinstance(argument, torch.Tensor):
        attributes[path] = DIVISIBLE
        return POINTERS[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    if argument == 1:
        constants[path] = 1
        return "constexpr"
    if argument % 16 == 0:
        attributes[path] = DIVISIBLE
    return "i32"
