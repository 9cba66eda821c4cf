"""flex_attention's block masks: what they show, and which blocks they skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from hf_posenc.attention import block_masks
from hf_posenc.attention.block_masks import block_mask_from_tensor, causal_block_mask, document_block_mask


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_masks, "BLOCK", 4)


def shown(block_mask: Any, rows: int, heads: int = 1) -> torch.Tensor:
    return create_mask(block_mask.mask_mod, rows, heads, *block_mask.seq_lengths, device="cpu")


def check_blocks(block_mask: Any, visible: torch.Tensor) -> None:
    """A block that is left out shows nothing, and a full one everything. Looks at the first head."""
    counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    kept = block_mask.to_dense().bool().expand(len(visible), -1, -1, -1)
    for row in range(len(visible)):
        for i in range(kept.shape[2]):
            full = indices[row % len(indices), 0, i, : counts[row % len(counts), 0, i]].tolist()
            for j in range(kept.shape[3]):
                block = visible[row, 0, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
                assert kept[row, 0, i, j] or not block.any()
                assert j not in full or block.all()


@pytest.mark.parametrize("length", [3, 8, 13])
def test_causal(length: int) -> None:
    visible = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    block_mask = causal_block_mask(length, torch.device("cpu"))
    assert torch.equal(shown(block_mask, 1), visible)
    check_blocks(block_mask, visible)
    number = -(-length // 4)
    assert block_mask.to_dense().sum() == number * (number + 1) / 2  # control: later blocks are skipped


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(9, 13), (8, 8)])
def test_from_tensor(heads: int, num_queries: int, num_keys: int) -> None:
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(2, heads, num_queries, num_keys, generator=generator) < 0.5
    visible[0, :, :4, :4], visible[0, :, 4:8, :4] = True, False
    block_mask = block_mask_from_tensor(visible, 2)
    assert torch.equal(shown(block_mask, 2, heads), visible)
    check_blocks(block_mask, visible)
    assert block_mask.full_kv_num_blocks[0, 0, 0] >= 1
    assert not block_mask.to_dense()[0, 0, 1, 0]
    shared = block_mask_from_tensor(visible[:1], 2)
    assert torch.equal(shown(shared, 2, heads), visible[:1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_keys", [19, 23])
def test_documents(causal: bool, num_keys: int) -> None:
    documents = torch.tensor([[0] * 9 + [1] + [2] * 9, [0] * 3 + [1] * 16])
    real = torch.ones(2, 19, dtype=torch.bool)
    real[1, 10:13] = real[0, 17:] = False
    visible = (documents[:, :, None] == documents[:, None]) & real[:, None]
    visible = (visible.tril() if causal else visible)[:, None]
    visible = torch.nn.functional.pad(visible, (0, num_keys - 19))
    block_mask = document_block_mask(documents, real, causal, num_keys)
    assert torch.equal(shown(block_mask, 2), visible)
    check_blocks(block_mask, visible)
    dense = block_mask.to_dense()
    assert not dense[0, 0, 3, 0]  # control: blocks of other documents are skipped
    assert block_mask.full_kv_num_blocks.sum() > 0


@pytest.mark.slow
def test_flex_attention_under_a_document_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 10, 4, generator=generator) for _ in range(3))
    documents, real = torch.tensor([[0] * 6 + [1] * 4]), torch.ones(1, 10, dtype=torch.bool)
    output = flex_attention(query, key, value, block_mask=document_block_mask(documents, real, True, 10))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    parts = [sdpa(*(s[:, :, a:b] for s in (query, key, value)), is_causal=True) for a, b in ((0, 6), (6, 10))]
    torch.testing.assert_close(output, torch.cat(parts, dim=2))
