"""The checkpoint that is converted: a directory or a Hub id, its config and its shards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..config import VariantConfig
from ..files import COMPANIONS
from ..limits import shown
from ..names import VARIANT_PREFIX
from ..patches.architecture import Architecture
from ..patches.live import ARCHITECTURES
from .configs import read_config, read_fields
from .expected import layers_in
from .shards import Shard, read_shards

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
        shards = read_shards(directory)
        _refuse_other_sizes(config, architecture, shards)
        return cls(directory, config, architecture, shards)


def _refuse_other_sizes(config: Any, architecture: Architecture, shards: tuple[Shard, ...]) -> None:
    """What is made new is as large as the config says: the files must bear it out."""
    entries = {name: entry for shard in shards for name, entry in shard.entries.items()}
    layers = layers_in(architecture, entries)
    if config.num_hidden_layers > layers:
        raise ValueError(f"config.json is of {config.num_hidden_layers} layers, and the weights are of {layers}")
    if not any(config.hidden_size in entry.shape for entry in entries.values()):
        raise ValueError(f"config.json is of a model {config.hidden_size:,} wide, and no tensor of the weights is")


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
    values = read_fields(directory)
    model_type = values["model_type"]
    if model_type.startswith(VARIANT_PREFIX):
        scheme = shown(values.get("position_scheme"), json.dumps)
        raise ValueError(
            f"{source} is a variant already, with the position scheme {scheme}. "
            "Convert the checkpoint that it was made from, whose own encoding is where every conversion begins"
        )
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"{source} is a {shown(model_type)} model, and hf_posenc knows {sorted(ARCHITECTURES)}: it has no place "
            "for a position scheme in others"
        )
    config = read_config(directory)
    if isinstance(config, VariantConfig):  # read off a field of older transformers
        raise ValueError(
            f"{source} has relative positions of transformers 4, whose parameters have other names: load it with "
            "from_pretrained and save it with save_pretrained, which makes the 'shaw' variant that it is"
        )
    return config
