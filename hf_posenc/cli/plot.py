"""`hf-posenc plot`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PosEncError
from .app import Json, app, said_plainly, scheme_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class Kind:
    """A plot; functions of the same name in `analysis` and `plots` measure and draw it."""

    help: str
    length: int
    """Positions to show by default."""
    max_models: int = 1
    by_layer: bool = False
    on_text: bool = False


KINDS = {
    "position-embeddings": Kind("position embeddings as a heat map", 128),
    "feature-ranges": Kind("how much each feature of the position embeddings varies", 128, max_models=8),
    "token-clusters": Kind("how far positions spread the embeddings of a token", 64),
    "separability": Kind("how well probes tell token and position apart", 64, max_models=6),
    "relative-buckets": Kind("which table row each pair of query and key reads", 64, max_models=4),
    "bias-by-distance": Kind("bias on the attention scores, per head", 128, by_layer=True),
    "rotary-decay": Kind("decay of similarity under a rotation", 512, max_models=8, by_layer=True),
    "attention-by-distance": Kind("attention on a text, per head", 256, max_models=2, on_text=True),
    "rotary-frequencies": Kind("contribution of each rotary frequency on a text", 256, max_models=2, on_text=True),
}
Build = Callable[[], "PreTrainedModel"]


@app.command()
def plot(
    kind: Annotated[str, typer.Argument(help="; ".join(f"{name}: {entry.help}" for name, entry in KINDS.items()))],
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="Position scheme, a name or JSON; repeat to compare. With --model, replaces its scheme."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint directory or Hub id.")] = None,
    compare: Annotated[str | None, typer.Option(help="Second checkpoint, compared with --model.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text file, for the plots on a text.")] = None,
    out: Annotated[Path | None, typer.Option(help="Figure to write: .png, .svg or .pdf.")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Number of positions.")] = None,
    layer: Annotated[int, typer.Option(min=0, help="Layer, for bias-by-distance and rotary-decay.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows of text.")] = 8,
    hidden_size: Annotated[int, typer.Option(help="Without --model: hidden size.")] = 64,
    num_heads: Annotated[int, typer.Option(help="Without --model: number of heads.")] = 4,
    encoder: Annotated[bool, typer.Option("--encoder", help="Without --model: bidirectional, like BERT.")] = False,
    as_json: Json = False,
) -> None:
    """Plot what a position scheme does, alone or in a checkpoint, and print a summary.

    Example: hf-posenc plot position-embeddings --scheme sinusoidal --hidden-size 512 --out sinusoidal.png

    Example: hf-posenc plot rotary-decay --scheme rope --scheme xpos --out decay.svg

    Example: hf-posenc plot attention-by-distance --model ./my-gpt2 --scheme alibi --data text.txt --out attention.png
    """
    with said_plainly():
        if kind not in KINDS:
            raise PosEncError(f"Unknown plot {kind!r}; expected one of {', '.join(KINDS)}")
        if out is None and not as_json:
            raise PosEncError("nothing to write: give --out FIGURE or --json")
        if not scheme and model is None:
            raise PosEncError("nothing to plot: give --scheme or --model")
        if compare is not None and model is None:
            raise PosEncError("--compare needs --model, the checkpoint to compare with")
        if KINDS[kind].on_text and (model is None or data is None):
            raise PosEncError(f"{kind} is measured on a text: give --model and --data")
        from .. import analysis, plots

        if out is not None:
            plots.check_figure_path(out)
        schemes = [(text, scheme_of(text)) for text in scheme or []]
        models: list[tuple[str, Build]] = []
        if model is None:
            sizes: dict[str, Any] = {"hidden_size": hidden_size, "num_heads": num_heads, "num_layers": layer + 1}
            sizes |= {"max_positions": max(length or 0, 512), "causal": not encoder}
            models = [(text, partial(analysis.build_model, spec, **sizes)) for text, spec in schemes]
        else:
            if not schemes or KINDS[kind].max_models > 1:
                models.append((Path(model).name, partial(analysis.load_model, model)))
            for text, spec in schemes:
                models.append((f"{Path(model).name}: {text}", partial(analysis.load_model, model, spec)))
            if compare is not None:
                models.append((Path(compare).name, partial(analysis.load_model, compare)))
        if len(models) > KINDS[kind].max_models:
            raise PosEncError(f"{kind} shows at most {KINDS[kind].max_models} models, got {len(models)}")
        results = _measure(kind, models, length, layer, (model, data, rows))
        if out is not None:
            plots.save_figure(getattr(plots, kind.replace("-", "_"))(*results), out)
    if as_json:
        typer.echo(json.dumps({"kind": kind, "results": [_to_json(result) for result in results]}, indent=1))
        return
    for result in results:
        typer.echo(str(result))
    typer.echo(f"Wrote {out}")


def _measure(
    kind: str,
    models: list[tuple[str, Build]],
    length: int | None,
    layer: int,
    text: tuple[str | None, Path | None, int],
) -> list[Any]:
    """The result of the analysis for every model; models without a rotation are left out of rotary-frequencies."""
    from .. import analysis

    function = "position_embeddings" if kind == "feature-ranges" else kind.replace("-", "_")
    results, skipped = [], []
    checkpoint, data, rows = text
    for name, build in models:
        model = build()
        size = length or min(KINDS[kind].length, model.config.max_position_embeddings)
        options: dict[str, Any] = {"layer": layer} if KINDS[kind].by_layer else {}
        if KINDS[kind].on_text:
            assert checkpoint is not None
            assert data is not None
            options["input_ids"] = analysis.tokenize_file(checkpoint, data, size, rows)
        else:
            options["length"] = size
        try:
            result = getattr(analysis, function)(model, **options)
        except analysis.NoRotationError as error:
            skipped.append(error)
            continue
        if kind == "token-clusters" and checkpoint is not None:
            result = dataclasses.replace(result, labels=_decode(checkpoint, result.tokens) or result.labels)
        results.append(dataclasses.replace(result, name=name))
    if not results or (skipped and kind != "rotary-frequencies"):
        raise skipped[0]
    for reason in skipped:
        typer.echo(f"skipped: {reason}", err=True)
    return results


def _decode(source: str, tokens: tuple[int, ...]) -> tuple[str, ...] | None:
    """The text of each token, or None if the checkpoint has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        return tuple(tokenizer.decode([token]).strip() or f"token {token}" for token in tokens)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _to_json(result: Any) -> dict[str, Any]:
    """All fields and properties of a result, and its summary."""
    computed = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    values = dataclasses.asdict(result) | {name: getattr(result, name) for name in computed}
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    return {"summary": str(result), **plain}
