"""Tiny stock checkpoints on disk, and helpers for the tests that convert them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny_models as tiny


def save_stock(
    directory: Path, architecture: str = "gpt2", max_shard_size: str = "5GB", dtype: torch.dtype = torch.float32
) -> Path:
    tiny.model(architecture, dtype=dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def file_hashes(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def update_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_posenc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
