"""Load models and tokenizers from checkpoints that others made: from safetensors only, and without running their code.

Every command that builds a model from a directory or a Hub id does it through `load_model`. What is loaded does not
name code of its author any more, so that it can be saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from ..errors import PosEncError
from ..patches import find_architecture
from ..patches.compat import set_checkpoint_name
from ..validation import check_json_limits, truncate_repr
from .companions import remove_code_fields
from .files import COMPANION_FILES, TOKENIZER_FILES
from .inspection import POOLER, check_base_weights, without_warnings
from .source import find_checkpoint, merge_tensors, read_config, read_shards

ADAPTER_CONFIG = "adapter_config.json"
NESTED_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_LIMITS = (16, 5_000_000, 10_000_000)
"""Depth, values and length of a string: added tokens can be many, and chat templates long."""


def load_model(
    source: str | Path, auto_class: str = "AutoModel", revision: str | None = None, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a checkpoint with the checks of `convert_checkpoint`: its config, its weight files, and that both agree.

    Args:
        source: A checkpoint directory or a Hub id. Only safetensors are read.
        auto_class: The Auto class to load it with, such as "AutoModelForCausalLM".
        revision: Branch, tag or commit of a Hub id.
        **options: More arguments of `from_pretrained`, such as `dtype` or `position_scheme`. A new scheme records a Hub
            id as the base model, as `from_pretrained` does.

    Returns:
        The model in eval mode, and the names of its weights that the checkpoint lacks; a missing pooler is normal.

    Raises:
        PosEncError: If the checkpoint is damaged, too large, or needs a pickle or code of its own.
    """
    directory = find_checkpoint(source, revision)
    _check_files(directory)
    options |= {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    with _load_errors(source), without_warnings():
        model, info = getattr(transformers, auto_class).from_pretrained(directory, **options)
    if directory != Path(source).expanduser():  # a copy in the cache, which is not where it came from
        if "position_scheme" in options:
            model.config.record_base_model(source)
        else:
            set_checkpoint_name(model, str(source), str(source))
    remove_code_fields(vars(model.config))
    return model.eval(), sorted(name for name in info["missing_keys"] if not name.startswith(POOLER))


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Put a model in eval mode inside the block, and back into the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def load_tokenizer(source: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint without running its code; None if it has no tokenizer files."""
    directory = find_checkpoint(source, revision, patterns=(CONFIG_NAME, *COMPANION_FILES))
    if not any(path.is_file() for pattern in TOKENIZER_FILES for path in directory.glob(pattern)):
        return None
    with _load_errors(f"the tokenizer of {source}"), without_warnings():
        for path in (directory / name for name in NESTED_FILES):
            if path.is_file():  # transformers reads them recursively
                check_json_limits(json.loads(path.read_text(encoding="utf-8")), path.name, *TOKENIZER_LIMITS)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    remove_code_fields(tokenizer.init_kwargs)
    return tokenizer


def _check_files(directory: Path) -> None:
    """Refuse weights that do not fit config.json, and adapters, which name another checkpoint to load."""
    config, shards = read_config(directory), read_shards(directory)
    if (directory / ADAPTER_CONFIG).exists():
        raise PosEncError(
            f"{directory} contains a PEFT adapter ({ADAPTER_CONFIG}): load it, merge it with merge_and_unload, and "
            "save the result with save_pretrained"
        )
    if find_architecture(config) is not None:
        check_base_weights(config, merge_tensors(shards))


@contextmanager
def _load_errors(name: str | Path) -> Iterator[None]:
    """Raise everything that transformers raises for files it cannot load as `PosEncError`."""
    try:
        yield
    except PosEncError:
        raise
    except Exception as error:  # damaged files raise all kinds of errors, RecursionError among them
        message = str(error).split("Model type should be")[0].strip()  # followed by a list of all model types
        if "trust_remote_code" in message:
            message = "it needs code of its author, which is never run; use a checkpoint that transformers supports"
        raise PosEncError(f"Cannot load {name}: {truncate_repr(message, str)}") from error
