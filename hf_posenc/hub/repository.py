"""A model repository on the Hub. Every push is a single commit, so a reader sees the old variant or the new one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import HfHubHTTPError

from .model_card import CARD_FILE, parse_card

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
"""Files that from_pretrained reads. Left over from an earlier push, they could be read instead of the new ones."""


@dataclasses.dataclass(frozen=True)
class Repository:
    """The state of one branch of a repository when it was read."""

    api: HfApi
    repo_id: str
    revision: str | None
    head: str
    files: frozenset[str]
    private: bool

    @classmethod
    def open(
        cls, repo_id: str, revision: str | None = None, token: str | bool | None = None, create_pr: bool = False
    ) -> Repository:
        """Read an existing repository, creating the branch if needed."""
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

    def read_text(self, name: str) -> str | None:
        """The content of a file, or None if it does not exist."""
        if name not in self.files:
            return None
        path = self.api.hf_hub_download(self.repo_id, name, revision=self.head)
        return Path(path).read_text(encoding="utf-8-sig")

    def read_card(self) -> RepoCard | None:
        return parse_card(self.read_text(CARD_FILE))

    def stale_weights(self, new_files: set[str]) -> list[str]:
        """Weight files that a push of these files would leave behind; none if it pushes no weights."""
        if not any(map(WEIGHTS.fullmatch, new_files)):
            return []
        return sorted(name for name in self.files - new_files if WEIGHTS.fullmatch(name))

    def commit(
        self, files: dict[str, Path], message: str, description: str | None = None, create_pr: bool = False
    ) -> CommitInfo:
        """Add files and delete stale weights. The Hub refuses it if the branch has changed since it was read."""
        added = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
        deleted = [CommitOperationDelete(name, is_folder=False) for name in self.stale_weights(set(files))]
        return self.api.create_commit(
            self.repo_id,
            [*added, *deleted],
            commit_message=message,
            commit_description=description,
            revision=self.revision,
            create_pr=create_pr,
            parent_commit=self.head,
        )
