"""Download and read checkpoints that others made: config.json is checked before transformers builds anything.

Nothing in a checkpoint is executed, and sizes are compared with the weight files before memory is allocated.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..config import BASE_MODEL_KEY, VariantConfig
from ..errors import PosEncError
from ..model_types import VARIANT_PREFIX
from ..patches import ARCHITECTURES, Architecture, refuse
from ..validation import CONFIG_LIMITS, check_json_limits, truncate_repr
from .config_fields import check_config_fields
from .files import COMPANION_FILES, WEIGHT_FILES, list_pickles
from .links import check_checkpoint_links

MAX_JSON_BYTES = 64 * 2**20
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ADVICE = {
    401: "Log in with `hf auth login`, or set HF_TOKEN to a token from https://huggingface.co/settings/tokens.",
    403: "Use a token with permission for it, push to your own namespace, or open a pull request with --create-pr.",
    404: "Check the name and the revision; a private repository needs a token that can read it.",
    409: "Someone else changed the repository in the meantime; nothing was committed. Check it and push again.",
}
_ADVICE[412] = _ADVICE[409]


@contextmanager
def translate_hub_errors(repo: str) -> Iterator[None]:
    """Raise errors of the Hub client as `PosEncError`, with one line of advice; let all others pass."""
    try:
        yield
    except errors.HfHubHTTPError as error:
        advice = _ADVICE.get(error.response.status_code, "")
        raise PosEncError(f"The Hub refused access to {repo!r}. {advice}\n{error}") from error
    except (errors.HFValidationError, errors.LocalTokenNotFoundError) as error:  # both say what to do
        raise PosEncError(f"Cannot access {repo!r} on the Hub: {error}") from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise PosEncError(f"Could not reach the Hub for {repo!r}: {error}") from error
    except RuntimeError as error:  # raised by the client when a file cannot be uploaded
        if "upload" not in str(error).lower():
            raise
        raise PosEncError(
            f"{error} Nothing was committed. Push again: files already uploaded are not sent twice. "
            f"Cause: {error.__cause__ or error}"
        ) from error


def read_json(path: Path, max_number: float | None = None) -> Any:
    """Read an untrusted JSON file. Raises `PosEncError` if it is not valid, or exceeds the limits."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise PosEncError(f"the file has {path.stat().st_size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        values = json.loads(path.read_text(encoding="utf-8"))
        check_json_limits(values, path.name, *CONFIG_LIMITS, max_number=max_number)
    except (OSError, ValueError, RecursionError) as error:
        raise PosEncError(f"{path} is not a valid JSON file: {truncate_repr(error, str)}") from None
    return values


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted file. Raises `PosEncError` if it is anything else, or too large."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise PosEncError(f"{path} is not a valid JSON file: expected a JSON object")
    return values


def read_config_fields(directory: Path) -> dict[str, Any]:
    """Read config.json as plain values. Raises `PosEncError` if it is missing, invalid, or has a field to refuse."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise PosEncError(f"{directory} has no {CONFIG_NAME}: it is not a transformers checkpoint")
    fields = read_json_object(path)
    check_config_fields(fields, path)
    return fields


def read_config(source: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """Read the config of a checkpoint directory or Hub id, checked as untrusted input."""
    directory = Path(source).expanduser()
    checkpoint: str | Path = directory if directory.is_dir() else str(source)
    try:
        if not directory.is_dir():
            config_path = cached_file(str(source), CONFIG_NAME, revision=revision)
            assert config_path is not None
            directory = Path(config_path).parent
        read_config_fields(directory)
        return AutoConfig.from_pretrained(checkpoint, revision=revision, trust_remote_code=False)
    except PosEncError:
        raise
    except Exception as error:  # config constructors raise many kinds of errors for wrong types
        hint = "" if isinstance(checkpoint, Path) else " (not a local directory, so it was looked up on the Hub)"
        raise PosEncError(f"Cannot read the config of {source}{hint}: {truncate_repr(error, str)}") from error


@dataclasses.dataclass(frozen=True)
class Shard:
    """A valid safetensors file: its tensors by name, on the meta device, and its metadata."""

    path: Path
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Read the header of a file. Raises `PosEncError` if the file is missing, damaged or incomplete."""
        if not path.is_file():
            raise PosEncError(f"{path} is missing" if not path.exists() else f"{path} is not a file")
        tensors = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    header = file.get_slice(name)
                    # Quantized formats such as F4 are not in the table; their shapes are enough to link or list them.
                    dtype = str_to_torch_dtype.get(header.get_dtype(), torch.uint8)
                    tensors[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
                return cls(path, tensors, file.metadata() or {})
        except (SafetensorError, OSError, RuntimeError) as error:  # torch refuses shapes that overflow
            raise PosEncError(f"{path} is damaged, incomplete or not a safetensors file: {error}") from error


def read_shards(directory: Path) -> tuple[Shard, ...]:
    """Read the headers of a checkpoint's shards. Raises `PosEncError` if any is missing or damaged."""
    if (directory / SAFE_WEIGHTS_NAME).is_file():  # transformers also prefers the single file if both exist
        return (Shard.open(directory / SAFE_WEIGHTS_NAME),)
    index_path = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index_path.is_file():
        pickles = list_pickles(directory)
        warning = f" Found {pickles[0]}, a pickle, which can run arbitrary code when loaded." if pickles else ""
        raise PosEncError(
            f"{directory} has no {SAFE_WEIGHTS_NAME}; only safetensors are supported.{warning} If you trust it, load "
            "it and save it again with save_pretrained"
        )
    index = read_json_object(index_path)
    try:
        weight_map, metadata = index["weight_map"], index["metadata"]
        files = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise PosEncError(f"{index_path} is not an index of shards: {error!r}") from None
    if not isinstance(metadata, dict):  # transformers adds entries to it
        raise PosEncError(f"{index_path} is not an index of shards: its metadata is {truncate_repr(metadata)}")
    if any(not isinstance(name, str) or Path(name).name != name for name in files):
        raise PosEncError(f"{index_path} lists files outside of {directory}")
    shards = {name: Shard.open(directory / name) for name in files}
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise PosEncError(f"{index_path} lists tensor {name!r} in {file}, which does not contain it")
    return tuple(shards.values())


def merge_tensors(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """The tensors of all shards by name, on the meta device."""
    return {name: tensor for shard in shards for name, tensor in shard.tensors.items()}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened: its architecture is supported and all its shards are valid."""

    directory: Path
    config: PreTrainedConfig
    architecture: Architecture
    shards: tuple[Shard, ...]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, on the meta device."""
        return merge_tensors(self.shards)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype of most parameters."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.numel()
        return next((dtype for dtype, _ in sizes.most_common() if dtype in FLOAT_DTYPES), torch.float32)


def find_checkpoint(
    source: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    patterns: Sequence[str] = (*WEIGHT_FILES, *COMPANION_FILES),
) -> Path:
    """The directory of a checkpoint. Of a Hub id, the files that match the patterns are downloaded first."""
    try:
        directory = Path(source).expanduser()
        if directory.is_dir():
            return directory
        if directory.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
            raise PosEncError(f"{source} is not a directory; expected a checkpoint directory or a Hub id")
        with translate_hub_errors(str(source)):
            files = list(patterns)
            return Path(snapshot_download(str(source), revision=revision, token=token, allow_patterns=files))
    except (OSError, RuntimeError) as error:  # RuntimeError: an unknown home directory
        raise PosEncError(f"{source} cannot be read: {error}") from error


def open_stock(source: str | Path, revision: str | None, token: str | bool | None) -> Checkpoint:
    """Open a stock checkpoint, a directory or Hub id. Raises `PosEncError` if it cannot be converted."""
    directory = find_checkpoint(source, revision, token)
    try:
        check_checkpoint_links(directory)
        fields = read_config_fields(directory)
        model_type = fields["model_type"]
        if model_type.startswith(VARIANT_PREFIX):
            scheme = truncate_repr(fields.get("position_scheme"), json.dumps)
            base_model = truncate_repr(fields.get(BASE_MODEL_KEY, "the original checkpoint"), str)
            raise PosEncError(
                f"{source} is already a variant, with position scheme {scheme}. Convert {base_model} instead"
            )
        if model_type not in ARCHITECTURES:
            raise refuse(model_type, source)
        config = read_config(directory)
        if isinstance(config, VariantConfig):  # position_embedding_type of transformers 4
            raise PosEncError(
                f"{source} uses relative positions of transformers 4. Load it with from_pretrained and save it with "
                "save_pretrained, which makes it a 'shaw' variant"
            )
        return Checkpoint(directory, config, ARCHITECTURES[model_type], read_shards(directory))
    except OSError as error:
        raise PosEncError(f"{source} cannot be read: {error}") from error
