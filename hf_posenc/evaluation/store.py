"""Results in a JSON file, written after each of them: asked for the same again, what is there is not measured again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .crew import Crew
from .results import MEASURES, Result, built
from .settings import Settings


class Store:
    """What has been measured, by measure, model and length. Only the first process writes."""

    def __init__(self, path: Path | None, crew: Crew, restart: bool = False) -> None:
        self.path = path
        self.writes = path is not None and crew.leads
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a directory: name a file for the results, such as {path / 'eval.json'}")
        self.values: dict[str, Any] = {"settings": {}, "models": {}, "results": {}}
        text = crew.tell(_text_of(path) if crew.leads and not restart else None)
        if text is not None:
            self.values = _parsed(text, path)

    def expect(self, measure: str, settings: Settings, **more: str) -> None:
        """Raise where the file has results of this measure under other settings."""
        self._same("settings", measure, {**settings.that_matter(measure), **more})

    def admit(self, name: str, **identity: str) -> None:
        """Raise where the file has another model, or another text, under this name."""
        self._same("models", name, identity)

    def _same(self, part: str, name: str, wanted: dict[str, Any]) -> None:
        earlier = self.values[part].setdefault(name, wanted)
        changed = [key for key in sorted({*earlier, *wanted}) if earlier.get(key) != wanted.get(key)]
        if changed:
            told = "; ".join(f"{key} was {earlier.get(key)!r} and is {wanted.get(key)!r}" for key in changed)
            raise ValueError(
                f"{self.path} holds results of something else under {name!r}: {told}. Ask for the same to go on with "
                "it, take another file, or begin anew with --restart (restart=True)"
            )

    def find(self, measure: str, model: str, length: int) -> Any:
        for record in self.values["results"].get(measure, []):
            if (record["model"], record["length"]) == (model, length):
                return built(MEASURES[measure], record)
        return None

    def add(self, measure: str, result: Result) -> None:
        record = json.loads(json.dumps(dataclasses.asdict(result)))
        self.values["results"].setdefault(measure, []).append(record)
        if self.writes and self.path is not None:
            beside = self.path.with_name(f"{self.path.name}.new")
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
                beside.replace(self.path)
            except OSError as error:
                raise ValueError(f"results cannot be written: {error}") from error


def _text_of(path: Path | None) -> str | None:
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else None


def _parsed(text: str, path: Path | None) -> dict[str, Any]:
    try:
        values = json.loads(text)
        if all(isinstance(values[part], dict) for part in ("settings", "models", "results")):
            return values
    except (json.JSONDecodeError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is there, and holds no results of an evaluation: take another file")
