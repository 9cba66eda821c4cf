"""Position tables that do not start at row 0: RoBERTa counts from the padding token's id on, OPT from row 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.training.data import pack_segments
from tests.support import families
from tests.support import tiny_models as tiny

PAD = 4  # RoBERTa has 1; a larger one tells rows and positions apart
TRAINED = 512
ROBERTA_SIZES: dict[str, Any] = {"max_position_embeddings": TRAINED + PAD + 1, "pad_token_id": PAD}


def roberta(scheme: Any = None, model_type: str = "roberta", **changes: Any) -> Any:
    return families.model(model_type, scheme, auto=AutoModelForMaskedLM, **{**ROBERTA_SIZES, **changes})


def token_ids(rows: int, length: int) -> torch.Tensor:
    return tiny.tokens(rows, length).clamp(min=PAD + 1)


@pytest.mark.parametrize("model_type", families.TRAITS["first row"])
def test_explicit_position_ids_mean_what_they_mean_in_the_stock_model(model_type: str) -> None:
    ids = tiny.tokens(2, 9)
    first = families.ARCHITECTURES[model_type].first_position(families.config(model_type))
    model = families.model(model_type)
    inputs = [torch.arange(first, first + 9)[None], torch.arange(first + 5, first + 14)[None], torch.arange(9)[None]]
    expected = [families.output(model, ids, position_ids=positions) for positions in inputs]
    assert families.differ(expected[0], expected[1])
    hf_posenc.retrofit(model, "learned")
    assert torch.equal(families.output(model, ids), expected[0])
    for positions, stock_output in zip(inputs, expected, strict=True):
        assert torch.equal(families.output(model, ids, position_ids=positions), stock_output)


@pytest.mark.parametrize("scheme", ["learned", "tupe", ["learned", {"type": "sinusoidal", "mix": "concat"}]])
def test_position_ids_of_padded_rows_from_the_stock_function(scheme: Any) -> None:
    """`create_position_ids_from_input_ids` gives padding the padding token's id, which is before position 0."""
    model, ids = roberta(scheme), token_ids(2, 10)
    ids[1, 6:] = PAD
    mask = ids != PAD
    positions = model.roberta.embeddings.create_position_ids_from_input_ids(ids, PAD)
    expected = families.output(model, ids, attention_mask=mask.long())
    actual = families.output(model, ids, attention_mask=mask.long(), position_ids=positions)
    families.assert_close(actual[mask], expected[mask])


def test_roberta_runs_past_its_table() -> None:
    """The issue people have: stock RoBERTa fails past 512 tokens, in the table and in a buffer of token types."""
    ids = token_ids(1, TRAINED + 30)
    with pytest.raises((IndexError, RuntimeError)):
        families.output(roberta(), ids)
    with pytest.raises(PosEncError, match=f"{TRAINED + 30}.*{TRAINED} positions"):
        families.output(roberta("learned"), ids)
    for scheme in ("alibi", "rope", {"type": "learned", "max_positions": 1024, "extend": "interpolate"}):
        output = families.output(roberta(scheme), ids)
        assert output.shape[1] == TRAINED + 30
        assert output.isfinite().all()


def test_an_extended_table_repeats_rows_after_the_offset() -> None:
    """Tiled, position 512 + i reads the row of position i, not row i of the table."""
    model = roberta({"type": "learned", "max_positions": 2 * TRAINED, "extend": "tile"}, num_hidden_layers=1)
    ids, first = token_ids(1, 6), PAD + 1
    start = families.output(model, ids, position_ids=torch.arange(first, first + 6)[None])
    again = families.output(model, ids, position_ids=torch.arange(first + TRAINED, first + TRAINED + 6)[None])
    shifted = families.output(model, ids, position_ids=torch.arange(TRAINED, TRAINED + 6)[None])
    assert torch.equal(start, again)
    assert families.differ(start, shifted)


@pytest.mark.parametrize("scheme", ["learned", "alibi"])
def test_packed_segments_equal_each_segment_alone(scheme: str) -> None:
    """The rows of `hf-posenc train` start where the model's own positions do."""
    model, ids = roberta(scheme), token_ids(1, 11)[0].tolist()
    rows = pack_segments([ids[:5], ids[5:]], 14, PAD, first_position=PAD + 1)
    inputs = {name: torch.tensor(values) for name, values in rows.items()}
    packed = families.output(model, inputs.pop("input_ids"), **inputs)
    alone = [families.output(model, torch.tensor([segment])) for segment in (ids[:5], ids[5:])]
    families.assert_close(packed[:, :11], torch.cat(alone, dim=1))


def test_one_token_documents_stay_apart_wherever_positions_start() -> None:
    ids = token_ids(1, 3)
    for first in (0, PAD + 1):
        packed = families.output(roberta("alibi"), ids, position_ids=torch.full((1, 3), first))
        alone = torch.cat([families.output(roberta("alibi"), ids[:, slot, None]) for slot in range(3)], dim=1)
        families.assert_close(packed, alone)
