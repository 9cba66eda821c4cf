"""Compare an exported model with its variant, on random tokens and on a text, before the export is put in place."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import PosEncError
from ..drift import MAX_SEQUENCE_LENGTH, read_sequences
from ..loading import load_model, load_tokenizer
from .plan import ExportPlan
from .variant import Variant

TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest output. Both models run in float32 and sum in another order."""
COMPARED = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
SHORT, LONG, FAR = 16, 320, 24
"""Numbers of random tokens: with padding, in one long row, and at far positions."""
MAX_SEQUENCES = 2
"""How much of a text is compared: outputs over a large vocabulary take gigabytes."""
SAMPLE = "The quick brown fox jumps over 12 lazy dogs. Ångström, naïve, 日本語!\n"


@dataclasses.dataclass(frozen=True)
class Verification:
    """How far the outputs of an exported model are from those of its variant."""

    num_tokens: int
    max_difference: float
    """The largest difference of any output."""
    max_output: float
    """The largest output, which the difference is relative to."""

    def __str__(self) -> str:
        return (
            f"compared on {self.num_tokens:,} tokens: largest difference {self.max_difference:.2g}, "
            f"largest output {self.max_output:.3g}"
        )


def verify_export(variant: Variant, plan: ExportPlan, exported: Path, text: Path | None) -> Verification:
    """Run both models, one after the other, on the same tokens. Raises `PosEncError` if outputs differ."""
    # Stock models with dynamic scaling keep the angles of the longest input so far, so the longest comes last.
    inputs = sorted(_inputs(variant, plan, text), key=_length)
    expected = _run(variant.directory, plan.variant_class, inputs)
    outputs = _run(exported, plan.model_class, inputs)
    num_tokens, difference, largest = 0, 0.0, 0.0
    for batch, theirs, ours in zip(inputs, expected, outputs, strict=True):
        num_tokens += int(batch["attention_mask"].sum())
        for name in theirs.keys() & ours.keys():
            difference = max(difference, (theirs[name] - ours[name]).abs().max().nan_to_num(torch.inf).item())
            largest = max(largest, theirs[name].abs().max().item())
    result = Verification(num_tokens, difference, largest)
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise PosEncError(
            f"The exported {plan.config.model_type} does not compute what {variant.directory} computes ({result}), so "
            "nothing was written. Please report this with the config.json of the variant"
        )
    return result


def verify_tokenizer(variant: Variant, exported: Path) -> None:
    """Check that the tokenizer of an export gives the same tokens. Raises `PosEncError` if it does not."""
    original = load_tokenizer(variant.directory)
    if original is None:
        return
    copied = load_tokenizer(exported)
    if copied is None or copied(SAMPLE)["input_ids"] != original(SAMPLE)["input_ids"]:
        raise PosEncError(
            f"The tokenizer of {variant.directory} gives other tokens for the new model type, so nothing was written"
        )


def _inputs(variant: Variant, plan: ExportPlan, text: Path | None) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens without special ones: a padded batch, a long row, and tokens at far positions; then the text."""
    config, generator = variant.config, torch.Generator().manual_seed(0)
    limit = plan.max_positions or MAX_SEQUENCE_LENGTH
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    ordinary = torch.tensor([token for token in range(2, config.vocab_size) if token not in special] or [0])

    def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
        ids = ordinary[torch.randint(len(ordinary), (rows, min(length, limit)), generator=generator)]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    padding = getattr(config, "pad_token_id", None)
    # Classifiers look for the last token that is not padding, and refuse several rows if they do not know it.
    padded = batch(1 if padding is None and "SequenceClassification" in plan.model_class else 2, SHORT)
    num_padding = padded["input_ids"].shape[1] // 3
    padded["input_ids"][1:, -num_padding:] = padding or 0
    padded["attention_mask"][1:, -num_padding:] = 0
    yield padded
    yield batch(1, LONG)
    if plan.checked_position is not None:
        far = batch(1, FAR)
        first = plan.checked_position + variant.architecture.first_position(config)
        yield {**far, "position_ids": first + torch.arange(far["input_ids"].shape[1])[None]}
    if text is not None:
        sequences = read_sequences(variant.directory, text, min(limit, MAX_SEQUENCE_LENGTH))
        yield from (
            {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])} for ids in sequences[:MAX_SEQUENCES]
        )


@torch.no_grad()
def _run(directory: Path, model_class: str, inputs: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The outputs of a model at the tokens that are not padding; none for positions that it does not accept."""
    model, missing = load_model(directory, model_class, dtype=torch.float32)
    if missing:
        raise PosEncError(f"The weights of {model_class} are incomplete: {', '.join(missing[:4])}")
    model.config.use_cache = False
    accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
    results: list[dict[str, torch.Tensor]] = []
    for batch in inputs:
        outputs = model(**batch) if accepts_positions or "position_ids" not in batch else {}
        results.append({name: _visible(outputs[name], batch) for name in COMPARED if outputs.get(name) is not None})
    return results


def _length(batch: dict[str, torch.Tensor]) -> int:
    return int(batch["position_ids"].max()) + 1 if "position_ids" in batch else batch["input_ids"].shape[1]


def _visible(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = batch["attention_mask"].bool()
    return output[mask] if output.shape[:2] == mask.shape else output
