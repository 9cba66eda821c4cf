"""Masks as spans of keys, against the masks that they were made of."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.attention import key_spans
from hf_posenc.attention.key_spans import spans_from_mask

LENGTH = 23
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in ([7, 12, 4], [15, 8])])
SAME_DOCUMENT = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :])[:, None]
PADDING = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
PADDING[0, :, :, :9] = False
PADDING[1, :, :, 20:] = False
MASKS = {
    "causal": TRIANGLE[None, None],
    "padded": PADDING,
    "padded, causal": PADDING & TRIANGLE,
    "documents": SAME_DOCUMENT,
    "documents, causal": SAME_DOCUMENT & TRIANGLE,
    "window": (TRIANGLE & ~TRIANGLE.tril(-5))[None, None],
    "cached": (PADDING & TRIANGLE)[:, :, -4:],
    "nothing": torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_spans_show_what_the_mask_shows(mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_spans, "CHUNK", 3 * mask.shape[0] * LENGTH)
    spans = spans_from_mask(mask, 2)
    assert spans is not None
    first, stop = spans.spans_BQ2[..., :1], spans.spans_BQ2[..., 1:]
    keys = torch.arange(LENGTH)
    assert torch.equal((keys >= first) & (keys < stop), mask[:, 0].expand(2, -1, -1))
    assert spans.spans_BQ2.dtype == torch.int32
    assert spans.spans_BQ2.is_contiguous()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ranges_of_queries_hold_all_that_see_a_tile(mask: torch.Tensor) -> None:
    spans = spans_from_mask(mask, 2)
    assert spans is not None
    ranges, num_queries = spans.query_ranges(4, 8).tolist(), mask.shape[2]
    seen = torch.nn.functional.pad(mask.expand(2, -1, -1, -1)[:, 0], (0, 1)).unflatten(-1, (-1, 8)).any(-1)
    for row in range(2):
        for tile in range(3):
            (queries,) = torch.where(seen[row, :, tile])
            begin, end = ranges[row][tile]
            if queries.numel():  # no tile of queries more than needed
                assert (begin, end) == (int(queries[0]) // 4 * 4, min(int(queries[-1]) // 4 * 4 + 4, num_queries))
            else:
                assert begin >= end


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ranges_of_bands_hold_all_tiles_with_a_visible_key(mask: torch.Tensor) -> None:
    spans = spans_from_mask(mask, 2)
    assert spans is not None
    ranges, num_queries = spans.band_ranges(4).tolist(), mask.shape[2]
    num_query_tiles = -(-num_queries // 4)
    padded = torch.nn.functional.pad(mask.expand(2, -1, -1, -1)[:, 0], (0, -LENGTH % 4, 0, -num_queries % 4))
    seen = padded.unflatten(-1, (-1, 4)).unflatten(1, (-1, 4)).any(-1).any(2)
    assert len(ranges[0]) == num_query_tiles + seen.shape[2] - 1
    for row in range(2):
        for band, (begin, end) in enumerate(ranges[row]):
            tiles = torch.diagonal(seen[row], band - (num_query_tiles - 1)).nonzero().flatten()
            first_tile = max(num_query_tiles - 1 - band, 0)
            if tiles.numel():
                assert (begin, end) == (int(tiles[0]) + first_tile, int(tiles[-1]) + first_tile + 1)
            else:
                assert begin >= end


def test_holes_have_no_span() -> None:
    mask = (PADDING & TRIANGLE).clone()
    mask[1, 0, 12, 6] = False
    assert spans_from_mask(mask, 2) is None
