"""Imports hf_posenc together with transformers, so that variants load in programs that do not import it.

`hf-posenc enable` copies this file into site-packages, where Python runs it at every start; `hf-posenc disable` removes
it. So it imports nothing until transformers is imported, and never makes a program fail.
"""

from __future__ import annotations

import sys


class ImportWithTransformers:
    """A finder that imports hf_posenc when transformers is looked for, and leaves finding it to the others."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "transformers":
            return None
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        try:
            is_imported = "hf_posenc" in sys.modules
            import hf_posenc.patches.import_hooks as import_hooks

            import_hooks.warn_only = not is_imported
        except ModuleNotFoundError:
            return None  # uninstalled since
        except Exception as error:
            print(f"hf_posenc cannot be imported ({error}): run `hf-posenc disable`", file=sys.stderr)
            return None
        # The list of finders has changed while Python walks through it: ask all of them here.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


sys.meta_path.insert(0, ImportWithTransformers)
