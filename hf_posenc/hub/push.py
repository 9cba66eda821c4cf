"""Push a variant's directory to the Hub: what belongs to it and nothing else, whole, and with a card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoints.config_file import read_config, read_fields, read_json
from ..checkpoints.file_names import COMPANION_FILES
from ..checkpoints.shards import Shard, read_shards
from ..config import REMOTE_CODE_MODULE, VariantConfig, write_remote_code_module
from ..model_types import VARIANT_PREFIX
from .card import card_of
from .readme import README, Readme
from .troubles import told_what_to_do
from .upload import Remote, subject_in, write_readme

NOTE = "run.json"
"""What a training run leaves in its directory."""
NEVER = (
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".joblib",
    ".npy",
    ".npz",
    ".h5",
    ".safetensors",
    ".msgpack",
)
"""Endings of weights and of pickles, which no file of a tokenizer has."""


@dataclasses.dataclass(frozen=True)
class Pushed:
    """What a push did."""

    repo: str
    revision: str
    commit: str
    url: str
    files: tuple[str, ...]
    removed: tuple[str, ...]
    """Weights of an earlier push, in other shards."""
    card: Literal["generated", "yours", "theirs"]
    """Whether the card was generated, is the directory's own, or that of the repo, which somebody wrote."""
    pull_request: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.repo} ({self.revision}) at {self.url}", *(f"  {name}" for name in self.files)]
        lines += [f"  removed: {name}" for name in self.removed]
        told = {
            "generated": "its card was generated",
            "yours": f"its card is the {README} of the directory",
            "theirs": "its card is left as it was: somebody wrote it",
        }
        return "\n".join([*lines, f"  {told[self.card]}"])


def push_directory(
    directory: str | Path,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    base_model: str | None = None,
    force: bool = False,
    token: str | bool | None = None,
) -> Pushed:
    """Push the variant in a directory to a repo of the Hub, which is made if it is not there.

    Config, weights, tokenizer and generation files go there, the shim for remote code, and a card; no checkpoints of
    a run, nor anything else that lies beside. All of it comes in one commit, to the branch `revision` if one is named,
    as a pull request with `create_pr`. The card is written to README.md, unless somebody wrote one, here or there.
    `base_model` is the Hub id of the stock checkpoint, where the variant does not know it. A repo that holds something
    else than a variant is overwritten with `force` only. Raises ValueError for what cannot be done.
    """
    directory = Path(directory).expanduser()
    config, shards = _variant_in(directory)
    _check_base_model(base_model)
    mine = _read_readme(directory)
    with told_what_to_do(repo):
        from huggingface_hub import HfApi

        made = HfApi(token=token, library_name="hf_posenc").create_repo(repo, private=private, exist_ok=True)
        remote = Remote.look(made.repo_id, revision, token, create_pr)
        _refuse_place(remote, private, force)
        theirs = remote.readme()
    kind: Literal["generated", "yours", "theirs"] = "generated"
    if mine is not None and not mine.may_be_replaced:
        kind = "yours"
    elif theirs is not None and not theirs.may_be_replaced:
        kind = "theirs"
    else:
        known = [readme for readme in (theirs, mine) if readme is not None]
        named = [readme.metadata["base_model"] for readme in known if readme.metadata.get("base_model")]
        base = base_model or config.base_model or (str(named[-1]) if named else None)
        subject = subject_in(directory, remote.repo, config, base, revision)
        write_readme(directory, card_of(subject).with_metadata_of(*known))
    write_remote_code_module(type(config), directory)
    files = _files_of(directory, shards)
    if kind == "theirs":
        files.pop(README, None)
    scheme = json.dumps(config.position_scheme)
    with told_what_to_do(remote.repo):
        done = remote.commit(files, message or f"Upload the variant with position scheme {scheme}", None, create_pr)
    return Pushed(
        repo=remote.repo,
        revision=done.pr_revision or revision or "main",
        commit=done.oid,
        url=done.commit_url,
        files=tuple(sorted(files)),
        removed=tuple(remote.left_over(set(files))),
        card=kind,
        pull_request=done.pr_url,
    )


def _variant_in(directory: Path) -> tuple[Any, tuple[Shard, ...]]:
    """The config and shards of a directory that holds a whole variant; ValueError for any other."""
    if not (directory / CONFIG_NAME).is_file():
        raise ValueError(f"{directory} has no {CONFIG_NAME}: name the directory that a variant was saved to")
    model_type = read_fields(directory)["model_type"]
    if not model_type.startswith(VARIANT_PREFIX):
        raise ValueError(
            f"{directory} holds a {model_type!r} model without a position scheme: make a variant of it with `hf-posenc "
            "convert`, or push it as it is with `hf upload`"
        )
    note = directory / NOTE
    if note.is_file() and not read_json(note).get("finished"):
        raise ValueError(f"{directory} holds a training run that is not finished: ask for it again to go on with it")
    config = read_config(directory)
    assert isinstance(config, VariantConfig)
    config.position_specs  # noqa: B018
    return config, read_shards(directory)


def _check_base_model(name: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if name is not None:
            validate_repo_id(name)
    except HFValidationError:
        raise ValueError(f"base_model is a Hub id such as 'openai-community/gpt2', not {name!r}") from None


def _read_readme(directory: Path) -> Readme | None:
    path = directory / README
    return Readme.read(path.read_text(encoding="utf-8")) if path.is_file() else None


def _refuse_place(remote: Remote, private: bool | None, force: bool) -> None:
    if private and not remote.private:
        raise ValueError(
            f"{remote.repo} is there already and public, so that nothing was pushed: make it private on the Hub, or "
            "take another name"
        )
    config = remote.text_of(CONFIG_NAME)
    if config is None or force:
        return
    try:
        model_type = json.loads(config).get("model_type")
    except (json.JSONDecodeError, AttributeError):
        model_type = None
    if not str(model_type).startswith(VARIANT_PREFIX):
        raise ValueError(
            f"{remote.repo} holds a {model_type!r} model that is no variant, and a push would take its place: name "
            "another repo or a --revision, or pass force=True (--force)"
        )


def _files_of(directory: Path, shards: tuple[Shard, ...]) -> dict[str, Path]:
    """By their names in the repo, the files that belong to the variant and that are there."""
    names = [CONFIG_NAME, README, f"{REMOTE_CODE_MODULE}.py", *(shard.path.name for shard in shards)]
    if SAFE_WEIGHTS_NAME not in names:
        names.append(SAFE_WEIGHTS_INDEX_NAME)
    found = [path for pattern in COMPANION_FILES for path in directory.glob(pattern) if path.suffix not in NEVER]
    files = {path.relative_to(directory).as_posix(): path for path in [*found, *(directory / name for name in names)]}
    return {name: path for name, path in files.items() if path.is_file()}
