"""Hashes of the checkpoints that a run starts from, to notice that they were edited before it is resumed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from huggingface_hub.utils.sha import sha_fileobj
from transformers.utils import CONFIG_NAME

from ..checkpoints import find_checkpoint, read_shards
from .arguments import TrainRequest

Fingerprint = dict[str, str]
MODEL, TEACHER = "model", "teacher"


def checkpoint_fingerprint(source: str, revision: str | None = None) -> Fingerprint:
    """The SHA-256 of a checkpoint's config and weight files by name; of a Hub id, its commit, which implies them."""
    directory = find_checkpoint(source, revision)
    if not Path(source).expanduser().is_dir():
        return {"commit": directory.name}
    paths = [directory / CONFIG_NAME, *(shard.path for shard in read_shards(directory))]
    return {path.name: _sha256(path) for path in paths}


def fingerprint_checkpoints(request: TrainRequest) -> dict[str, Fingerprint]:
    """The fingerprints of the model to train, and of the teacher if it is another checkpoint."""
    fingerprints = {MODEL: checkpoint_fingerprint(request.model, request.revision)}
    if request.teacher_model is not None:
        fingerprints[TEACHER] = checkpoint_fingerprint(request.teacher_model)
    return fingerprints


def digest(fingerprint: Fingerprint) -> str:
    """One hash of a whole fingerprint, for the metadata of files that a checkpoint has produced."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()
