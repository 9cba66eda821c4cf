"""`hf-posenc plot`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Json, app, said_plainly, scheme_of

KINDS = {
    "encoding": "the vectors of positions as a heat map",
    "movement": "how far each feature moves over the positions",
    "relative": "the row of its table that each pair of query and key looks up",
    "bias": "the bias by distance and head",
    "decay": "how alike equal vectors are after a rotation, by distance",
    "separation": "whether word and position can be told apart once mixed",
    "clouds": "the positions of a word as a cloud around it",
    "attention": "attention by distance, layer and head, on a text; with a second model, before and after",
    "frequencies": "how much each rotary frequency is used, on a text; with a second model, before and after",
}
ON_TEXT = ("attention", "frequencies")
SEVERAL = {"movement": 8, "relative": 4, "decay": 8, "separation": 6, "attention": 2, "frequencies": 2}
"""How many can be drawn in one figure; of the others, one."""
TEXT_LENGTH, TEXT_ROWS = 256, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What to look at, and how closely."""

    what: str
    schemes: list[Any]
    model: str | None
    after: str | None
    data: Path | None
    length: int | None
    layer: int
    width: int
    heads: int
    encoder: bool
    rows: int

    def __post_init__(self) -> None:
        if self.what not in KINDS:
            raise ValueError(f"there is no plot {self.what!r}; there are {', '.join(KINDS)}")
        if not self.schemes and self.model is None:
            raise ValueError("say what to look at: --scheme, a name or JSON, or --model, a checkpoint's directory")
        if self.after is not None and self.model is None:
            raise ValueError("--after is compared with --model: name that as well")
        if self.what in ON_TEXT and (self.model is None or self.data is None):
            raise ValueError(f"{self.what} is measured on a checkpoint at work: give --model and --data, a text file")
        if self.length is not None and self.length < 2:
            raise ValueError(f"--length must be at least 2, got {self.length}")
        if self.rows < 1 or self.layer < 0:
            raise ValueError(f"--rows must be 1 or more and --layer 0 or more, got {self.rows} and {self.layer}")


