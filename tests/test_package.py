"""Rules of the package as a whole: the matrix covers every scheme, and the wheel holds every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_posenc
from hf_posenc.registry import SCHEMES
from tests.support.cases import CASES

ROOT = Path(hf_posenc.__file__).parent


def test_schemes_name_no_architecture_and_attention_no_scheme() -> None:
    for path in (ROOT / "schemes").glob("*.py"):
        assert "transformers.models" not in path.read_text(), path
    for path in (ROOT / "attention").glob("*.py"):
        text = path.read_text()
        assert not [name for name in SCHEMES if f'"{name}"' in text], path


def test_no_scheme_lacks_its_row() -> None:
    rows = [item for case in CASES for item in (case.scheme if isinstance(case.scheme, list) else [case.scheme])]
    assert {item if isinstance(item, str) else item["type"] for item in rows} == set(SCHEMES)


def test_rows_say_truly_which_schemes_extend_and_score() -> None:
    from hf_posenc.spec import parse_position_scheme

    for case in CASES:
        items = parse_position_scheme(case.scheme)
        assert case.extends == all(item.scheme.extends for item in items), case
        assert case.scores == any(item.acts_at("score") for item in items), case
        assert case.values == any(item.acts_at("value") for item in items), case
        assert case.remaps == any(item.acts_at("remap") for item in items), case


def test_a_name_can_be_registered_once() -> None:
    from hf_posenc.registry import register_scheme
    from hf_posenc.schemes.t5 import T5

    assert register_scheme(T5) is T5
    with pytest.raises(ValueError, match="already"):
        register_scheme(type("Impostor", (T5,), {}))


def test_patches_are_imported_under_their_own_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    with pytest.raises(ImportError, match=r"hf_posenc\.patches"):
        importlib.import_module("patches")


def test_every_package_is_in_the_wheel() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(hf_posenc[.\w]*)"', text[text.index("packages = [") : text.index("package-dir")]))
    there = {
        ".".join(path.parent.relative_to(ROOT.parent).parts)
        for path in ROOT.rglob("__init__.py")
        if "__pycache__" not in path.parts
    }
    assert listed == there | {"hf_posenc.patches"}
