"""Compare what is in the sdist and in the wheel with the checkout: `package_contents.py ROOT DIST`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

BESIDE = {"LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "pyproject.toml", "setup.cfg", "PKG-INFO"}


def sources(root: Path) -> set[str]:
    """The package's files as the checkout has them; `patches` under the name of its real directory."""
    found = [*(root / "hf_posenc").rglob("*.py"), *(root / "patches").rglob("*.py"), root / "hf_posenc" / "py.typed"]
    names = {path.relative_to(root).as_posix() for path in found}
    return {name for name in names if not name.startswith("hf_posenc/patches/")}


def differences(expected: set[str], found: list[str]) -> list[str]:
    missing = [f"{name} is missing" for name in sorted(expected - set(found))]
    others = [f"{name} has no business there" for name in sorted(set(found) - expected)]
    doubled = [f"{name} is there twice" for name in sorted(set(found)) if found.count(name) > 1]
    return [*missing, *others, *doubled]


def wrong_with_sdist(path: Path, expected: set[str]) -> list[str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    links = [f"{member.name} is a link" for member in members if member.issym() or member.islnk()]
    names = [member.name.partition("/")[2] for member in members if member.isfile()]
    names = [name for name in names if not name.startswith("hf_posenc.egg-info/")]
    return [*links, *differences(expected | BESIDE, names)]


def wrong_with_wheel(path: Path, expected: set[str]) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    inside = {f"hf_posenc/{name}" if name.startswith("patches/") else name for name in expected}
    return differences(inside, names)


def main() -> None:
    root, dist = Path(sys.argv[1]), Path(sys.argv[2])
    expected = sources(root)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    wrong = {sdist: wrong_with_sdist(sdist, expected), wheel: wrong_with_wheel(wheel, expected)}
    for path, lines in wrong.items():
        for line in lines:
            print(f"{path.name}: {line}", file=sys.stderr)
    if any(wrong.values()):
        raise SystemExit(1)
    print(f"{sdist.name} and {wheel.name} hold the package's {len(expected)} files, each once")


if __name__ == "__main__":
    main()
