"""Which rows of an attention layer's weights belong to which head, so that heads can be reordered or changed.

Shape legend: H heads of a role, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_posenc.schemes import ModelShape

from .architecture import Architecture

QUERY, KEY, VALUE, OUTPUT = "query", "key", "value", "output"
PROJECTIONS = {
    **dict.fromkeys(("q_proj", "query", "q_lin"), QUERY),
    **dict.fromkeys(("k_proj", "key", "k_lin"), KEY),
    **dict.fromkeys(("v_proj", "value", "v_lin"), VALUE),
    **dict.fromkeys(("o_proj", "out_proj", "out_lin", "c_proj", "dense", "Wo"), OUTPUT),
}
"""The role of a projection, by the name of its module."""
NORMS = {**dict.fromkeys(("q_norm", "q_layernorm"), QUERY), **dict.fromkeys(("k_norm", "k_layernorm"), KEY)}
"""The norms that queries and keys pass after their projections."""
STACKED = ("c_attn", "qkv_proj", "Wqkv")
"""Projections to all queries, then all keys, then all values."""
GROUPED_BY_HEAD = ("query_key_value",)
"""Projections to the query, key and value of one head after the other."""


class HeadRows(NamedTuple):
    """The rows of a parameter that belong to the heads of one role; its columns, if `axis` is 1."""

    role: str
    parameter: nn.Parameter
    axis: int
    rows_HD: torch.Tensor


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """The weights of one self-attention layer, by head."""

    rows: list[HeadRows]

    @property
    def group_size(self) -> int:
        """How many query heads share a key."""
        num_heads = {rows.role: len(rows.rows_HD) for rows in self.rows}
        return num_heads[QUERY] // num_heads[KEY]

    @torch.no_grad()
    def reorder(self, order: torch.Tensor) -> None:
        """Reorder the heads in place, which changes nothing that the layer computes.

        Args:
            order: For each head, its index so far. Heads that share a key must stay together.
        """
        for role, parameter, axis, rows_HD in self.rows:
            group_size = self.group_size if role in (KEY, VALUE) else 1
            role_order = order[::group_size] // group_size
            moved = parameter.index_select(axis, rows_HD[role_order].flatten().to(parameter.device))
            parameter.index_copy_(axis, rows_HD.flatten().to(parameter.device), moved)

    @torch.no_grad()
    def transform_queries(self, matrices_HDD: torch.Tensor) -> None:
        """Multiply the projected query of each head by a matrix, in place: before any norm of queries."""
        for role, parameter, axis, rows_HD in self.rows:
            if role == QUERY:
                rows = rows_HD.flatten().to(parameter.device)
                heads_first = parameter.movedim(axis, 0)
                at_least_float32 = torch.promote_types(parameter.dtype, torch.float32)
                weights = heads_first[rows].unflatten(0, rows_HD.shape).to(at_least_float32)
                changed = torch.einsum("hde,he...->hd...", matrices_HDD.to(weights), weights)
                heads_first[rows] = changed.flatten(0, 1).to(parameter.dtype)


def find_head_layout(layer: nn.Module, architecture: Architecture, shape: ModelShape) -> HeadLayout | None:
    """Find which rows of a layer's attention weights belong to which head.

    Args:
        layer: A transformer layer.
        architecture: The model's architecture.
        shape: The model's sizes.

    Returns:
        The rows of all attention weights; None if the layer has a parameter of a form that is not known.
    """
    attention = layer.get_submodule(architecture.self_attention)
    modules = {name: module for name, module in attention.named_children() if name != "position_scheme"}
    parent, _, name = architecture.self_attention.rpartition(".")
    if name == "self":  # BERT has its output projection next to its self-attention
        modules["dense"] = layer.get_submodule(f"{parent}.output.dense")
    modules = {name: module for name, module in modules.items() if any(True for _ in module.parameters())}
    if any(True for _ in attention.parameters(recurse=False)):
        return None
    num_key_heads = getattr(attention.config, "num_key_value_heads", None) or shape.num_heads
    heads = {QUERY: shape.num_heads, KEY: num_key_heads, VALUE: num_key_heads, OUTPUT: shape.num_heads}
    rows: list[HeadRows] = []
    for name, module in modules.items():
        module_rows = _rows_of(name, module, heads, shape.head_size)
        if module_rows is None:
            return None
        rows += module_rows
    is_complete = {head_rows.role for head_rows in rows} == set(heads)
    return HeadLayout(rows) if is_complete else None


def _rows_of(name: str, module: nn.Module, heads: dict[str, int], head_size: int) -> list[HeadRows] | None:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if weight is None or not parameters.keys() <= {"weight", "bias"}:
        return None
    if name in NORMS and weight.ndim == 1:
        sizes = {NORMS[name]: heads[NORMS[name]]} if len(weight) != head_size else {}  # else all heads share it
        axis = 0
    elif isinstance(module, (nn.Linear, Conv1D)) and name in (*PROJECTIONS, *STACKED, *GROUPED_BY_HEAD):
        roles = [PROJECTIONS[name]] if name in PROJECTIONS else [QUERY, KEY, VALUE]
        sizes = {role: heads[role] for role in roles}
        axis = int(isinstance(module, Conv1D) != (roles == [OUTPUT]))  # outputs have their heads at the other end
    else:
        return None
    num_rows = sum(sizes.values()) * head_size
    if sizes and weight.shape[axis] != num_rows:
        return None
    all_rows = torch.arange(num_rows)
    if name in GROUPED_BY_HEAD:
        by_role = list(all_rows.view(-1, len(sizes), head_size).unbind(1))
    else:
        by_role = list(all_rows.view(-1, head_size).split(list(sizes.values())))
    module_rows = []
    for parameter in parameters.values():
        if parameter.ndim == 1 and OUTPUT in sizes:
            continue  # the bias of an output belongs to no head
        parameter_axis = axis if parameter.ndim == 2 else 0
        module_rows += [
            HeadRows(role, parameter, parameter_axis, rows) for role, rows in zip(sizes, by_role, strict=True)
        ]
    return module_rows
