"""Generate docs/gallery.md (`make reference`), or also train its models and draw its pictures (`make figures`)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from hf_posenc.registry import list_schemes
from scripts.gallery.page import FIGURES, NUMBERS, PAGE, read_numbers, render_page

DPI, MAX_BYTES = 160, 40_000
"""Two pixels of the picture for each pixel of a phone, in files of a few tens of kilobytes."""


def draw_gallery(names: list[str], steps: int, directory: Path = FIGURES) -> dict[str, Any]:
    """Train a small model per scheme, draw its picture and return the numbers of all schemes."""
    import torch
    from transformers.utils import logging

    from scripts.gallery import models, pictures
    from scripts.make_figures import save_small
    from scripts.small_models import LENGTH, WIDTH, read_text

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    text, _ = read_text()
    schemes, numbers = list_schemes(), directory / NUMBERS.name
    measured = json.loads(numbers.read_text(encoding="utf-8"))["schemes"] if numbers.exists() else {}
    setting = {"layers": 2, "width": WIDTH, "steps": steps, "trained": LENGTH, "longer": models.LONGER}
    result: dict[str, Any] = {"setting": setting, "schemes": {}}
    for name in names:
        model = models.train_model(schemes[name], text, steps)
        picture = pictures.draw(schemes[name], model, text[-models.HELD_OUT :])
        save_small(picture.figure, directory / f"{name}.png", dpi=DPI, max_bytes=MAX_BYTES)
        measurements = dataclasses.asdict(models.measure(schemes[name], model, text))
        measured[name] = {**measurements, "caption": picture.caption}
        print(name, measured[name], flush=True)
        result["schemes"] = {known: measured[known] for known in schemes if known in measured}
        numbers.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="train the models and draw the pictures again")
    parser.add_argument("--schemes", nargs="+", help="draw only these", choices=sorted(list_schemes()))
    parser.add_argument("--steps", type=int, default=200, help="training steps of each model")
    args = parser.parse_args()
    if args.draw or args.schemes:
        draw_gallery(args.schemes or list(list_schemes()), args.steps)
    PAGE.write_text(render_page(list_schemes().values(), read_numbers()), encoding="utf-8")


if __name__ == "__main__":
    main()
