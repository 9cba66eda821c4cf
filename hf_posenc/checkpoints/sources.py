"""The checkpoint that is converted: a directory or a Hub id, its config and its shards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..config import VariantConfig
from ..names import VARIANT_PREFIX
from ..patches.architecture import Architecture
from ..patches.live import ARCHITECTURES
from .shards import Shard, read_shards

COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "sentence_bert_config.json",
)
"""Files that go along as they are: what belongs to the tokenizer and to generation."""
WEIGHTS = ("config.json", "*.safetensors", SAFE_WEIGHTS_INDEX_NAME)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of a supported architecture, whose shards are all there and whole."""

    directory: Path
    config: Any
    architecture: Architecture
    shards: tuple[Shard, ...]

    @property
    def names(self) -> dict[str, Shard]:
        return {name: shard for shard in self.shards for name in shard.entries}

    def companions(self) -> list[Path]:
        """Paths inside of the directory of the files that go along."""
        found = {path for pattern in COMPANIONS for path in self.directory.glob(pattern) if path.is_file()}
        return sorted(path.relative_to(self.directory) for path in found)

    @classmethod
    def open(cls, source: str | Path, **hub: Any) -> Source:
        """Raise ValueError, and say what to do, for whatever cannot be converted."""
        directory = _directory(source, hub)
        config = _config(directory, source)
        architecture = ARCHITECTURES[config.model_type]
        return cls(directory, config, architecture, read_shards(directory))


def _directory(source: str | Path, hub: dict[str, Any]) -> Path:
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
        raise ValueError(f"{source} is no directory; name a checkpoint's directory or a Hub id such as 'user/model'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=[*WEIGHTS, *COMPANIONS], **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{source!r} is neither a directory here nor a checkpoint that could be had from the Hub: {error}"
        ) from error


def _config(directory: Path, source: str | Path) -> Any:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json, so that it is no checkpoint of transformers")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        model_type = values["model_type"]
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no config of transformers: {error!r}") from None
    if str(model_type).startswith(VARIANT_PREFIX):
        raise ValueError(
            f"{source} is a variant already, with the position scheme {json.dumps(values.get('position_scheme'))}. "
            "Convert the checkpoint that it was made from, whose own encoding is where every conversion begins"
        )
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"{source} is a {model_type!r} model, and hf_posenc knows {sorted(ARCHITECTURES)}: it has no place for a "
            "position scheme in others"
        )
    config = AutoConfig.from_pretrained(directory)
    if isinstance(config, VariantConfig):  # read off a field of older transformers
        raise ValueError(
            f"{source} has relative positions of transformers 4, whose parameters have other names: load it with "
            "from_pretrained and save it with save_pretrained, which makes the 'shaw' variant that it is"
        )
    return config
