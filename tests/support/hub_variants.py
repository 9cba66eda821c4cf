"""Variants to push to the fake Hub, and helpers to check what arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import tiny_models as tiny
from tests.support.hub_client import seen
from tests.support.hub_server import Hub

STOCK_FILES = {".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors"}
VARIANT = STOCK_FILES | {"modeling_hf_posenc.py"}


def saved(directory: Path, scheme: Any = "t5", seed: int = 0, shard: str = "5GB", architecture: str = "gpt2") -> Any:
    """Save a variant (or the stock model, without a scheme) and return its fingerprint."""
    model = tiny.model(architecture, scheme, torch.float32, seed)
    model.save_pretrained(directory, max_shard_size=shard)
    return seen(model)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two fingerprints have the same class and bit-identical weights and logits."""
    return all(first[name] == second[name] for name in ("class", "weights", "logits"))


def uploads(hub: Hub) -> int:
    return sum(request.startswith("PUT /lfs/") for request in hub.requests)
