"""README.md as a card: its metadata, its text, and whether it may be written anew.

A generated text ends with a checksum of itself. One whose checksum holds is replaced at the next push; one that was
edited, or was never generated, is somebody's work and stays. Metadata is merged either way: what we know is set, and
what else is there (a licence, languages) is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

import yaml

README = "README.md"
_METADATA = re.compile(r"\A\ufeff?\s*---[ \t]*\n(.*?)\n?---[ \t]*(?:\n|\Z)", re.DOTALL)
_MARK = re.compile(r"<!-- written by hf_posenc; edited, it is left as it is: ([0-9a-f]{64}) -->\s*\Z")


@dataclasses.dataclass(frozen=True)
class Readme:
    """A card in its two parts."""

    metadata: dict[str, Any]
    text: str

    @classmethod
    def read(cls, content: str) -> Readme:
        content = content.replace("\r\n", "\n")
        found = _METADATA.match(content)
        if found is None:
            return cls({}, content)
        try:
            metadata = yaml.safe_load(found[1]) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"the metadata of {README} is no YAML: {error}") from None
        if not isinstance(metadata, dict):
            raise ValueError(f"the metadata of {README} must be a mapping of names to values")
        return cls(metadata, content[found.end() :])

    @classmethod
    def generated(cls, metadata: dict[str, Any], text: str) -> Readme:
        text = text.strip()
        return cls(
            metadata, f"{text}\n\n<!-- written by hf_posenc; edited, it is left as it is: {_checksum(text)} -->\n"
        )

    @property
    def may_be_replaced(self) -> bool:
        """Whether it has no text, or one that was generated and not edited since."""
        if not self.text.strip():
            return True
        mark = _MARK.search(self.text)
        return mark is not None and mark[1] == _checksum(self.text[: mark.start()])

    def with_metadata_of(self, *others: Readme) -> Readme:
        """What the others have and this one does not, and the tags of all."""
        metadata: dict[str, Any] = {}
        for readme in (*others, self):
            metadata |= readme.metadata
        tags = [tag for readme in (self, *others) for tag in _tags(readme.metadata)]
        return Readme({**metadata, "tags": list(dict.fromkeys(tags))} if tags else metadata, self.text)

    def __str__(self) -> str:
        metadata = yaml.safe_dump(self.metadata, sort_keys=True, allow_unicode=True)
        return f"---\n{metadata}---\n\n{self.text.lstrip()}" if self.metadata else self.text


def _tags(metadata: dict[str, Any]) -> list[str]:
    tags = metadata.get("tags") or []
    return [tags] if isinstance(tags, str) else [str(tag) for tag in tags]


def _checksum(text: str) -> str:
    return hashlib.sha256(text.strip().encode("utf-8")).hexdigest()
