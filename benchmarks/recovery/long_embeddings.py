"""An embedder for 512 tokens learns to read 2,048: can it find a sentence deep in a long text? LONG_EMBEDDINGS.md.

MiniLM is converted and trained on rows of 512 or of 2,048 tokens, which the original teaches in windows. The texts to
search differ in one sentence only, at a given depth. Rerun the command to resume:

    HF_POSENC_CHECKPOINTS=DIR HF_POSENC_MINILM=DIR python -m benchmarks.recovery.long_embeddings
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer

import hf_posenc
from hf_posenc.training import Teacher
from hf_posenc.training.teacher import SpecialTokens

from .plan import scheme_label
from .tasks import data_path, load_minilm, minilm_directory
from .trial import start_worker

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "long_embeddings.json", HERE.parent / "LONG_EMBEDDINGS.md"
LENGTH, SHORT_LENGTH, TOKENS, PASSES = 2048, 512, 80_000, 2
SCHEMES: tuple[Any, ...] = ({"type": "t5", "shared": False}, "alibi")
NUM_TEXTS, NUM_SENTENCES, DEPTHS = 2, 16, (0.1, 0.5, 0.9)
Encode = Callable[[torch.Tensor], torch.Tensor]
"""From token ids of one text, (1, N), to its embedding, (E,)."""


def _paragraphs(file: str) -> list[str]:
    lines = data_path("data", "wikitext-2", file).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if len(line) > 200]


def _write_documents(path: Path) -> None:
    """Long documents to train on: paragraphs that follow each other."""
    paragraphs = _paragraphs("valid.txt")
    documents = [" ".join(paragraphs[start : start + 24]) for start in range(0, len(paragraphs), 24)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def _sentences() -> list[str]:
    """Sentences to look for, from other articles than the texts."""
    sentences = [paragraph.split(" . ")[0] + " ." for paragraph in _paragraphs("test.txt")[-400:]]
    return [sentence for sentence in sentences if 80 < len(sentence) < 240][:: len(sentences) // (3 * NUM_SENTENCES)]


def _texts(depth: float) -> Iterator[list[torch.Tensor]]:
    """For each long text, its copies with one of the sentences each, all of the same length."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_directory())
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    sentences = tokenizer(_sentences()[:NUM_SENTENCES], add_special_tokens=False)["input_ids"]
    filler = tokenizer(" ".join(_paragraphs("test.txt")[:200]), add_special_tokens=False, verbose=False)["input_ids"]
    for number in range(NUM_TEXTS):
        text = filler[number * LENGTH : (number + 1) * LENGTH]
        copies = []
        for sentence in sentences:
            at = round(depth * (LENGTH - 2 - len(sentence)))
            ids = [first, *text[:at], *sentence, *text[at:]]
            copies.append(torch.tensor([[*ids[: LENGTH - 1], last]]))
        yield copies


@torch.no_grad()
def retrieval_accuracy(encode: Encode) -> dict[str, float]:
    """How often the text with a sentence is nearest to the sentence, for each depth."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_directory())
    queries = [tokenizer(sentence, return_tensors="pt")["input_ids"] for sentence in _sentences()[:NUM_SENTENCES]]
    queries_QE = functional.normalize(torch.stack([encode(ids) for ids in queries]), dim=-1)
    accuracies = {}
    for depth in DEPTHS:
        is_found = []
        for copies in _texts(depth):
            texts_QE = functional.normalize(torch.stack([encode(ids) for ids in copies]), dim=-1)
            is_found += (queries_QE @ texts_QE.T).argmax(-1).eq(torch.arange(len(queries))).tolist()
        accuracies[str(depth)] = sum(is_found) / len(is_found)
    return accuracies


def mean_pooling(model: Any) -> Encode:
    model.eval()
    return lambda ids: model(ids).last_hidden_state[0].mean(0)


def original_cut() -> dict[str, Any]:
    """The original, which reads the first 512 tokens."""
    encode = mean_pooling(load_minilm())
    return retrieval_accuracy(lambda ids: encode(ids[:, :SHORT_LENGTH]))


def original_in_windows() -> dict[str, Any]:
    """The original in overlapping windows, averaged: what the variants learn from."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_directory())
    teacher = Teacher(load_minilm(), special_tokens=SpecialTokens(tokenizer.cls_token_id, tokenizer.sep_token_id))
    return retrieval_accuracy(lambda ids: teacher.last_hidden_state({"input_ids": ids})[0].mean(0))


def swapped(scheme: Any) -> dict[str, Any]:
    return retrieval_accuracy(mean_pooling(hf_posenc.retrofit(load_minilm(), scheme)))


def trained(scheme: Any, length: int) -> dict[str, Any]:
    """Train with the command line's defaults."""
    with tempfile.TemporaryDirectory() as directory:
        data, out = Path(directory) / "documents.jsonl", Path(directory) / "out"
        _write_documents(data)
        command = [sys.executable, "-m", "hf_posenc", "train", "--model", str(minilm_directory()), "--data", str(data)]
        command += ["--scheme", json.dumps(scheme), "--train-length", str(length), "--tokens", str(TOKENS)]
        command += ["--passes", str(PASSES), "--output-dir", str(out), "--use-cpu", "--disable-tqdm", "true"]
        start = time.monotonic()
        subprocess.run([*command, "--report-to", "none"], check=True, stdout=subprocess.DEVNULL)
        seconds = round(time.monotonic() - start)
        return {**retrieval_accuracy(mean_pooling(AutoModel.from_pretrained(out))), "seconds": seconds}


def planned_runs() -> dict[str, Callable[[], dict[str, Any]]]:
    """All rows of the table by name."""
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        f"original, first {SHORT_LENGTH} tokens": original_cut,
        "original, in windows": original_in_windows,
    }
    for scheme in SCHEMES:
        label = scheme_label(scheme)
        runs[f"{label}, swapped"] = lambda scheme=scheme: swapped(scheme)
        for length in (SHORT_LENGTH, LENGTH):
            runs[f"{label}, trained at {length}"] = lambda scheme=scheme, length=length: trained(scheme, length)
    return runs


def render_page(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["# Embedding long texts", "", "Generated by `python -m benchmarks.recovery.long_embeddings`; do not edit."]
    lines += [
        "",
        f"all-MiniLM-L6-v2 (512 positions) learns another encoding from {TOKENS:,} tokens, {PASSES} passes. The",
        f"original teaches rows of {LENGTH:,} tokens in overlapping windows. Cells are the fraction of sentences for",
        f"which the right text of {LENGTH:,} tokens is nearest, out of {NUM_SENTENCES} that differ only in that",
        f"sentence, at a depth given as a fraction of the text; {NUM_TEXTS} texts. Guessing finds",
        f"{1 / NUM_SENTENCES:.3f}. One seed.",
        "",
        "| model | " + " | ".join(f"depth {depth}" for depth in DEPTHS) + " | training time |",
        "| --- |" + " --- |" * (len(DEPTHS) + 1),
    ]
    for name, values in results.items():
        cells = [f"{values[str(depth)]:.3f}" for depth in DEPTHS]
        lines.append(
            f"| {name} | " + " | ".join([*cells, f"{values['seconds']} s" if "seconds" in values else ""]) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    start_worker()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name, run in tqdm(planned_runs().items(), unit="run", desc="Long embeddings"):
        if name not in results:
            results[name] = run()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(render_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
