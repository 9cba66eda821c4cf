"""Push variants to the Hub: exactly the files that belong to them, in one commit, with a model card."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import HfHubHTTPError
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoints import (
    RUN_STATE_FILE,
    Companions,
    check_links,
    lock_output,
    read_config,
    read_config_fields,
    read_json_object,
    read_shards,
    remove_code_fields,
    to_json_bytes,
    translate_hub_errors,
)
from ..config import REMOTE_CODE_MODULE, VariantConfig, is_hub_id, write_remote_code_module
from ..errors import PosEncError
from ..model_types import VARIANT_PREFIX
from .model_card import CARD_FILE, METRIC_FILES, NEW_CARD_FILE, is_replaceable, list_tags, read_card, write_card

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
"""Files that from_pretrained reads. Left over from an earlier push, they could be read instead of the new ones."""


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
        left_out: Code and pickles of the directory, and fields of its JSON files that name code.
        pull_request: The page of the pull request, if there is one.
    """

    repo_id: str
    revision: str
    commit: str
    url: str
    files: tuple[str, ...]
    removed: tuple[str, ...]
    card: Literal["generated", "local", "remote"]
    left_out: tuple[str, ...] = ()
    pull_request: str | None = None

    def __str__(self) -> str:
        card = {"generated": "generated", "local": f"the directory's {CARD_FILE}", "remote": "unchanged on the Hub"}
        lines = [f"{self.repo_id} ({self.revision}) at {self.url}", *(f"  {name}" for name in self.files)]
        lines += [f"  removed: {name}" for name in self.removed]
        lines += [f"  left out: {name}" for name in self.left_out]
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
        PosEncError: If the directory is not a complete variant, another process writes it, or the Hub refuses the push.

    Example:
        >>> hf_posenc.push_directory("gpt2-rope", "me/gpt2-rope", private=True)
    """
    directory = Path(directory).expanduser()
    if not directory.is_dir():
        raise PosEncError(f"{directory} is not a directory; expected one that contains a variant")
    with lock_output(directory):  # the card and the shim for remote code are written into it
        config = _read_variant(directory)
        if base_model is not None and not is_hub_id(base_model):
            raise PosEncError(f"base_model must be a Hub id such as openai-community/gpt2, got {base_model!r}")
        companions = Companions.read(directory)
        local_card = read_card(directory / CARD_FILE)
        with translate_hub_errors(repo_id):
            repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
            branch = Branch.open(repo_id, revision, token, create_pr)
            _check_overwrite(branch, private, force)
            remote_card = branch.read_card()
        write_remote_code_module(type(config), directory)
        card: Literal["generated", "local", "remote"] = "generated"
        if not is_replaceable(local_card):
            card = "local"
        elif not is_replaceable(remote_card):
            card = "remote"
        else:
            write_card(directory, config, repo_id, (remote_card, local_card), base_model, revision)
        files, removed = _list_files(directory, with_card=card != "remote")
        files |= companions.files
        scheme = " + ".join(spec.name for spec in config.position_specs)
        with translate_hub_errors(repo_id):
            message = message or f"Upload variant with position scheme {scheme}"
            commit = branch.commit(files, message, create_pr=create_pr)
    return PushResult(
        repo_id=repo_id,
        revision=commit.pr_revision or revision or "main",
        commit=commit.oid,
        url=commit.commit_url,
        files=tuple(sorted(files)),
        removed=tuple(branch.stale_weights(files)),
        card=card,
        left_out=(*removed, *companions.left_out),
        pull_request=commit.pr_url,
    )


def _list_files(directory: Path, with_card: bool) -> tuple[dict[str, Path | bytes], list[str]]:
    """The files of the variant itself, and the fields that were removed from its config because they name code."""
    names = [CONFIG_NAME, f"{REMOTE_CODE_MODULE}.py", *(shard.path.name for shard in read_shards(directory))]
    names += [] if SAFE_WEIGHTS_NAME in names else [SAFE_WEIGHTS_INDEX_NAME]
    names += [CARD_FILE] if with_card else []
    files: dict[str, Path | bytes] = {name: directory / name for name in names}
    fields = read_config_fields(directory)
    removed = [f"{field} in {CONFIG_NAME}" for field in remove_code_fields(fields)]
    if removed:
        files[CONFIG_NAME] = to_json_bytes(fields)
    return files, removed


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
    branch = Branch.open(repo_id, revision, token, create_pr)
    files = {}
    for path in (*directory.glob("*"), *directory.glob("*/*")):
        name = path.relative_to(directory)
        entry = directory / name.parts[0]
        if path.is_file() and entry.stat().st_mtime > timestamps.get(entry.name, -1):
            files[name.as_posix()] = path
    saved_card, remote_card = read_card(directory / CARD_FILE), branch.read_card()
    assert saved_card is not None
    if is_replaceable(remote_card):
        config = read_config(directory)
        assert isinstance(config, VariantConfig)
        # Metric files in the directory were not measured on the model as it is now.
        tags = list_tags(saved_card)
        write_card(directory, config, repo_id, [remote_card], revision=revision, tags=tags, measured=False)
        files[CARD_FILE] = directory / CARD_FILE
    elif remote_card is not None and remote_card.text.strip() != saved_card.text.strip():
        files.pop(CARD_FILE, None)  # the card of another branch
    check_links(directory, files)
    return branch.commit(files, message or "Upload model", description, create_pr)


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch of a repository, as it was when it was read."""

    api: HfApi
    repo_id: str
    revision: str | None
    head: str
    files: frozenset[str]
    private: bool

    @classmethod
    def open(cls, repo_id: str, revision: str | None, token: str | bool | None, create_pr: bool) -> Branch:
        """Read a branch of an existing repository; create it if needed."""
        api = HfApi(token=token, library_name="hf_posenc")
        if revision is not None and not revision.startswith("refs/pr"):
            try:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            except HfHubHTTPError as error:  # the branch may exist, and a pull request needs no write access
                if not (create_pr and error.response.status_code == 403):
                    raise
        info = api.model_info(repo_id, revision=revision or "main")
        files = frozenset(sibling.rfilename for sibling in info.siblings or [])
        return cls(api, repo_id, revision, str(info.sha), files, bool(info.private))

    def download(self, name: str) -> Path | None:
        """A local copy of a file, or None if it does not exist."""
        return Path(self.api.hf_hub_download(self.repo_id, name, revision=self.head)) if name in self.files else None

    def read_card(self) -> RepoCard | None:
        return read_card(self.download(CARD_FILE))

    def stale_weights(self, new_files: Mapping[str, Path | bytes]) -> list[str]:
        """Weight files that a push of these files would leave behind; none if it pushes no weights."""
        if not any(map(WEIGHTS.fullmatch, new_files)):
            return []
        return sorted(name for name in self.files - new_files.keys() if WEIGHTS.fullmatch(name))

    def commit(
        self, files: Mapping[str, Path | bytes], message: str, description: str | None = None, create_pr: bool = False
    ) -> CommitInfo:
        """Add files and delete stale weights. The Hub refuses it if the branch has changed since it was read."""
        contents = {name: content if isinstance(content, bytes) else str(content) for name, content in files.items()}
        added = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
        deleted = [CommitOperationDelete(name, is_folder=False) for name in self.stale_weights(files)]
        return self.api.create_commit(
            self.repo_id,
            [*added, *deleted],
            commit_message=message,
            commit_description=description,
            revision=self.revision,
            create_pr=create_pr,
            parent_commit=self.head,
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
    shards = [shard.path.name for shard in read_shards(directory)]
    generated = [f"{REMOTE_CODE_MODULE}.py", CARD_FILE, NEW_CARD_FILE]  # written into the directory, never elsewhere
    check_links(directory, [CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, *shards, *generated, *METRIC_FILES])
    return config


def _check_overwrite(branch: Branch, private: bool | None, force: bool) -> None:
    if private and not branch.private:
        raise PosEncError(
            f"{branch.repo_id} already exists and is public (nothing was pushed): make it private, or use another"
        )
    config = branch.download(CONFIG_NAME)
    if config is None or force:
        return
    model_type = read_json_object(config).get("model_type")
    if not str(model_type).startswith(VARIANT_PREFIX):
        raise PosEncError(
            f"{branch.repo_id} contains a {model_type!r} model that is not a variant. Push to another repository "
            "or --revision, or overwrite it with force=True (--force)"
        )
