"""What was measured on a variant, as the files beside it say."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from ..checkpoints.file_names import LENGTH_CURVE_FILE, RECOVERY_FILE

SAID = {"eval_loss": "loss on held-out text", "eval_perplexity": "perplexity on held-out text"}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Recovery by name, and perplexity by length; both empty where nothing was measured."""

    recovery: dict[str, float] = dataclasses.field(default_factory=dict)
    length_curve: tuple[tuple[int, float], ...] = ()

    @classmethod
    def read(cls, directory: Path) -> Figures:
        recovery, curve = _read(directory / RECOVERY_FILE), _read(directory / LENGTH_CURVE_FILE)
        if recovery is not None and not isinstance(recovery, dict):
            raise ValueError(
                f"{directory / RECOVERY_FILE} must be an object of figures by name: correct it or remove it"
            )
        try:
            points = tuple(sorted((int(point["length"]), float(point["perplexity"])) for point in curve or ()))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{directory / LENGTH_CURVE_FILE} must be a list of objects with a length and a perplexity ({error!r}): "
                "correct it or remove it"
            ) from None
        return cls(dict(_numbers(recovery or {})), points)

    def __bool__(self) -> bool:
        return bool(self.recovery or self.length_curve)


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): correct it or remove it") from None


def _numbers(values: dict[str, Any], before: str = "") -> list[tuple[str, float]]:
    """Every number in an object, also in objects inside of it, with a name to read."""
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        name = f"{before}{SAID.get(key, str(key).replace('_', ' '))}"
        if isinstance(value, dict):
            found += _numbers(value, f"{name}: ")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found.append((name, float(value)))
    return found
