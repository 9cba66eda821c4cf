"""Hooks of mkdocs.yml: root files as pages of the site, and links that work both on GitHub and on the site.

Pages link to files outside of docs/ relatively, as GitHub wants it (`../benchmarks/RESULTS.md`). The site has no such
files, so the hooks point these links to the repository. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root files that are pages of the site."""
    for name, page in ROOT_PAGES.items():
        content = rewrite_links((ROOT / name).read_text(encoding="utf-8"), "", config.repo_url or "")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page in docs/."""
    if page.file.src_uri in ROOT_PAGES.values():
        return markdown  # done in on_files, relative to the root
    return rewrite_links(markdown, "docs", config.repo_url or "")


def rewrite_links(markdown: str, directory: str, repo_url: str) -> str:
    """Point links from a file in `directory` to pages of the site, or to the repository."""

    def replace(match: re.Match[str]) -> str:
        target, anchor = posixpath.normpath(posixpath.join(directory, match[1])), match[2] or ""
        if target in ROOT_PAGES:
            return ROOT_PAGES[target] + anchor
        if target.startswith("docs/"):
            return target.removeprefix("docs/") + anchor
        if not (ROOT / target).exists():
            raise PluginError(f"broken link: {target} does not exist in the repository")
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{repo_url}/{kind}/main/{target}{anchor}"

    return LINK.sub(replace, markdown)
