"""Variants that the tests of the Hub push, and what they look for there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import tiny_models as tiny
from tests.support.hub_client import seen
from tests.support.hub_server import Hub

WHOLE = {".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors"}
VARIANT = WHOLE | {"modeling_hf_posenc.py"}


def saved(directory: Path, scheme: Any = "t5", seed: int = 0, shard: str = "5GB", architecture: str = "gpt2") -> Any:
    """Save a variant (the stock model with no scheme), and return what is seen of it."""
    model = tiny.model(architecture, scheme, torch.float32, seed)
    model.save_pretrained(directory, max_shard_size=shard)
    return seen(model)


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Class, weights and logits, to the bit."""
    return all(one[name] == two[name] for name in ("class", "weights", "logits"))


def uploads(hub: Hub) -> int:
    return sum(request.startswith("PUT /lfs/") for request in hub.requests)
