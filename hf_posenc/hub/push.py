"""Push variants to the Hub: exactly the files that belong to them, in one commit, with a model card."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoints import (
    RUN_STATE_FILE,
    companion_files,
    read_config,
    read_config_fields,
    read_json_object,
    read_shards,
    translate_hub_errors,
)
from ..config import REMOTE_CODE_MODULE, VariantConfig, write_remote_code_module
from ..errors import PosEncError
from ..model_types import VARIANT_PREFIX
from .model_card import CARD_FILE, CardContent, is_replaceable, list_tags, read_local_card, write_card
from .repository import Repository

FOREIGN_WEIGHTS = (".npy", ".npz", ".h5", ".msgpack")
"""Suffixes of weights in formats that a push leaves out, as it does pickles."""


@dataclasses.dataclass(frozen=True)
class PushResult:
    """The result of `push_directory`.

    Attributes:
        repo_id: The repository.
        revision: The branch, or the reference of the pull request.
        commit: The commit hash.
        url: The page of the commit.
        files: Files of the commit.
        removed: Weight files of an earlier push that were deleted.
        card: Whether the card was generated, is the README.md of the directory, or was left as it is on the Hub.
        pull_request: The page of the pull request, if there is one.
    """

    repo_id: str
    revision: str
    commit: str
    url: str
    files: tuple[str, ...]
    removed: tuple[str, ...]
    card: Literal["generated", "local", "remote"]
    pull_request: str | None = None

    def __str__(self) -> str:
        card = {"generated": "generated", "local": f"the directory's {CARD_FILE}", "remote": "unchanged on the Hub"}
        lines = [f"{self.repo_id} ({self.revision}) at {self.url}", *(f"  {name}" for name in self.files)]
        lines += [f"  removed: {name}" for name in self.removed]
        return "\n".join([*lines, f"  model card: {card[self.card]}"])


def push_directory(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    base_model: str | None = None,
    force: bool = False,
    token: str | bool | None = None,
) -> PushResult:
    """Push a saved variant to the Hub in one commit, with a model card.

    Uploads the config, weights, tokenizer and generation files, and the shim for remote code; training checkpoints and
    other files are left out. A model card that somebody wrote is never replaced.

    Args:
        directory: The directory of the variant.
        repo_id: The repository, such as `user/model`; created if it does not exist.
        private: Create a private repository; refuse one that is public.
        revision: The branch; created if it does not exist. Defaults to main.
        message: The commit message.
        create_pr: Open a pull request instead of committing to the branch.
        base_model: Hub id of the stock checkpoint, if the variant does not record it.
        force: Overwrite a repository that contains something other than a variant.
        token: A Hub token; by default the stored one.

    Returns:
        What was committed.

    Raises:
        PosEncError: If the directory is not a complete variant, or the Hub refuses the push.

    Example:
        >>> hf_posenc.push_directory("gpt2-rope", "me/gpt2-rope", private=True)
    """
    directory = Path(directory).expanduser()
    config = _read_variant(directory)
    scheme = " + ".join(spec.name for spec in config.position_specs)
    message = message or f"Upload variant with position scheme {scheme}"
    try:
        if base_model is not None:
            validate_repo_id(base_model)
    except HFValidationError:
        raise PosEncError(f"base_model must be a Hub id such as openai-community/gpt2, got {base_model!r}") from None
    local_card = read_local_card(directory)
    with translate_hub_errors(repo_id):
        created = HfApi(token=token, library_name="hf_posenc").create_repo(repo_id, private=private, exist_ok=True)
        repository = Repository.open(created.repo_id, revision, token, create_pr)
        _check_repository(repository, private, force)
        remote_card = repository.read_card()
    card_source: Literal["generated", "local", "remote"] = "generated"
    if not is_replaceable(local_card):
        card_source = "local"
    elif not is_replaceable(remote_card):
        card_source = "remote"
    else:
        recorded = [card.data.get("base_model") for card in (local_card, remote_card) if card is not None]
        base_model = base_model or config.base_model or next((name for name in recorded if name), None)
        content = CardContent(repository.repo_id, config, directory, base_model, revision)
        write_card(content, remote_card, local_card)
    write_remote_code_module(type(config), directory)
    files = _variant_files(directory)
    if card_source == "remote":
        files.pop(CARD_FILE, None)
    with translate_hub_errors(repository.repo_id):
        commit = repository.commit(files, message, create_pr=create_pr)
    return PushResult(
        repo_id=repository.repo_id,
        revision=commit.pr_revision or revision or "main",
        commit=commit.oid,
        url=commit.commit_url,
        files=tuple(sorted(files)),
        removed=tuple(repository.stale_weights(set(files))),
        card=card_source,
        pull_request=commit.pr_url,
    )


def _read_variant(directory: Path) -> VariantConfig:
    """Check that a directory contains a complete variant, and read its config."""
    model_type = read_config_fields(directory)["model_type"]
    if not model_type.startswith(VARIANT_PREFIX):
        raise PosEncError(
            f"{directory} contains a {model_type!r} model without a position scheme: use `hf-posenc convert` first, or "
            "push it unchanged with `hf upload`"
        )
    run_state = directory / RUN_STATE_FILE
    if run_state.is_file() and not read_json_object(run_state).get("finished"):
        raise PosEncError(f"{directory} contains an unfinished training run: rerun the same command to resume it")
    config = read_config(directory)
    assert isinstance(config, VariantConfig)
    read_shards(directory)
    return config


def _check_repository(repository: Repository, private: bool | None, force: bool) -> None:
    if private and not repository.private:
        raise PosEncError(
            f"{repository.repo_id} already exists and is public (nothing was pushed): make it private, or use another"
        )
    config = repository.read_text(CONFIG_NAME)
    if config is None or force:
        return
    try:
        model_type = json.loads(config).get("model_type")
    except (json.JSONDecodeError, AttributeError):
        model_type = None
    if not str(model_type).startswith(VARIANT_PREFIX):
        raise PosEncError(
            f"{repository.repo_id} contains a {model_type!r} model that is not a variant. Push to another repository "
            "or --revision, or overwrite it with force=True (--force)"
        )


def _variant_files(directory: Path) -> dict[str, Path]:
    """The files that belong to a variant, by their names in the repository."""
    names = [CONFIG_NAME, CARD_FILE, f"{REMOTE_CODE_MODULE}.py", *(shard.path.name for shard in read_shards(directory))]
    if SAFE_WEIGHTS_NAME not in names:
        names.append(SAFE_WEIGHTS_INDEX_NAME)
    names += [path.as_posix() for path in companion_files(directory) if path.suffix not in FOREIGN_WEIGHTS]
    return {name: directory / name for name in names if (directory / name).is_file()}


def upload_saved_model(
    directory: Path,
    repo_id: str,
    timestamps: dict[str, float],
    message: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    revision: str | None = None,
    description: str | None = None,
) -> CommitInfo:
    """The upload of `model.push_to_hub`, with a card for the variant and without stale shards.

    Files that have not changed since `timestamps`, from before the model was saved, are not uploaded.
    """
    repository = Repository.open(repo_id, revision, token, create_pr)
    changed = [path for path in sorted(directory.iterdir()) if os.path.getmtime(path) > timestamps.get(path.name, -1)]
    files = {path.relative_to(directory).as_posix(): path for entry in changed for path in _files_under(entry)}
    saved_card, remote_card = read_local_card(directory), repository.read_card()
    assert saved_card is not None
    if is_replaceable(remote_card):
        config = read_config(directory)
        assert isinstance(config, VariantConfig)
        recorded = None if remote_card is None else remote_card.data.get("base_model")
        # Metric files in the directory were not measured on the model as it is now, so the card shows none.
        base_model = config.base_model or recorded
        content = CardContent(repo_id, config, directory, base_model, revision, has_metrics=False)
        write_card(content, remote_card, tags=list_tags(saved_card))
        files[CARD_FILE] = directory / CARD_FILE
    elif remote_card is not None and remote_card.text.strip() != saved_card.text.strip():
        files.pop(CARD_FILE, None)  # the card of another branch
    return repository.commit(files, message or "Upload model", description, create_pr)


def _files_under(path: Path) -> list[Path]:
    return [path] if path.is_file() else [child for child in sorted(path.iterdir()) if child.is_file()]
