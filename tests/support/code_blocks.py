"""Parse the fenced code blocks of a page. A block of unknown kind is an error, since no test would run it."""

from __future__ import annotations

import dataclasses
import enum
import re
import shlex

FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("hf-posenc", "accelerate", "lm_eval", "pip", "make")


class Kind(enum.Enum):
    PYTHON = "python: run in order with the other Python blocks of the page, like the cells of a notebook"
    OUTPUT = "no language, directly after a Python block: exactly what that block prints"
    COMMANDS = f"no language or bash, every line starts with one of {', '.join(PROGRAMS)}: run line by line"
    FILE = "yaml, with the file name as a comment in the first line: written to the current directory"


@dataclasses.dataclass(frozen=True)
class Block:
    kind: Kind
    text: str
    line: int


def parse_blocks(page: str) -> list[Block]:
    """Return all fenced blocks of a page in order."""
    blocks: list[Block] = []
    end = 0
    for match in FENCED.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        after_python = bool(blocks) and blocks[-1].kind is Kind.PYTHON and not page[end : match.start()].strip()
        kind = _kind(match[1].strip(), match[2], after_python)
        if kind is None:
            kinds = "\n".join(f"- {kind.value}" for kind in Kind)
            raise ValueError(f"the block at line {line} is of unknown kind; expected one of\n{kinds}")
        blocks.append(Block(kind, match[2], line))
        end = match.end()
    if page.count("\n```") + page.startswith("```") != 2 * len(blocks):
        raise ValueError("a block is not closed or does not start at the beginning of a line")
    return blocks


def _kind(language: str, text: str, after_python: bool) -> Kind | None:
    if language == "python":
        return Kind.PYTHON
    if language == "yaml" and re.match(r"# [\w.-]+\.ya?ml\n", text):
        return Kind.FILE
    if language not in ("", "bash", "text"):
        return None
    commands = [line.split(maxsplit=1)[0] for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if language != "text" and commands and all(program in PROGRAMS for program in commands):
        return Kind.COMMANDS
    return Kind.OUTPUT if after_python and language != "bash" else None


def parse_commands(block: Block) -> list[list[str]]:
    """Split the commands of a block as a shell would, without comments."""
    return [words for line in block.text.splitlines() if (words := shlex.split(line, comments=True))]
