"""Fill in the generated parts of README.md and docs/: measurements, options and install lines (`make reference`).

A page marks where generated text goes:

    <!-- generated: speed -->
    ...
    <!-- end generated -->

Everything between the two comments is replaced by the output of the generator with that name. Measurements come from
the JSON files in benchmarks/, the tables of the pages there and the text files in docs/figures/; options from the
commands themselves. Lines that install the package are rewritten wherever they are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from hf_posenc.errors import install_command
from scripts.scaling import TABLES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = ROOT / "docs" / "figures"
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w -]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
INSTALL = re.compile(r"pip install '?hf_posenc(?:\[(?P<extra>[\w,]+)\])?(?: @ [^'\s]+)?'?")
LENGTH = 1024
GROUPS = {"GPT-2": "decoders", "LLaMA": "llamas", "BERT": "encoders"}
SETTINGS = {"forward": "forward", "training": "training step"}
SCHEMES = ("rope", "alibi", "t5", "tupe", "shaw", "transformer_xl", "deberta (v2)", "deberta (v1)")


def fill_page(page: str) -> str:
    """Replace the text between each pair of markers by what its generator returns, and every install line."""
    page = INSTALL.sub(lambda match: install_command(match["extra"]), page)
    return MARKED.sub(lambda match: f"{match[1]}{generate(match['name'])}\n{match[3]}", page)


def generate(name: str) -> str:
    """Return the text of a marker: `GENERATOR` or `GENERATOR ARGUMENT`."""
    generator, _, argument = name.partition(" ")
    return GENERATORS[generator](*([argument] if argument else []))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(re.sub(r"(?<=\|)  (?=\|)", " ", f"| {' | '.join(cells)} |") for cells in lines)


def benchmark(group: str, setting: str, length: int, name: str) -> dict[str, float]:
    """One measurement of benchmarks/results.json."""
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))["results"]
    key = (group, setting, length, name)
    matches = [row for row in results if (row["group"], row["setting"], row["length"], row["name"]) == key]
    assert len(matches) == 1, f"{len(matches)} measurements of {key}"
    return matches[0]


def speed() -> str:
    """Run time of whole models relative to stock."""
    header = ["scheme", *(f"{family} {setting}" for family in GROUPS for setting in SETTINGS)]
    rows = []
    for scheme in SCHEMES:
        cells = []
        for family, group in GROUPS.items():
            for setting in SETTINGS.values():
                measured = family == "BERT" or scheme in SCHEMES[:3]
                cells.append(
                    f"{benchmark(group, setting, LENGTH, f'{family} + {scheme}')['ratio']:.2f}" if measured else ""
                )
        name, _, version = scheme.partition(" ")
        rows.append([f"`{name}` {version}".strip(), *cells])
    return markdown_table(header, rows)


def decoding() -> str:
    """Run time of generating 512 tokens relative to stock."""
    rows = []
    for family in ("GPT-2", "LLaMA"):
        ratios = [benchmark("decoding", family, 512, f"{family} + {scheme}")["ratio"] for scheme in SCHEMES[:3]]
        rows.append([family, *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown_table(["512 new tokens", *(f"`{scheme}`" for scheme in SCHEMES[:3])], rows)


def memory() -> str:
    """Peak memory of a forward pass with and without a materialized bias."""
    names = {"stock": "GPT-2", "`alibi`, sdpa": "GPT-2 + alibi", "`alibi`, eager": "GPT-2 + alibi, eager"}
    lengths = (512, 1024, 2048)
    rows = [
        [label, *(f"{benchmark('memory', 'decoders, forward', length, name)['value']:.0f} MB" for length in lengths)]
        for label, name in names.items()
    ]
    return markdown_table(["GPT-2", *(f"{length:,} tokens" for length in lengths)], rows)


def recovery_tables(task: str) -> dict[str, dict[str, str]]:
    """The final shortfalls of a task in benchmarks/EARLIER_RECIPE.md: by method, then by scheme."""
    page = (ROOT / "benchmarks" / "EARLIER_RECIPE.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {task}\n", 1)[1].split("\n## ", 1)[0]
    table = section.split("### ", 2)[1]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def recovery() -> str:
    """Final shortfall of plain fine-tuning and of the recommended recipe."""
    shortfalls = recovery_tables("stories260k")
    schemes = list(shortfalls["naive"])
    labels = {"plain fine-tuning": "naive", "the earlier recipe": "recommended"}
    rows = [[label, *(shortfalls[method][scheme] for scheme in schemes)] for label, method in labels.items()]
    return markdown_table(["", *(f"`{scheme}`" for scheme in schemes)], rows)


def long_context(name: str) -> str:
    """A table or a sentence about inputs beyond the trained length."""
    from scripts.long_context import SENTENCES
    from scripts.long_context import TABLES as tables

    return markdown_table(*tables[name]()) if name in tables else SENTENCES[name]()


def small_budgets() -> str:
    """Shortfalls of stories260k with few tokens: one row per scheme."""
    from benchmarks.recovery.report import shortfall_cell
    from benchmarks.recovery.results import Results, read_outcomes
    from benchmarks.recovery.subjects import SUBJECTS

    subject, results = SUBJECTS["stories260k"], Results(read_outcomes(), SUBJECTS)
    own, real = subject.texts
    rows = []
    for scheme, budgets in subject.schemes:
        recipe, naive = results.recipe(subject, scheme, budgets[0]), results.naive(subject, scheme, budgets[0])
        name = scheme if isinstance(scheme, str) else json.dumps(scheme)
        stages = [shortfall_cell(recipe, own, stage) for stage in ("swapped", "started")]
        trained = [shortfall_cell(naive, own), shortfall_cell(recipe, own), shortfall_cell(recipe, real)]
        rows.append([f"`{name}`", *stages, *trained])
    titles = ["swapped", "after the warm start", "plain fine-tuning", "`hf-posenc train`", "the same, on other text"]
    return markdown_table(["", *titles], rows)


def recovery_longer() -> str:
    """Final shortfall of the recommended recipe after more tokens."""
    page = (ROOT / "benchmarks" / "EARLIER_RECIPE.md").read_text(encoding="utf-8")
    rows = []
    for task in ("stories260k", "gpt-nano-sort", "MiniLM"):
        match = re.search(rf"^## {task}, longer\n\n([\d,]+) tokens", page, re.MULTILINE)
        assert match, task
        shortfalls = recovery_tables(f"{task}, longer")["recommended"]
        rows.append([task, match[1], ", ".join(f"`{scheme}` {value}" for scheme, value in shortfalls.items())])
    return markdown_table(["model", "tokens", "final shortfall"], rows)


def recovery_tokens() -> str:
    """Tokens that the recommended recipe needs, relative to plain fine-tuning."""
    page = (ROOT / "benchmarks" / "EARLIER_RECIPE.md").read_text(encoding="utf-8")
    match = re.search(r"^Median over (\d+): ([\d.]+)", page, re.MULTILINE)
    assert match
    rows = re.findall(r"^\| (stories260k|gpt-nano-sort|MiniLM) \| (\w+) \| ([\d.]+) \|$", page, re.MULTILINE)
    best, worst = (pick(rows, key=lambda row: float(row[2])) for pick in (min, max))
    return (
        f"To match the final quality of plain fine-tuning, that recipe needs {float(match[2]):.0%} of the tokens, in\n"
        f"the median over {match[1]} conversions: {float(best[2]):.0%} at best (`{best[1]}` on {best[0]}) and\n"
        f"{float(worst[2]):.0%} at worst (`{worst[1]}` on {worst[0]})."
    )


def read_sections() -> dict[str, list[str]]:
    """The sections of docs/figures/numbers.txt: the lines below each `[name]`."""
    sections: dict[str, list[str]] = {"length-curve": _lines("length-curve.txt")}
    name = ""
    for line in _lines("numbers.txt"):
        match = re.fullmatch(r"\[([a-z-]+)\]", line)
        name = match[1] if match else name
        if not match:
            sections.setdefault(name, []).append(line)
    return sections


def _lines(name: str) -> list[str]:
    return (FIGURES / name).read_text(encoding="utf-8").splitlines()


def numbers(name: str) -> str:
    """The numbers of a figure, as a list."""
    lines = [line for line in read_sections()[name] if line]
    return "\n".join(f"- {line}" for line in lines)


def short_table(name: str) -> str:
    """The same without confidence intervals."""
    return re.sub(r" \([^()]+ to [^()]+\)", "", table(name))


def table(name: str) -> str:
    """The table of an evaluation, without comparisons between models."""
    lines = [line for line in read_sections()[name] if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    keep = [index for index, title in enumerate(header) if " / " not in title]
    cells = [[re.sub(r" \[\d+\]$", "", row[index]) for index in keep] for row in [header, *rows]]
    return markdown_table(cells[0], cells[1:])


def comparison() -> str:
    """Perplexity of schemes that were trained from scratch by examples/compare_schemes.py."""
    report = json.loads((FIGURES / "comparison.json").read_text(encoding="utf-8"))
    values = {(row["model"], row["length"]): row["perplexity"] for row in report["perplexity"]}
    rows = []
    for length in sorted({length for _, length in values}):
        estimates = [values[model, length] for model in report["models"]]
        cells = ["cannot read that far" if estimate is None else f"{estimate['value']:.3g}" for estimate in estimates]
        rows.append([f"{length:,} ({length / report['trained_length']:g}x)", *cells])
    return markdown_table(["length", *(f"`{model}`" for model in report["models"])], rows)


def options(command: str) -> str:
    """The options of a command, from its own help."""
    import typer.main

    from hf_posenc.cli import app

    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    rows = []
    for parameter in parameters:
        if parameter.param_type_name != "option" or parameter.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default
        shown = isinstance(default, (int, float, str)) and default is not False
        value = "on" if default is True else f"`{default}`"
        if isinstance(parameter.show_default, str):
            value, shown = parameter.show_default, True
        value = "required" if parameter.required else value if shown else ""
        rows.append([names, value, str(parameter.help).replace("|", "\\|")])
    if not rows:
        return f"`{command}` has no options."
    return markdown_table(["option", "default", ""], rows)


def reliability() -> str:
    """How much the tests of each promise cover."""
    from scripts.reliability import read_results, table_rows
    from scripts.upstream.record import table_row

    rows = [*table_rows(read_results()), table_row()]
    return markdown_table(["promise", "tests", "cases in them", "last run"], rows)


def scaling(name: str) -> str:
    """A table of calculated needs of large models."""
    header, rows = TABLES[name]
    return markdown_table(header, rows())


GENERATORS: dict[str, Callable[..., str]] = {
    "comparison": comparison,
    "decoding": decoding,
    "long-context": long_context,
    "memory": memory,
    "numbers": numbers,
    "options": options,
    "recovery": recovery,
    "reliability": reliability,
    "small-budgets": small_budgets,
    "recovery-longer": recovery_longer,
    "recovery-tokens": recovery_tokens,
    "scaling": scaling,
    "short-table": short_table,
    "speed": speed,
    "table": table,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        path.write_text(fill_page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
