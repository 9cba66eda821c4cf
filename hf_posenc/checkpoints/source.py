"""The checkpoint that is converted: a directory or a Hub id, its config and its shards."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..config import BASE_MODEL_KEY, VariantConfig
from ..model_types import VARIANT_PREFIX
from ..patches.architecture import Architecture
from ..patches.live_models import ARCHITECTURES
from ..validation import truncate_repr
from .config_file import read_config, read_fields
from .expected_weights import compare, knows_head, layers_in
from .file_names import COMPANION_FILES
from .shards import Entry, Shard, read_shards

WEIGHTS = ("config.json", "*.safetensors", SAFE_WEIGHTS_INDEX_NAME)
MOST_TOLD = 3
"""Of what is wrong with weights."""


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
        found = {path for pattern in COMPANION_FILES for path in self.directory.glob(pattern) if path.is_file()}
        return sorted(path.relative_to(self.directory) for path in found)

    @classmethod
    def open(cls, source: str | Path, **hub: Any) -> Source:
        """Raise ValueError, and say what to do, for whatever cannot be converted."""
        try:
            directory = _directory(source, hub)
            config = _config(directory, source)
            shards = read_shards(directory)
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error}") from error
        found = cls(directory, config, ARCHITECTURES[config.model_type], shards)
        found._refuse_other_sizes()
        return found

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: shard.entries[name] for name, shard in self.names.items()}

    def _refuse_other_sizes(self) -> None:
        """What is made new is as large as the config says: the files must bear it out, before memory is taken."""
        entries, width, wanted = self.entries, self.config.hidden_size, self.config.num_hidden_layers
        layers = layers_in(self.architecture, entries)
        if wanted > layers:
            raise ValueError(f"config.json is of {wanted} layers, and the weights are of {layers}")
        if not any(width in entry.shape for entry in entries.values()):
            raise ValueError(f"config.json is of a model {width:,} wide, and no tensor of the weights is")

    def refuse_other_weights(self, uses_stock_table: bool) -> None:
        """The weights must be those of the config's model: but for its head, and for a table that is dropped."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = "eager"  # whatever the machine has: nothing is computed here
        if not knows_head(config, self.architecture):
            config.architectures = None
        dropped = None if uses_stock_table else f"{self.architecture.table}.weight"
        _, problems, _ = compare(config, self.entries, only=lambda name: name != dropped)
        if problems:
            raise ValueError(f"the weights are not those of config.json's model: {'; '.join(problems[:MOST_TOLD])}")


def _directory(source: str | Path, hub: dict[str, Any]) -> Path:
    try:
        directory = Path(source).expanduser()
    except RuntimeError as error:  # a home that nobody has
        raise ValueError(f"{source} cannot be read: {error}") from error
    if directory.is_dir():
        return directory
    if directory.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
        raise ValueError(f"{source} is no directory; name a checkpoint's directory or a Hub id such as 'user/model'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.errors import HTTPError as RequestError  # of the client's own library, which has changed

    try:
        return Path(snapshot_download(str(source), allow_patterns=[*WEIGHTS, *COMPANION_FILES], **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RequestError, OSError) as error:
        raise ValueError(
            f"{source!r} is neither a directory here nor a checkpoint that could be had from the Hub: {error}"
        ) from error


def _config(directory: Path, source: str | Path) -> Any:
    values = read_fields(directory)
    model_type = values["model_type"]
    if model_type.startswith(VARIANT_PREFIX):
        scheme = truncate_repr(values.get("position_scheme"), json.dumps)
        made_from = (
            truncate_repr(values[BASE_MODEL_KEY])
            if BASE_MODEL_KEY in values
            else "the checkpoint that it was made from"
        )
        raise ValueError(
            f"{source} is a variant already, with the position scheme {scheme}. "
            f"Convert {made_from}, whose own encoding is where every conversion begins"
        )
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"{source} is a {truncate_repr(model_type)} model, and hf_posenc knows {sorted(ARCHITECTURES)}: it has no place "
            "for a position scheme in others"
        )
    config = read_config(directory)
    if isinstance(config, VariantConfig):  # read off a field of older transformers
        raise ValueError(
            f"{source} has relative positions of transformers 4, whose parameters have other names: load it with "
            "from_pretrained and save it with save_pretrained, which makes the 'shaw' variant that it is"
        )
    return config
