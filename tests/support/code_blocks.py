"""The code blocks of a document, each of one kind. A block of no kind is an error: it would be run by nobody."""

from __future__ import annotations

import dataclasses
import enum
import re
import shlex

FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = ("hf-posenc", "accelerate", "lm_eval", "pip", "make")


class Kind(enum.Enum):
    PYTHON = "python: run with the page's other blocks, in their order, as the cells of a notebook"
    PRINTED = "no language, right behind python: what that prints, to the letter"
    COMMANDS = f"no language, every line begins with one of {', '.join(COMMANDS)}: run line by line"
    FILE = "yaml, with the file's name as a comment in its first line: written beside the page"


@dataclasses.dataclass(frozen=True)
class Block:
    kind: Kind
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    found: list[Block] = []
    end = 0
    for match in FENCED.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        follows = bool(found) and found[-1].kind is Kind.PYTHON and not page[end : match.start()].strip()
        kind = _kind(match[1].strip(), match[2], follows)
        if kind is None:
            kinds = "\n".join(f"- {kind.value}" for kind in Kind)
            raise ValueError(f"the block in line {line} is of no kind that is tested; there are:\n{kinds}")
        found.append(Block(kind, match[2], line))
        end = match.end()
    if page.count("\n```") + page.startswith("```") != 2 * len(found):
        raise ValueError("a block is not closed, or begins in the middle of a line")
    return found


def _kind(language: str, text: str, follows_python: bool) -> Kind | None:
    if language == "python":
        return Kind.PYTHON
    if language == "yaml" and re.match(r"# [\w.-]+\.ya?ml\n", text):
        return Kind.FILE
    if language:
        return None
    if all(line.split(maxsplit=1)[0] in COMMANDS for line in text.splitlines() if line.strip()):
        return Kind.COMMANDS
    return Kind.PRINTED if follows_python else None


def lines_of(block: Block) -> list[list[str]]:
    """The commands of a block, as a shell would take them apart; what stands behind a # is left out."""
    return [words for line in block.text.splitlines() if (words := shlex.split(line, comments=True))]
