"""Text on its way to a model: where it comes from, how it is cut, and in what order it is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_posenc.training.classes import Classes, classes_of
from hf_posenc.training.corpus import DOCUMENTS_AT_A_TIME, Corpus
from hf_posenc.training.objective import Objective, objective_of
from hf_posenc.training.rows import IGNORED, left_over, packed, packed_pieces
from hf_posenc.training.stages import Stage, Staged, read_stages
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level


def test_packed_rows_hold_every_token_in_its_order() -> None:
    documents = [[10, 11, 12], [20, 21, 22, 23, 24], [30]]
    rows = packed(documents, 4)
    assert rows["input_ids"] == [[10, 11, 12, 20], [21, 22, 23, 24]]
    assert rows["position_ids"] == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert rows["labels"] == [[IGNORED, 11, 12, IGNORED], [IGNORED, 22, 23, 24]]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 16])
def test_packed_rows_of_random_documents(length: int) -> None:
    generator = np.random.default_rng(length)
    documents = [generator.integers(5, 60, generator.integers(1, 12)).tolist() for _ in range(30)]
    rows = packed(documents, length)
    flat = [token for document in documents for token in document]
    assert [token for row in rows["input_ids"] for token in row] == flat[: len(flat) // length * length]
    own = [place for document in documents for place in range(len(document))]
    for row, positions in enumerate(rows["position_ids"]):
        for slot, position in enumerate(positions):
            assert position == min(own[row * length + slot], slot), (
                "of the document, or of what is left of it in this row"
            )
            assert (rows["labels"][row][slot] == IGNORED) == (position == 0)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_packed_row_is_as_good_as_its_documents_alone(architecture: str) -> None:
    documents = [tiny.tokens(1, size, seed=size)[0].tolist() for size in (5, 9, 4)]
    rows = {name: torch.tensor(values) for name, values in packed(documents, 18).items()}
    model = tiny.model(architecture, "alibi")
    together = model(**rows).loss.item()
    losses = []
    for document in documents:
        ids = torch.tensor([document])
        losses.append(model(ids, labels=ids).loss.item() * (len(document) - 1))
    assert together == pytest.approx(sum(losses) / (18 - 3), abs=3e-6)  # LLaMA's norms are float32
    mixed = model(rows["input_ids"], labels=rows["labels"]).loss.item()
    assert abs(mixed - together) > 1e-4, "one document for all would be something else"


def test_pieces_of_encoders_are_packed_whole() -> None:
    rows = packed_pieces([[1, 7, 2], [1, 8, 9, 2], [1, 2]], 8, pad=0)
    assert rows["input_ids"] == [[1, 7, 2, 1, 8, 9, 2, 0], [1, 2, 0, 0, 0, 0, 0, 0]]
    assert rows["position_ids"][0] == [0, 1, 2, 0, 1, 2, 3, 0]
    assert rows["attention_mask"] == [[1] * 7 + [0], [1] * 2 + [0] * 6]


def corpus(objective: Objective, **changes: Any) -> Corpus:
    encoder = objective is not Objective.CAUSAL
    return Corpus(word_level.tokenizer(encoder), 8, objective, **changes)


def test_a_corpus_of_a_causal_model_ends_each_document() -> None:
    rows = corpus(Objective.CAUSAL).rows(Dataset.from_dict({"text": ["w10 w11 w12", "", "w20 w21 w22 w23"]}))
    assert rows["input_ids"][:] == [[10, 11, 12, 2, 20, 21, 22, 23]]
    assert rows["position_ids"][:] == [[0, 1, 2, 3, 0, 1, 2, 3]]


@pytest.mark.parametrize("packing", [False, True])
def test_a_corpus_of_an_encoder_has_ends_around_each_piece(packing: bool) -> None:
    documents = Dataset.from_dict({"text": ["w10 w11 w12 w13 w14 w15 w16", "w20"]})
    rows = corpus(Objective.MASKED, packing=packing).rows(documents)
    pieces = [[1, 10, 11, 12, 13, 14, 15, 2], [1, 16, 2], [1, 20, 2]]
    assert rows["input_ids"][:] == ([pieces[0], [*pieces[1], *pieces[2], 0, 0]] if packing else pieces)


def test_streams_give_the_same_rows() -> None:
    documents = Dataset.from_dict({"text": [word_level.text(50, seed) for seed in range(3)]})
    whole = corpus(Objective.CAUSAL).rows(documents)
    streamed = list(corpus(Objective.CAUSAL).rows(documents.to_iterable_dataset()))
    assert [row["input_ids"] for row in streamed] == whole["input_ids"][:]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_the_same_however_many_documents_come_at_a_time(streaming: bool) -> None:
    """Documents of two tokens: as many as come at a time do not fill a single row, and all together do."""
    length, count = 2 * DOCUMENTS_AT_A_TIME + 100, 3 * DOCUMENTS_AT_A_TIME
    documents = Dataset.from_dict({"text": [f"w{5 + number % 50}" for number in range(count)]})
    made = Corpus(word_level.tokenizer(), length, Objective.CAUSAL).rows(
        documents.to_iterable_dataset() if streaming else documents
    )
    expected = packed([[5 + number % 50, 2] for number in range(count)], length)
    for _ in range(2):  # a stream begins again as it began
        rows = list(made)
        assert len(rows) == 2 * count // length == 2
        for name, values in expected.items():
            assert [row[name] for row in rows] == values, name


def test_what_is_left_over_goes_before_what_comes_next() -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert left_over(documents, 4) == [[9]]
    assert left_over(documents, 5) == [[6, 7], [8, 9]]
    assert left_over(documents, 10) == documents
    assert left_over([], 4) == []


def test_ids_that_are_there_already_are_cut() -> None:
    rows = corpus(Objective.MASKED, packing=False).rows(Dataset.from_dict({"input_ids": [list(range(5, 24))]}))
    assert [len(row) for row in rows["input_ids"]] == [8, 8, 3]


def test_too_little_text_is_said() -> None:
    with pytest.raises(ValueError, match="does not fill one row of 8"):
        corpus(Objective.CAUSAL).rows(Dataset.from_dict({"text": ["w10"]}))


def test_classes_need_labels() -> None:
    config = tiny.config("bert")

    def classes(labels: list[Any], column: str = "label", has_head: bool = False) -> Classes:
        return classes_of(config, has_head, Dataset.from_dict({"text": ["w10"] * len(labels), column: labels}), "label")

    assert classes([2, 0]).names == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert classes(["no", "yes", "no"]).names == ("no", "yes")
    assert classes([9], has_head=True).names == ("LABEL_0", "LABEL_1"), "those of the head"
    for wrong in ([0.5, 1.5], [None, 1], [-1, 1], ["one"], [0, 0], [10**9, 1]):
        with pytest.raises(ValueError, match="labels that are names, or whole numbers"):
            classes(wrong)
    with pytest.raises(ValueError, match="column of labels"):
        classes([1], "other")
    data = Dataset.from_dict({"text": ["w10", None], "label": ["yes", "no"]})
    found = corpus(Objective.CLASSIFICATION, classes=classes(["no", "yes"])).rows(data)
    assert found["labels"][:] == [1, 0]
    with pytest.raises(ValueError, match="5 is none of the 2 classes"):
        classes(["no", "yes"]).number(5)


def test_stages_are_read() -> None:
    assert read_stages("256", -1) == [Stage(256)]
    assert read_stages("256,512", 101) == [Stage(256, 50), Stage(512, 51)]
    assert read_stages("256:30,512:10", 40) == [Stage(256, 30), Stage(512, 10)]
    for wrong, steps in (("256,512", -1), ("256:30,512:10", 50), ("256:30,512", 40), ("x", 1), ("1", 1), ("8:0", 1)):
        with pytest.raises(ValueError, match="--train-length|several lengths"):
            read_stages(wrong, steps)


def test_stages_come_one_after_the_other_and_start_anew() -> None:
    short, long = list(range(3)), list(range(100, 110))
    staged = Staged([short, long], [7, 5], seed=0)
    seen = [staged[place] for place in range(len(staged))]
    assert sorted(seen[:3]) == short
    assert sorted(seen[3:6]) == short
    assert all(value >= 100 for value in seen[7:])
    assert len(set(seen[7:])) == 5
    assert seen == [Staged([short, long], [7, 5], seed=0)[place] for place in range(12)]
    assert seen != [Staged([short, long], [7, 5], seed=1)[place] for place in range(12)]


def test_the_head_of_a_checkpoint_says_what_it_does() -> None:
    config = tiny.config("gpt2")
    for name, task in (
        ("GPT2LMHeadModel", "causal-lm"),
        ("LlamaForCausalLM", "causal-lm"),
        ("BertForMaskedLM", "masked-lm"),
        ("BertModel", "states"),
        ("BertForSequenceClassification", "classification"),
    ):
        config.architectures = [name]
        assert objective_of(config).value == task
    assert objective_of(config, "masked-lm") is Objective.MASKED
    with pytest.raises(ValueError, match="there is no task 'x'"):
        objective_of(config, "x")
