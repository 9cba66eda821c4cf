"""Reading text datasets from files, saved datasets and the Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_posenc.errors import PosEncError
from hf_posenc.text_data import load_text_dataset, select_text_column

datasets = pytest.importorskip("datasets", reason="the extra `train` is not installed")


def test_every_file_format_is_read(tmp_path: Path) -> None:
    texts = ["w5 w6", "w7"]
    dataset = datasets.Dataset.from_dict({"text": texts})
    (tmp_path / "a.txt").write_text("w5 w6\nw7\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    dataset.to_parquet(tmp_path / "c.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "splits")
    assert load_text_dataset(str(tmp_path / "a.txt"))["text"][:] == ["w5 w6\nw7\n"], "a text file is one document"
    for name in ("b.jsonl", "c.parquet", "saved", "splits"):
        source = str(tmp_path / name)
        assert load_text_dataset(source)["text"][:] == texts, name
        assert [row["text"] for row in load_text_dataset(source, streaming=True)] == texts, name
    with pytest.raises(PosEncError, match="'test'.*'train'"):
        load_text_dataset(str(tmp_path / "splits"), "test")


def test_missing_and_unsupported_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PosEncError, match=r"No data.*nothing\.txt"):
        load_text_dataset(str(tmp_path / "nothing.txt"))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(PosEncError, match="single type"):
        load_text_dataset(str(tmp_path / "x.bin"))
    with pytest.raises(PosEncError, match="nobody/nothing.*Hub"):
        load_text_dataset("nobody/nothing")


def test_text_column_is_inferred_or_requested() -> None:
    assert select_text_column(["text", "input_ids"]) == "input_ids"
    assert select_text_column(["label", "text"]) == "text"
    assert select_text_column(["body"]) == "body"
    assert select_text_column(["body", "text"], "body") == "body"
    with pytest.raises(PosEncError, match="--text-column"):
        select_text_column(["a", "b"])
    with pytest.raises(PosEncError, match="no column 'c'"):
        select_text_column(["a", "b"], "c")
