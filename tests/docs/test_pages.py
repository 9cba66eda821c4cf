"""What pages say beside code: links lead somewhere, the API page leaves nothing out, figures are those measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import hf_posenc
from hf_posenc.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


def slug(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, part = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if part:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert part in [slug(heading) for heading in headings], f"{page.name} links to {target}"


def test_the_api_page_has_every_function() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names = [*hf_posenc.__all__, "analysis", "conventions", "evaluation", "models", "patches", "plots", "training"]
    assert [name for name in names if f"`hf_posenc.{name}" not in page] == []


def test_the_api_page_has_every_option() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    sections = {part.split()[1].rstrip("`"): part for part in page.split("\n### `")[1:]}
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        options = [option for one in command.params for option in (*one.opts, *one.secondary_opts)]
        known = [option for option in options if option.startswith("--") and option != "--help"]
        assert [option for option in known if f"`{option}`" not in sections[name]] == [], name
        told = re.findall(r"^\| (`--.*?) \|", sections[name], re.MULTILINE)
        named = {option for cell in told for option in re.findall(r"--[\w-]+", cell)}
        assert named <= set(known), f"{name} has no {sorted(named - set(known))}"


def rows_of(text: str) -> list[list[str]]:
    """The cells of all table rows in a text."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]


def cell_of(text: str, section: str, row: str, column: str) -> str:
    """What stands in a table of a section of benchmarks/RESULTS.md; of a ratio, its median."""
    header, _, *rows = rows_of(text.split(f"### {section}\n")[1].split("\n### ")[0])
    return next(cells for cells in rows if cells[0] == row)[header.index(column)].split(" (")[0]


CHOOSING, RESULTS = (ROOT / name for name in ("docs/choosing.md", "benchmarks/RESULTS.md"))


def test_costs_are_those_measured() -> None:
    page, results = CHOOSING.read_text(), RESULTS.read_text()
    header, _, *rows = rows_of(page.split("## What it costs")[1].split("\n## ")[0])
    sections = {"GPT-2": "decoders", "LLaMA": "llamas", "BERT": "encoders"}
    ways = {"forward": "forward", "training": "training step"}
    checked = 0
    for scheme, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            if cell:
                base, way = column.split()
                row = f"{base} + {scheme.replace('`', '')}"
                assert cell == cell_of(results, f"{sections[base]}: {ways[way]}", row, "n = 1024"), (row, column)
                checked += 1
    assert checked == 28
    for row in ("GPT-2 + alibi", "GPT-2 + alibi, eager"):
        assert cell_of(results, "memory: decoders, forward", row, "n = 2048") in page
    for scheme in ("rope", "alibi", "t5"):
        ratio = cell_of(results, "decoding: GPT-2", f"GPT-2 + {scheme}", "n = 512")
        assert f"`{scheme}` {ratio}" in page


def test_recovery_is_as_it_was_measured() -> None:
    section = (ROOT / "benchmarks" / "RECOVERY.md").read_text().split("## stories260k\n")[1]
    known = rows_of(section.split("### Shortfall at the end")[1].split("\n##")[0])
    told = rows_of(CHOOSING.read_text().split("## How training brings it back")[1].split("\n## ")[0])
    assert [row for row in told[:4] if row not in known] == []
    (_, _, *longer), page = told[4:], (ROOT / "benchmarks" / "RECOVERY.md").read_text()
    assert len(longer) == 3
    for name, tokens, told_ends in longer:
        (ends,) = [row for row in rows_of(page) if row[0] == f"{name}, longer ({tokens} tokens)"]
        assert set(told_ends.split(", ")) == {end for cell in ends[2:] for end in cell.split(", ") if end}


def test_shares_of_tokens_are_as_they_were_measured() -> None:
    section = (
        (ROOT / "benchmarks" / "RECOVERY.md").read_text().split("## recommended beside naive")[1].split("\n## ")[0]
    )
    shares = {(row[0], row[1]): row[2] for row in rows_of(section)}
    (count, median), readme = re.findall(r"Median over (\d+): ([\d.]+)", section)[0], (ROOT / "README.md").read_text()
    assert f"{median} of the tokens that plain fine-tuning takes in the median\nover {count} changes" in readme
    assert f"{shares['stories260k', 't5']} from a LLaMA's rotation to `t5`" in readme
    page = " ".join(CHOOSING.read_text().split())
    assert f"over all {count} changes" in page
    assert f"needs {median} of the tokens of plain fine-tuning in the median" in page
    assert f"({shares['MiniLM', 'deberta']} of the tokens)" in page


def test_length_curves_are_those_measured() -> None:
    """Of each model the values of length-curve.txt, which has a column for it, without their intervals."""
    header, _, *lines = (ROOT / "docs" / "figures" / "length-curve.txt").read_text().split("\n\n")[0].splitlines()
    columns = [re.split(r" {2,}", re.sub(r" \([^)]* to [^)]*\)", "", line).strip()) for line in lines]
    names = re.split(r" {2,}", header.strip())
    told = rows_of(CHOOSING.read_text().split("## Past the trained length")[1].split("\n## ")[0])[2:]
    assert len(told) == 7
    for name, *values in told:
        place = names.index(name)
        assert values == [cells[place].removesuffix(" [1]") for cells in columns], name
