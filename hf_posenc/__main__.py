"""`python -m hf_posenc`, also under `accelerate launch -m`."""

from __future__ import annotations

from .cli import app

if __name__ == "__main__":
    app(prog_name="hf-posenc")
