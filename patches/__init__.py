"""How schemes get into BERT, GPT-2 and LLaMA: one file per architecture, and the helpers for live models.

Import it as `hf_posenc.patches`; the folder stands at the top of the repository for readers, not as a package.
"""

if __name__ != "hf_posenc.patches":
    raise ImportError(f"this package is hf_posenc.patches; it cannot be imported as {__name__!r}")

from .live import patched, restore, retrofit

__all__ = ["patched", "restore", "retrofit"]
