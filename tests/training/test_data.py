"""From documents to rows: packing, tokenization, labels, stages and objectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_posenc.errors import PosEncError
from hf_posenc.training.arguments import Stage, parse_train_length
from hf_posenc.training.data import (
    DOCUMENTS_PER_BATCH,
    IGNORE_INDEX,
    RowBuilder,
    concatenate_stages,
    pack_documents,
    pack_segments,
)
from hf_posenc.training.objectives import Labels, Objective, infer_objective
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level


def test_packed_rows_keep_every_token_in_order() -> None:
    documents = [[10, 11, 12], [20, 21, 22, 23, 24], [30]]
    rows, remainder = pack_documents(documents, 4)
    assert rows["input_ids"] == [[10, 11, 12, 20], [21, 22, 23, 24]]
    assert rows["position_ids"] == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert rows["labels"] == [[IGNORE_INDEX, 11, 12, IGNORE_INDEX], [IGNORE_INDEX, 22, 23, 24]]
    assert remainder == [[30]]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 16])
def test_packed_rows_of_random_documents(length: int) -> None:
    generator = np.random.default_rng(length)
    documents = [generator.integers(5, 60, generator.integers(1, 12)).tolist() for _ in range(30)]
    rows, _ = pack_documents(documents, length)
    flat = [token for document in documents for token in document]
    assert [token for row in rows["input_ids"] for token in row] == flat[: len(flat) // length * length]
    document_positions = [position for document in documents for position in range(len(document))]
    for row, positions in enumerate(rows["position_ids"]):
        for slot, position in enumerate(positions):
            assert position == min(document_positions[row * length + slot], slot), (
                "in the document, or in the part of it in this row"
            )
            assert (rows["labels"][row][slot] == IGNORE_INDEX) == (position == 0)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_packed_row_has_the_loss_of_its_documents(architecture: str) -> None:
    documents = [tiny.tokens(1, size, seed=size)[0].tolist() for size in (5, 9, 4)]
    rows = {name: torch.tensor(values) for name, values in pack_documents(documents, 18)[0].items()}
    model = tiny.model(architecture, "alibi")
    together = model(**rows).loss.item()
    losses = []
    for document in documents:
        ids = torch.tensor([document])
        losses.append(model(ids, labels=ids).loss.item() * (len(document) - 1))
    assert together == pytest.approx(sum(losses) / (18 - 3), abs=3e-6)  # LLaMA's norms are float32
    unseparated = model(rows["input_ids"], labels=rows["labels"]).loss.item()
    assert abs(unseparated - together) > 1e-4, "control: without positions, documents see each other"


def test_segments_are_packed_whole() -> None:
    rows = pack_segments([[1, 7, 2], [1, 8, 9, 2], [1, 2]], 8, pad_token_id=0)
    assert rows["input_ids"] == [[1, 7, 2, 1, 8, 9, 2, 0], [1, 2, 0, 0, 0, 0, 0, 0]]
    assert rows["position_ids"][0] == [0, 1, 2, 0, 1, 2, 3, 0]
    assert rows["attention_mask"] == [[1] * 7 + [0], [1] * 2 + [0] * 6]


def row_builder(objective: Objective, **changes: Any) -> RowBuilder:
    encoder = objective is not Objective.CAUSAL
    return RowBuilder(word_level.tokenizer(encoder), 8, objective, **changes)


def test_causal_documents_end_with_eos() -> None:
    rows = row_builder(Objective.CAUSAL).build(Dataset.from_dict({"text": ["w10 w11 w12", "", "w20 w21 w22 w23"]}))
    assert rows["input_ids"][:] == [[10, 11, 12, 2, 20, 21, 22, 23]]
    assert rows["position_ids"][:] == [[0, 1, 2, 3, 0, 1, 2, 3]]


@pytest.mark.parametrize("packing", [False, True])
def test_encoder_segments_have_special_tokens(packing: bool) -> None:
    documents = Dataset.from_dict({"text": ["w10 w11 w12 w13 w14 w15 w16", "w20"]})
    rows = row_builder(Objective.MASKED, packing=packing).build(documents)
    segments = [[1, 10, 11, 12, 13, 14, 15, 2], [1, 16, 2], [1, 20, 2]]
    assert rows["input_ids"][:] == ([segments[0], [*segments[1], *segments[2], 0, 0]] if packing else segments)


def test_streamed_rows_are_the_same() -> None:
    documents = Dataset.from_dict({"text": [word_level.text(50, seed) for seed in range(3)]})
    whole = row_builder(Objective.CAUSAL).build(documents)
    streamed = list(row_builder(Objective.CAUSAL).build(documents.to_iterable_dataset()))
    assert [row["input_ids"] for row in streamed] == whole["input_ids"][:]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_do_not_depend_on_the_batch_size(streaming: bool) -> None:
    """With documents of two tokens, a batch does not fill a single row, but all batches together do."""
    length, count = 2 * DOCUMENTS_PER_BATCH + 100, 3 * DOCUMENTS_PER_BATCH
    documents = Dataset.from_dict({"text": [f"w{5 + number % 50}" for number in range(count)]})
    dataset = RowBuilder(word_level.tokenizer(), length, Objective.CAUSAL).build(
        documents.to_iterable_dataset() if streaming else documents
    )
    expected, _ = pack_documents([[5 + number % 50, 2] for number in range(count)], length)
    for _ in range(2):  # a stream can be read again
        rows = list(dataset)
        assert len(rows) == 2 * count // length == 2
        for name, values in expected.items():
            assert [row[name] for row in rows] == values, name


def test_remainder_of_packed_documents() -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert pack_documents(documents, 4)[1] == [[9]]
    assert pack_documents(documents, 5)[1] == [[6, 7], [8, 9]]
    assert pack_documents(documents, 10)[1] == documents
    assert pack_documents([], 4)[1] == []


def test_existing_input_ids_are_cut() -> None:
    rows = row_builder(Objective.MASKED, packing=False).build(Dataset.from_dict({"input_ids": [list(range(5, 24))]}))
    assert [len(row) for row in rows["input_ids"]] == [8, 8, 3]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(PosEncError, match="does not fill one row of 8"):
        row_builder(Objective.CAUSAL).build(Dataset.from_dict({"text": ["w10"]}))


def test_labels_are_found() -> None:
    config = tiny.config("bert")

    def find_labels(labels: list[Any], column: str = "label", has_head: bool = False) -> Labels:
        config.architectures = ["BertForSequenceClassification"] if has_head else ["BertForMaskedLM"]
        return Labels.find(config, Dataset.from_dict({"text": ["w10"] * len(labels), column: labels}), "label")

    assert find_labels([2, 0]).names == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert find_labels(["no", "yes", "no"]).names == ("no", "yes")
    assert find_labels([9], has_head=True).names == ("LABEL_0", "LABEL_1"), "the labels of the head"
    for wrong in ([0.5, 1.5], [None, 1], [-1, 1], ["one"], [0, 0], [10**9, 1]):
        with pytest.raises(PosEncError, match="class names or class ids"):
            find_labels(wrong)
    with pytest.raises(PosEncError, match="no label column"):
        find_labels([1], "other")
    data = Dataset.from_dict({"text": ["w10", None], "label": ["yes", "no"]})
    rows = row_builder(Objective.CLASSIFICATION, labels=find_labels(["no", "yes"])).build(data)
    assert rows["labels"][:] == [1, 0]
    with pytest.raises(PosEncError, match="5; expected one of the 2 classes"):
        find_labels(["no", "yes"]).class_id(5)


def test_train_length_is_parsed() -> None:
    assert parse_train_length("256", -1) == [Stage(256)]
    assert parse_train_length("256,512", 101) == [Stage(256, 50), Stage(512, 51)]
    assert parse_train_length("256:30,512:10", 40) == [Stage(256, 30), Stage(512, 10)]
    for wrong, steps in (("256,512", -1), ("256:30,512:10", 50), ("256:30,512", 40), ("x", 1), ("1", 1), ("8:0", 1)):
        with pytest.raises(PosEncError, match="--train-length|Several lengths"):
            parse_train_length(wrong, steps)


def test_stages_follow_each_other_and_reshuffle() -> None:
    short, long = list(range(3)), list(range(100, 110))

    def staged(seed: int) -> list[int]:
        stages = [Dataset.from_dict({"row": rows}) for rows in (short, long)]
        return list(concatenate_stages(stages, [7, 5], seed)["row"])

    seen = staged(seed=0)
    assert len(seen) == 12
    assert sorted(seen[:3]) == short
    assert sorted(seen[3:6]) == short
    assert all(value >= 100 for value in seen[7:])
    assert len(set(seen[7:])) == 5
    assert seen == staged(seed=0)
    assert seen != staged(seed=1)


def test_objective_is_inferred_from_the_head() -> None:
    config = tiny.config("gpt2")
    for name, task in (
        ("GPT2LMHeadModel", "causal-lm"),
        ("LlamaForCausalLM", "causal-lm"),
        ("BertForMaskedLM", "masked-lm"),
        ("BertModel", "feature-extraction"),
        ("BertForSequenceClassification", "classification"),
    ):
        config.architectures = [name]
        assert infer_objective(config).value == task
    assert infer_objective(config, "masked-lm") is Objective.MASKED
    with pytest.raises(PosEncError, match="task 'x'"):
        infer_objective(config, "x")
