"""Compare the contents of the sdist and the wheel with the checkout: `package_contents.py ROOT DIST`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

SDIST_METADATA = {"LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "pyproject.toml", "setup.cfg", "PKG-INFO"}


def source_files(root: Path) -> set[str]:
    """The files of the package in the checkout, with `patches` under its real directory."""
    paths = [*(root / "hf_posenc").rglob("*.py"), *(root / "patches").rglob("*.py"), root / "hf_posenc" / "py.typed"]
    names = {path.relative_to(root).as_posix() for path in paths}
    return {name for name in names if not name.startswith("hf_posenc/patches/")}


def compare(expected: set[str], names: list[str]) -> list[str]:
    missing = [f"{name} is missing" for name in sorted(expected - set(names))]
    unexpected = [f"{name} should not be included" for name in sorted(set(names) - expected)]
    duplicates = [f"{name} is included twice" for name in sorted(set(names)) if names.count(name) > 1]
    return [*missing, *unexpected, *duplicates]


def check_sdist(path: Path, expected: set[str]) -> list[str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    links = [f"{member.name} is a link" for member in members if member.issym() or member.islnk()]
    names = [member.name.partition("/")[2] for member in members if member.isfile()]
    names = [name for name in names if not name.startswith("hf_posenc.egg-info/")]
    return [*links, *compare(expected | SDIST_METADATA, names)]


def check_wheel(path: Path, expected: set[str]) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    installed = {f"hf_posenc/{name}" if name.startswith("patches/") else name for name in expected}
    return compare(installed, names)


def main() -> None:
    root, dist = Path(sys.argv[1]), Path(sys.argv[2])
    expected = source_files(root)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    problems = {sdist: check_sdist(sdist, expected), wheel: check_wheel(wheel, expected)}
    for path, lines in problems.items():
        for line in lines:
            print(f"{path.name}: {line}", file=sys.stderr)
    if any(problems.values()):
        raise SystemExit(1)
    print(f"{sdist.name} and {wheel.name} contain all {len(expected)} files of the package, once each")


if __name__ == "__main__":
    main()
