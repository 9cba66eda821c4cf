"""`hf-posenc plot`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ..errors import PosEncError
from .app import Json, app, echo_json, parse_scheme_option
from .messages import announce_wait, exit_on_user_error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class Kind:
    """A plot; functions of the same name in `analysis` and `plots` measure and draw it."""

    help: str
    default_length: int
    max_models: int = 1
    with_original: bool = True
    """Whether a checkpoint's own encoding is shown next to those that --scheme replaces it by."""
    by_layer: bool = False
    on_text: bool = False

    def __str__(self) -> str:
        shown = "one model" if self.max_models == 1 else f"at most {self.max_models}"
        return f"{self.help} ({shown}; needs --model and --data)" if self.on_text else f"{self.help} ({shown})"


KINDS = {
    "position-embeddings": Kind("position embeddings as a heat map", 128, max_models=4, with_original=False),
    "feature-ranges": Kind("how much each feature of the position embeddings varies", 128, max_models=8),
    "token-clusters": Kind("how far positions spread the embeddings of a token", 64),
    "separability": Kind("how well probes tell token and position apart", 64, max_models=6),
    "relative-buckets": Kind("which table row each pair of query and key reads", 64, max_models=4),
    "bias-by-distance": Kind(
        "bias on the attention scores, per head", 128, max_models=4, with_original=False, by_layer=True
    ),
    "rotary-decay": Kind("decay of similarity under a rotation", 512, max_models=8, by_layer=True),
    "attention-by-distance": Kind("attention on a text, per head", 256, max_models=4, on_text=True),
    "rotary-frequencies": Kind("contribution of each rotary frequency on a text", 256, max_models=4, on_text=True),
}
Build = Callable[[], "PreTrainedModel"]
MAX_LENGTH, MAX_ROWS = 2**20, 2**20


@app.command()
def plot(
    context: typer.Context,
    kind: Annotated[str, Argument(help="; ".join(f"{name}: {entry}" for name, entry in KINDS.items()))],
    scheme: Annotated[
        list[str] | None, Option(help="A scheme name or JSON; repeat to compare. With --model, replaces its scheme.")
    ] = None,
    model: Annotated[str | None, Option(help="Checkpoint directory or Hub id.")] = None,
    compare: Annotated[str | None, Option(help="Second checkpoint, compared with --model.")] = None,
    data: Annotated[Path | None, Option(help="Text file, for attention-by-distance and rotary-frequencies.")] = None,
    out: Annotated[Path | None, Option(help="Figure to write: .png, .svg or .pdf.")] = None,
    length: Annotated[
        int | None,
        Option(min=2, max=MAX_LENGTH, help="Number of positions.", show_default="64 to 512, depending on the plot"),
    ] = None,
    layer: Annotated[int, Option(min=0, help="Layer, for bias-by-distance and rotary-decay.")] = 0,
    rows: Annotated[int, Option(min=1, max=MAX_ROWS, help="Rows of text.")] = 8,
    hidden_size: Annotated[int, Option(help="Without --model: hidden size.")] = 64,
    num_heads: Annotated[int, Option(help="Without --model: number of heads.")] = 4,
    encoder: Annotated[bool, Option("--encoder", help="Without --model: bidirectional, like BERT.")] = False,
    as_json: Json = False,
) -> None:
    """Plot what a position scheme does, alone or in a checkpoint, and print a summary.

    Give --scheme or --model, and --out or --json. With --model and --scheme,
    most plots show the model's own encoding too, which counts as one of the
    models; position-embeddings, bias-by-distance and token-clusters show
    that of --scheme only.

    Example: hf-posenc plot position-embeddings --scheme sinusoidal --hidden-size 512 --out sinusoidal.png

    Example: hf-posenc plot bias-by-distance --scheme alibi --scheme t5 --out biases.png

    Example: hf-posenc plot rotary-decay --scheme rope --scheme xpos --out decay.svg

    Example: hf-posenc plot attention-by-distance --model ./my-gpt2 --scheme alibi --data text.txt --out attention.png
    """
    with exit_on_user_error(context), announce_wait(f"Measuring {kind}"), contextlib.ExitStack() as stack:
        kind = _find_kind(kind)
        if out is None and not as_json:
            raise PosEncError("Nothing to write: give --out FIGURE or --json")
        if KINDS[kind].on_text and (model is None or data is None):
            raise PosEncError(f"{kind} is measured on a text: give --model and --data")
        if compare is not None and model is None:
            raise PosEncError("--compare needs --model, the checkpoint to compare with")
        from .. import analysis, plots
        from ..checkpoints import lock_output

        if out is not None:
            plots.style.check_figure_path(out)
            stack.enter_context(lock_output(out))
        stack.enter_context(_translate_memory_errors(kind))
        models: list[tuple[str, Build]]
        if model is None:
            sizes: dict[str, Any] = {"hidden_size": hidden_size, "num_heads": num_heads, "num_layers": layer + 1}
            sizes |= {"max_positions": max(length or 0, 512), "causal": not encoder}
            build = partial(analysis.build_model, **sizes)
            models = [(name, partial(build, parse_scheme_option(name))) for name in scheme or []]
        else:
            models = _list_models(KINDS[kind], model, scheme or [], compare)
        if not 0 < len(models) <= KINDS[kind].max_models:
            limit = f"{kind} shows at most {KINDS[kind].max_models}" if models else "give --scheme or --model"
            raise PosEncError(f"--scheme, --model and --compare name {len(models)} models to plot: {limit}")
        text = None if model is None or data is None else partial(analysis.tokenize_file, model, data, rows=rows)
        results = _measure(kind, models, length, layer, text)
        if kind == "token-clusters" and model is not None:
            results = [dataclasses.replace(results[0], labels=_decode(model, results[0].tokens) or results[0].labels)]
        if out is not None:
            plots.save_figure(getattr(plots, kind.replace("-", "_"))(*results), out)
    if as_json:
        echo_json({"kind": kind, "results": [_to_json(result) for result in results]})
    else:
        typer.echo("\n".join([*map(str, results), f"Wrote {out}"]))


