"""The house rules that a reader would otherwise have to check: import direction, rows for every scheme."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from cases import CASES

import hf_posenc
from hf_posenc.schemes import REGISTER

ROOT = Path(hf_posenc.__file__).parent
FILES = sorted(path for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")])

# From the top of the house to its ground floor: a module may import from floors below its own, never from above.
FLOORS = [
    ["__init__"],
    ["plugin", "__main__"],
    ["cli"],
    ["cli.convert", "cli.eval", "cli.inspect", "cli.plot", "cli.push", "cli.schemes", "cli.train"],
    ["cli.app", "hub.push", "training.run"],
    ["evaluation.run"],
    ["evaluation.figures"],
    ["evaluation.report"],
    ["evaluation.tables", "evaluation.store", "evaluation.perplexity", "evaluation.order"],
    ["evaluation.masked", "evaluation.passkey", "evaluation.similarity"],
    ["evaluation.results", "evaluation.subject", "evaluation.crew", "evaluation.text"],
    ["evaluation.estimates", "evaluation.lengths", "evaluation.settings", "evaluation.scoring", "evaluation.windows"],
    ["evaluation.halt", "evaluation"],
    ["plots"],
    ["plots.attention", "plots.distances", "plots.mixing", "plots.tables"],
    ["plots.drawing"],
    ["analysis"],
    ["analysis.movement"],
    ["analysis.clouds", "analysis.decay", "analysis.encoding", "analysis.frequencies", "analysis.separation"],
    ["analysis.attended", "analysis.relative", "analysis.sources", "analysis.turning"],
    ["analysis.vectors"],
    ["analysis.subjects"],
    ["analysis.probes", "analysis.subspaces", "analysis.texts"],
    ["training.student"],
    ["checkpoints.inspection", "training.parts"],
    ["training.request"],
    ["training.recipe"],
    ["training.recovering"],
    ["checkpoints"],
    ["checkpoints.conversion"],
    ["checkpoints.sources"],
    ["checkpoints.expected"],
    ["checkpoints.configs"],
    ["training.fitting", "training.teacher"],
    ["training.centring"],
    ["conventions", "drift", "models", "reference", "explanation", "handover"],
    ["patches"],
    ["patches.live"],
    ["patches.guard"],
    ["patches.classes"],
    ["hub.upload"],
    ["hub.card"],
    ["patches.handing"],
    ["patches.bert", "patches.gpt2", "patches.llama", "patches.attach", "legacy"],
    ["patches.architecture", "config"],
    ["grammar", "attention", "context"],
    ["positions", "engine.strided", "engine.written"],
    ["engine.chunks"],
    ["engine.blocks", "engine.flex"],
    ["engine.calls"],
    ["caches", "schemes", "engine.scores", "engine.paths"],
    ["documents"],
    ["schemes.*"],
    ["training.rates"],
    ["catalogue", "mixing", "buckets", "tables"],
    ["scheme"],
    ["fading", "training.corpus", "training.saving"],
    ["training.lora"],
    [
        "checkpoints.appearing",
        "checkpoints.shards",
        "hub",
        "hub.figures",
        "hub.readme",
        "hub.troubles",
        "training",
        "training.classes",
        "training.manifest",
        "training.objective",
        "training.own_text",
        "training.parameters",
        "training.reports",
        "training.rows",
        "training.sharded",
        "training.stages",
        "training.state_files",
        "training.texts",
        "options",
        "schedule",
        "names",
        "rotation",
        "terms",
        "sinusoids",
        "projection",
        "masks",
        "engine.bands",
        "engine",
    ],
    ["disk", "files", "limits"],
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


def floor(module: str) -> int:
    for number, names in enumerate(FLOORS):
        if module in names or (module.count(".") == 1 and f"{module.split('.')[0]}.*" in names):
            return number
    raise AssertionError(f"{module} has no floor: add it to FLOORS")


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, also inside of functions; not those only for type checkers."""
    here = module_name(path)
    package = here.split(".")[:-1] if path.name != "__init__.py" else ([] if here == "__init__" else here.split("."))
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and getattr(branch.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
            continue
        if node.level:
            base = package[: len(package) - node.level + 1]
        elif node.module and node.module.split(".")[0] == "hf_posenc":
            base = []
        else:
            continue
        parts = [*base, *(node.module or "").removeprefix("hf_posenc").strip(".").split(".")]
        parts = [part for part in parts if part]
        for alias in node.names:
            whole = ".".join([*parts, alias.name])
            exists = (ROOT / whole.replace(".", "/")).with_suffix(".py").exists() or (
                ROOT / whole.replace(".", "/")
            ).is_dir()
            found.add(whole if exists else ".".join(parts) or "__init__")
    return found - {here}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    here = module_name(path)
    for imported in imports(path):
        assert floor(imported) > floor(here), f"{here} imports {imported}, which is not below it"


def test_the_check_above_sees_an_import_that_goes_up() -> None:
    assert "config" in imports(ROOT / "patches" / "classes.py")
    assert imports(ROOT / "schemes" / "t5.py") == {"buckets", "options", "scheme", "terms"}
    assert floor("scheme") > floor("schemes.t5") > floor("schemes")
    assert "models" in imports(ROOT / "plugin.py")
    assert floor("plugin") < floor("models")  # models importing plugin would fail


def test_scheme_files_import_no_sibling_and_no_architecture() -> None:
    for path in (ROOT / "schemes").glob("*.py"):
        if path.name != "__init__.py":
            assert not [name for name in imports(path) if name.startswith(("schemes", "patches"))]
            assert "transformers.models" not in path.read_text()


def test_patches_and_attention_name_no_scheme() -> None:
    others = [ROOT / f"{name}.py" for name in ("attention", "positions", "caches", "documents", "masks")]
    for path in [*(ROOT / "patches").glob("*.py"), *(ROOT / "engine").glob("*.py"), *others]:
        text = path.read_text()
        assert not [name for name in REGISTER if f'"{name}"' in text], path
        assert "from .schemes" not in text
        assert "hf_posenc.schemes" not in text


def test_no_scheme_lacks_its_row() -> None:
    rows = [item for case in CASES for item in (case.scheme if isinstance(case.scheme, list) else [case.scheme])]
    assert {item if isinstance(item, str) else item["type"] for item in rows} == set(REGISTER)


def test_rows_say_truly_which_schemes_extend_and_score() -> None:
    from hf_posenc.grammar import parse

    for case in CASES:
        items = parse(case.scheme)
        assert case.extends == all(item.scheme.extends for item in items), case
        assert case.scores == any(item.acts_at("score") for item in items), case
        assert case.values == any(item.acts_at("value") for item in items), case


def test_a_name_can_be_registered_once() -> None:
    from hf_posenc.schemes import register_scheme
    from hf_posenc.schemes.t5 import T5

    assert register_scheme(T5) is T5
    with pytest.raises(ValueError, match="already"):
        register_scheme(type("Impostor", (T5,), {}))


def test_patches_are_imported_under_their_own_name_only() -> None:
    import importlib
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent))
    try:
        with pytest.raises(ImportError, match=r"hf_posenc\.patches"):
            importlib.import_module("patches")
    finally:
        sys.path.pop(0)


def test_every_package_is_in_the_wheel() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(hf_posenc[.\w]*)"', text[text.index("packages = [") : text.index("package-dir")]))
    there = {
        ".".join(path.parent.relative_to(ROOT.parent).parts)
        for path in ROOT.rglob("__init__.py")
        if "__pycache__" not in path.parts
    }
    assert listed == there | {"hf_posenc.patches"}
