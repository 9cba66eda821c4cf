"""What tests of converted checkpoints share."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

from tests.support import tiny_models as tiny


def hashes(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def saved(directory: Path, architecture: str = "gpt2", shard: str = "5GB", dtype: torch.dtype = torch.float32) -> Path:
    tiny.model(architecture, dtype=dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_posenc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