@app.command()
def plot(
    what: Annotated[str, typer.Argument(help="; ".join(f"{name}: {said}" for name, said in KINDS.items()))],
    scheme: Annotated[
        list[str] | None, typer.Option(help="Name of a scheme, or JSON; with --model, put on the checkpoint.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint's directory, or a Hub id.")] = None,
    after: Annotated[str | None, typer.Option(help="Another checkpoint, to compare with --model.")] = None,
    data: Annotated[Path | None, typer.Option(help="A text file, for attention and frequencies.")] = None,
    out: Annotated[Path | None, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = None,
    length: Annotated[int | None, typer.Option(help="Positions to look at.")] = None,
    layer: Annotated[int, typer.Option(help="The layer, for bias and decay.")] = 0,
    width: Annotated[int, typer.Option(help="Width of the model, without --model.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads of the model, without --model.")] = 4,
    encoder: Annotated[bool, typer.Option("--encoder", help="Without --model: one that sees ahead, as BERT.")] = False,
    rows: Annotated[int, typer.Option(help="Rows of text.")] = TEXT_ROWS,
    as_json: Json = False,
) -> None:
    """Draw what a position scheme does, by itself or in a checkpoint, and print it in numbers.

    Example: hf-posenc plot encoding --scheme sinusoidal --width 512 --out sinusoids.png

    Example: hf-posenc plot decay --scheme rope --scheme xpos --out decay.svg

    Example: hf-posenc plot attention --model ./my-gpt2 --scheme alibi --data text.txt --out attention.png
    """
    with said_plainly():
        if out is None and not as_json:
            raise ValueError("name the picture to write with --out, or ask for the numbers with --json")
        asked = Asked(
            what=what,
            schemes=[scheme_of(text) for text in scheme or []],
            model=model,
            after=after,
            data=data,
            length=length,
            layer=layer,
            width=width,
            heads=heads,
            encoder=encoder,
            rows=rows,
        )
        from .. import plots

        if out is not None:
            plots.check_figure_path(out)
        found = measured(asked)
        if out is not None:
            plots.save_figure(getattr(plots, what)(*found), out)
    if as_json:
        typer.echo(json.dumps({"what": what, "found": [as_numbers(data) for data in found]}, indent=1))
        return
    for part in found:
        typer.echo(str(part))
    typer.echo(f"written to {out}")


def measured(asked: Asked) -> list[Any]:
    """The numbers of every model that was asked for."""
    models = subjects(asked)
    if len(models) > SEVERAL.get(asked.what, 1):
        raise ValueError(f"{asked.what} shows {SEVERAL.get(asked.what, 1)} at a time, and {len(models)} were asked for")
    from ..analysis import NothingTurns

    found, still = [], []
    for name, build in models:
        try:
            found.append(_measure(asked, name, build()))
        except NothingTurns as error:
            still.append(error)
    if not found or (still and asked.what != "frequencies"):
        raise still[0]
    for reason in still:  # one that had no rotation before, or has none after
        typer.echo(f"left out: {reason}", err=True)
    return found


def subjects(asked: Asked) -> list[tuple[str, Callable[[], Any]]]:
    """The models to look at, by name, each to be built when its turn comes."""
    from ..analysis import checkpoint_model, scheme_model

    found: list[tuple[str, Callable[[], Any]]] = []
    model, after = asked.model, asked.after
    if model is None:
        sizes: dict[str, Any] = {"width": asked.width, "heads": asked.heads, "layers": asked.layer + 1}
        sizes.update(max_positions=max(asked.length or 0, 512), causal=not asked.encoder)
        return [(_said(scheme), lambda scheme=scheme: scheme_model(scheme, **sizes)) for scheme in asked.schemes]  # type: ignore[misc]
    if not asked.schemes or asked.what in SEVERAL:
        found.append((Path(model).name, lambda: checkpoint_model(model)))
    for scheme in asked.schemes:
        name = f"{Path(model).name}: {_said(scheme)}"
        found.append((name, lambda scheme=scheme: checkpoint_model(model, scheme)))  # type: ignore[misc]
    if after is not None:
        found.append((Path(after).name, lambda: checkpoint_model(after)))
    return found


def _said(scheme: Any) -> str:
    return scheme if isinstance(scheme, str) else json.dumps(scheme)


def _measure(asked: Asked, name: str, model: Any) -> Any:
    from .. import analysis

    what, longest = asked.what, model.config.max_position_embeddings
    if what in ON_TEXT:
        assert asked.data is not None
        assert asked.model is not None
        length = asked.length or min(TEXT_LENGTH, longest)
        ids = analysis.token_rows(asked.model, asked.data, length, asked.rows)
        measure = analysis.attention_by_distance if what == "attention" else analysis.frequencies
        return measure(model, ids, name)
    functions: dict[str, Callable[..., Any]] = {
        "encoding": analysis.encoding,
        "movement": analysis.encoding,
        "relative": analysis.relative_rows,
        "bias": analysis.bias_by_distance,
        "decay": analysis.decay,
        "separation": analysis.separation,
        "clouds": analysis.clouds,
    }
    takes = inspect.signature(functions[what]).parameters
    options = {"length": asked.length or min(takes["length"].default, longest)}
    if "layer" in takes:
        options["layer"] = asked.layer
    found: Any = functions[what](model, **options)
    found = analysis.movement(found) if what == "movement" else found
    if what == "clouds" and asked.model is not None:
        found = dataclasses.replace(found, labels=analysis.words_of(asked.model, found.tokens) or found.labels)
    return found if what == "separation" else dataclasses.replace(found, name=name)


def as_numbers(data: Any) -> dict[str, Any]:
    """Everything that was measured as plain JSON, and the summary in words."""
    plain = {name: _plain(value) for name, value in dataclasses.asdict(data).items()}
    return {"summary": str(data), **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
