"""Attention with something added, in the ways that write it out: for kernels that want it so, and where it is small.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

import torch
from torch import nn

from .blocks import iter_head_groups
from .call import AttentionCall
from .materialize import indices_BQK


def attention_by_heads(call: AttentionCall) -> torch.Tensor:
    """SDPA for some heads after the others, with no more of the bias than theirs."""
    outputs = []
    for heads, groups in iter_head_groups(call.query, call.key):
        q, k, v = call.query[:, heads], call.key[:, groups], call.value[:, groups]
        outputs.append(call.run_stock(q, k, v, call.bias(heads))[0])
    return torch.cat(outputs, dim=2)


def dense_attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its weights in hand, for vectors that join the values.

    The weights that a query gives to keys of the same row are summed first, so that it is Q x R sums and one product,
    never a vector for each pair.
    """
    query, key, value = call.query, call.key, call.value
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)  # the lowest float16 and a logit would be -inf together
    logits = (query * call.scaling).matmul(key.transpose(-1, -2)).to(wide) + call.bias()
    weights = nn.functional.softmax(logits, dim=-1)
    weights = nn.functional.dropout(weights, p=call.dropout, training=call.module.training)
    output_BHQD = weights.to(query.dtype).matmul(value)
    for rows in call.value_rows:  # sums of many small weights: in the wide dtype
        indices = indices_BQK(rows, call.positions, query.shape[2])[..., : key.shape[2]].to(query.device)
        by_row_BHQR = weights.new_zeros(*weights.shape[:-1], rows.rows_HRD.shape[1])
        by_row_BHQR = by_row_BHQR.scatter_add(-1, indices[:, None].expand_as(weights), weights)
        output_BHQD = output_BHQD + by_row_BHQR.to(query.dtype).matmul(rows.rows_HRD.to(query))
    return output_BHQD.transpose(1, 2).contiguous(), weights.to(query.dtype)
