"""Keep a teacher's predictions on disk, so that it runs only once on rows that are trained on several times.

Each process collects rows and writes them as safetensors files of its own, under a temporary name that is changed once
a file is complete. All processes read all files. Of each prediction only the most likely tokens are kept.

Shape legend: B rows, N tokens per row, T tokens of all rows, K most likely tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from ..checkpoints import fsync
from ..errors import PosEncError
from ..text_data import ATTENTION_MASK, INPUT_IDS
from .divergence import Logits, TopLogProbs, top_log_probs

logger = logging.get_logger(__name__)
FILE_PREFIX, FILE_SUFFIX = "teacher-", ".safetensors"
DIGEST_BYTES = 16
Inputs = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class _Location:
    """Where the predictions of a row are: the tokens from `start` to `end` of a file."""

    file: Any
    start: int
    end: int


class TeacherCache:
    """A teacher's most likely tokens for the rows of a dataset, in a directory.

    Rows are recognized by their tokens, positions and other inputs, wherever they are in a batch and however they are
    padded. A row costs 6 bytes for each of its tokens and each of the `top_k` tokens kept.

    Args:
        directory: Directory of the files; created if needed.
        teacher: A name of the teacher. Files of another teacher are refused.
        top_k: Tokens to keep for each prediction.
        dtype: Dtype of their log-probabilities.
        tokens_per_file: How many tokens to collect before they are written to a file.

    Raises:
        PosEncError: If the directory has files of another teacher, or with other settings.

    Example:
        >>> cache = TeacherCache("out/teacher", teacher="openai-community/gpt2")
        >>> RecoveryTrainer(..., teacher=teacher, teacher_cache=cache, hidden_loss_until=0.1)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        teacher: str,
        top_k: int = 64,
        dtype: torch.dtype = torch.float16,
        tokens_per_file: int = 2**16,
    ) -> None:
        if top_k < 1 or tokens_per_file < 1:
            raise PosEncError(f"top_k and tokens_per_file must be at least 1, got {top_k} and {tokens_per_file}")
        self.directory = Path(directory)
        self.top_k, self.dtype, self.tokens_per_file = top_k, dtype, tokens_per_file
        self._metadata = {"teacher": teacher, "top_k": str(top_k), "dtype": str(dtype)}
        self._pending: dict[bytes, TopLogProbs] = {}
        self._pending_tokens = 0
        self._locations: dict[bytes, _Location] = {}
        self._known_files: set[str] = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._read_new_files()

    def __len__(self) -> int:
        """The number of rows that this process knows."""
        return len(self._locations.keys() | self._pending.keys())

    def get(self, inputs: Inputs) -> TopLogProbs | None:
        """The predictions for a batch, (B, N, K), if all its rows are known; those at padding are arbitrary.

        Args:
            inputs: The model inputs of the batch, without labels.
        """
        keys = _row_keys(inputs)
        if not all(self._has(key) for key in keys):
            self._read_new_files()
            if not all(self._has(key) for key in keys):
                return None
        rows = [self._read(key) for key in keys]
        input_ids_BN = inputs[INPUT_IDS]
        mask_BN = _token_mask(inputs).cpu()
        k = rows[0].ids_BNK.shape[-1]
        # Outside the mask there is a valid distribution, so that nothing becomes NaN.
        log_probs = torch.zeros(*input_ids_BN.shape, k, dtype=self.dtype)
        ids = torch.arange(k, dtype=torch.int32).repeat(*input_ids_BN.shape, 1)
        log_rest = torch.full(input_ids_BN.shape, -torch.inf)
        log_probs[mask_BN], ids[mask_BN], log_rest[mask_BN] = (
            torch.cat([getattr(row, field.name) for row in rows]) for field in dataclasses.fields(TopLogProbs)
        )
        device = input_ids_BN.device
        return TopLogProbs(log_probs.to(device), ids.to(device), log_rest.to(device))

    def put(self, inputs: Inputs, logits_BNV: Logits) -> None:
        """Keep the predictions for a batch. They are written to disk with those of later batches, or by `flush`.

        Args:
            inputs: The model inputs of the batch, without labels.
            logits_BNV: The teacher's logits.
        """
        new_rows = {key: row for row, key in enumerate(_row_keys(inputs)) if not self._has(key)}
        if not new_rows:
            return
        top, mask_BN = top_log_probs(logits_BNV, self.top_k), _token_mask(inputs)
        for key, row in new_rows.items():
            log_probs, ids, log_rest = (
                values[row][mask_BN[row]].cpu() for values in (top.log_probs_BNK, top.ids_BNK, top.log_rest_BN)
            )
            self._pending[key] = TopLogProbs(log_probs.to(self.dtype), ids, log_rest.float())
            self._pending_tokens += len(ids)
        if self._pending_tokens >= self.tokens_per_file:
            self.flush()

    def flush(self) -> None:
        """Write the rows collected so far to a file, which appears only once it is complete."""
        if not self._pending:
            return
        sizes = [len(row.ids_BNK) for row in self._pending.values()]
        tensors = {
            field.name: torch.cat([getattr(row, field.name) for row in self._pending.values()])
            for field in dataclasses.fields(TopLogProbs)
        }
        tensors["keys"] = torch.frombuffer(bytearray(b"".join(self._pending)), dtype=torch.uint8)
        tensors["ends"] = torch.tensor(sizes).cumsum(0)
        path = self.directory / f"{FILE_PREFIX}{uuid.uuid4().hex}{FILE_SUFFIX}"
        temporary = path.with_suffix(".new")
        try:
            save_file(tensors, temporary, metadata=self._metadata)
            fsync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync(self.directory)
        self._pending, self._pending_tokens = {}, 0
        self._read_new_files()

    def _has(self, key: bytes) -> bool:
        return key in self._pending or key in self._locations

    def _read(self, key: bytes) -> TopLogProbs:
        if key in self._pending:
            return self._pending[key]
        location = self._locations[key]
        slices = (location.file.get_slice(field.name) for field in dataclasses.fields(TopLogProbs))
        return TopLogProbs(*(values[location.start : location.end] for values in slices))

    def _read_new_files(self) -> None:
        """Find the rows in files that this or another process has written. The files are mapped into memory."""
        for path in sorted(self.directory.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}")):
            if path.name in self._known_files:
                continue
            self._known_files.add(path.name)
            try:
                file = safe_open(path, "pt")
                metadata, keys, ends = file.metadata(), file.get_tensor("keys"), file.get_tensor("ends").tolist()
            except (OSError, SafetensorError) as error:
                logger.warning(f"Skipping the damaged file {path}: {error}")
                continue
            if metadata != self._metadata:
                raise PosEncError(
                    f"{self.directory} has predictions of {metadata}, but {self._metadata} is expected: choose another "
                    "directory or delete this one"
                )
            buffer = keys.numpy().tobytes()
            for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
                self._locations[buffer[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]] = _Location(file, start, end)


def _token_mask(inputs: Inputs) -> torch.Tensor:
    mask_BN = inputs.get(ATTENTION_MASK)
    return torch.ones_like(inputs[INPUT_IDS], dtype=torch.bool) if mask_BN is None else mask_BN.bool()


def _row_keys(inputs: Inputs) -> list[bytes]:
    """A hash for each row of all its inputs, without padding."""
    mask_BN = _token_mask(inputs).cpu()
    values = {name: value.cpu() for name, value in sorted(inputs.items()) if name != ATTENTION_MASK}
    keys = []
    for row, mask_N in enumerate(mask_BN):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, value in values.items():
            row_values = value[row][mask_N] if value.shape[:2] == mask_BN.shape else value[row]
            digest.update(f"{name} {tuple(row_values.shape)} {row_values.dtype}".encode())
            digest.update(row_values.contiguous().numpy().tobytes())
        keys.append(digest.digest())
    return keys
