"""Files to a repo of the Hub in one commit, so that it holds the old variant or the new one and nothing between."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import CONFIG_NAME

from ..checkpoints.shards import read_shards
from ..config import VariantConfig
from .card import Subject, card_of
from .figures import Figures
from .readme import README, Readme

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
"""What from_pretrained reads. Left over from an earlier push in other shards, it would be read instead of the new."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """A repo as it was when we looked: a branch of it, its last commit and its files."""

    api: Any
    repo: str
    revision: str | None
    head: str
    files: frozenset[str]
    private: bool

    @classmethod
    def look(cls, repo: str, revision: str | None = None, token: Any = None, create_pr: bool = False) -> Remote:
        """Look at a repo that is there; a branch that is not is made."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        api = HfApi(token=token, library_name="hf_posenc")
        if revision is not None and not revision.startswith("refs/pr"):
            try:
                api.create_branch(repo, branch=revision, exist_ok=True)
            except HfHubHTTPError as error:  # whoever may only propose cannot make branches; it may be there
                if not (create_pr and error.response.status_code == 403):
                    raise
        found = api.model_info(repo, revision=revision or "main")
        files = frozenset(sibling.rfilename for sibling in found.siblings or [])
        return cls(api, repo, revision, str(found.sha), files, bool(found.private))

    def text_of(self, name: str) -> str | None:
        """What a file says there, or None if there is none."""
        if name not in self.files:
            return None
        return Path(self.api.hf_hub_download(self.repo, name, revision=self.head)).read_text(encoding="utf-8")

    def readme(self) -> Readme | None:
        text = self.text_of(README)
        return None if text is None else Readme.read(text)

    def left_over(self, names: set[str]) -> list[str]:
        """Weights that are there and would not belong to these files: only if weights are among them."""
        if not any(map(WEIGHTS.fullmatch, names)):
            return []
        return sorted(name for name in self.files - names if WEIGHTS.fullmatch(name))

    def commit(
        self, files: dict[str, Path], message: str, description: str | None = None, create_pr: bool = False
    ) -> Any:
        """Put files there and take leftover weights away. Refused by the Hub if it has changed since we looked."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        added = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
        removed = [CommitOperationDelete(name, is_folder=False) for name in self.left_over(set(files))]
        return self.api.create_commit(
            self.repo,
            [*added, *removed],
            commit_message=message,
            commit_description=description,
            revision=self.revision,
            create_pr=create_pr,
            parent_commit=self.head,
        )


def subject_in(directory: Path, repo: str, config: Any, base_model: str | None, revision: str | None) -> Subject:
    """What the card of the variant in a directory is about."""
    tensors = {name: entry.numbers for shard in read_shards(directory) for name, entry in shard.entries.items()}
    branch = None if revision is None or revision == "main" or revision.startswith("refs/") else revision
    return Subject(repo, config, tensors, Figures.read(directory), base_model, branch)


def write_readme(directory: Path, readme: Readme) -> None:
    """In whole or not at all."""
    beside = directory / f".{README}.new"
    beside.write_text(str(readme), encoding="utf-8")
    beside.replace(directory / README)


def upload_saved(
    directory: Path,
    repo: str,
    times_before: dict[str, float],
    message: str | None = None,
    token: Any = None,
    create_pr: bool = False,
    revision: str | None = None,
    description: str | None = None,
) -> Any:
    """What `model.push_to_hub` does once the model is saved: upload what is new in the directory, with a card.

    transformers has put a card there: that of the repo, or a form to be filled in where there is none yet.
    """
    remote = Remote.look(repo, revision, token, create_pr)
    changed = [
        path
        for path in sorted(directory.iterdir())
        if path.name not in times_before or os.path.getmtime(path) > times_before[path.name]
    ]
    files = {path.relative_to(directory).as_posix(): path for top in changed for path in _files_in(top)}
    put, there = Readme.read((directory / README).read_text(encoding="utf-8")), remote.readme()
    if there is None or there.may_be_replaced:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        assert isinstance(config, VariantConfig)
        known = there or Readme({}, "")
        subject = subject_in(directory, repo, config, config.base_model or known.metadata.get("base_model"), revision)
        # Nothing that lies beside was measured on the model as it is now.
        card = card_of(dataclasses.replace(subject, figures=Figures()))
        write_readme(directory, card.with_metadata_of(known, Readme({"tags": put.metadata.get("tags")}, "")))
        files[README] = directory / README
    elif there.text.strip() != put.text.strip():
        files.pop(README, None)  # the card of another branch
    return remote.commit(files, message or "Upload model", description, create_pr)


def _files_in(path: Path) -> list[Path]:
    return [path] if path.is_file() else [inside for inside in sorted(path.iterdir()) if inside.is_file()]


def holds_variant(directory: Path) -> bool:
    """Whether a whole variant was saved there, and not an adapter alone."""
    return (directory / CONFIG_NAME).is_file() and any(directory.glob("*.safetensors"))