@contextlib.contextmanager
def _translate_memory_errors(kind: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises a plain RuntimeError on CPUs
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        raise PosEncError(
            f"Not enough memory for {kind} of this size: lower --length, --rows or the sizes of the model"
        ) from error


def _find_kind(name: str) -> str:
    """The plot with this name, or the only one whose name starts with it, such as "bias"."""
    matches = [kind for kind in KINDS if kind.startswith(name)]
    if name in KINDS or len(matches) == 1:
        return name if name in KINDS else matches[0]
    raise PosEncError(f"Unknown plot {name!r}; expected one of {', '.join(matches or KINDS)}")


def _list_models(kind: Kind, model: str, schemes: list[str], compare: str | None) -> list[tuple[str, Build]]:
    """A checkpoint as it is, with each of the schemes instead, and a second checkpoint."""
    from ..analysis import load_model

    name = Path(model).name
    models: list[tuple[str, Build]] = []
    if not schemes or (kind.with_original and kind.max_models > 1):
        models.append((name, partial(load_model, model)))
    for scheme in schemes:
        models.append((f"{name}: {scheme}", partial(load_model, model, parse_scheme_option(scheme))))
    if compare is not None:
        models.append((Path(compare).name, partial(load_model, compare)))
    return models


def _measure(
    kind: str, models: list[tuple[str, Build]], length: int | None, layer: int, text: Callable[..., Tensor] | None
) -> list[Any]:
    """The result of the analysis for every model; models without a rotation are left out of rotary-frequencies."""
    from .. import analysis
    from ..patches import max_positions

    measure = getattr(analysis, "position_embeddings" if kind == "feature-ranges" else kind.replace("-", "_"))
    results, skipped = [], []
    for name, build in models:
        model = build()
        size = length or min(KINDS[kind].default_length, max_positions(model.config))
        options: dict[str, Any] = {"input_ids": text(length=size)} if text and KINDS[kind].on_text else {"length": size}
        options |= {"layer": layer} if KINDS[kind].by_layer else {}
        try:
            results.append(dataclasses.replace(measure(model, **options), name=name))
        except analysis.NoRotationError as error:
            skipped.append(error)
    if not results or (skipped and kind != "rotary-frequencies"):
        raise skipped[0]
    for reason in skipped:
        typer.echo(f"skipped: {reason}", err=True)
    return results


def _decode(source: str, tokens: tuple[int, ...]) -> tuple[str, ...] | None:
    """The text of each token, or None if the checkpoint has no tokenizer."""
    from ..checkpoints import load_tokenizer

    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        return None
    return tuple(tokenizer.decode([token]).strip() or f"token {token}" for token in tokens)


def _to_json(result: Any) -> dict[str, Any]:
    """All fields and properties of a result, and its summary."""
    computed = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    values = dataclasses.asdict(result) | {name: getattr(result, name) for name in computed}
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    return {"summary": str(result), **plain}
