"""`hf-posenc eval`: also under `accelerate launch -m hf_posenc eval ...`, for several devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Json, app, said_plainly


@app.command("eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Checkpoints: directories or Hub ids; name=path gives a name.")],
    data: Annotated[
        str,
        typer.Option(help="A text, JSONL, CSV or parquet file, a directory or pattern of them, a dataset, a Hub id."),
    ],
    lengths: Annotated[
        str, typer.Option(help="Of windows, with commas: in trained lengths (0.5x) or in tokens (512).")
    ] = "0.5x,1x,2x,4x",
    measure: Annotated[
        str, typer.Option(help="With commas: perplexity, passkey, order, similarity; or all.")
    ] = "perplexity",
    trained_length: Annotated[
        int | None, typer.Option(help="What 1x is; else the positions that the checkpoints were made with.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Slide the window by so many tokens, and count those that are new in it.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Of the text, from its beginning.")] = 131_072,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 4096,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else as it was saved.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="The same as --dtype bfloat16.")] = False,
    task: Annotated[str | None, typer.Option(help="causal-lm or masked-lm; else by the head of the model.")] = None,
    mask_share: Annotated[float, typer.Option(help="Of the tokens, to be guessed by masked models.")] = 0.15,
    bins: Annotated[int, typer.Option(help="Parts of a window that are told apart.")] = 16,
    depths: Annotated[str, typer.Option(help="Of passkeys: 0 is the beginning of the text.")] = "0,0.25,0.5,0.75,1",
    trials: Annotated[int, typer.Option(help="Passkeys for each length and depth.")] = 10,
    blocks: Annotated[str, typer.Option(help="Sizes of blocks to shuffle tokens in, or all.")] = "4,16,all",
    original: Annotated[
        str | None, typer.Option(help="The model that embeddings are compared with; else the first.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of masks, keys and shuffling.")] = 0,
    split: Annotated[str, typer.Option(help="Of a dataset.")] = "test",
    text_column: Annotated[str | None, typer.Option(help="Where the text is, if not in 'text'.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of Hub ids: branch, tag or commit.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1; else the best there is.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="A JSON file for results as they come in; what it has is not measured again.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what that file has.")] = False,
    csv: Annotated[Path | None, typer.Option(help="A CSV file to write, one row a number.")] = None,
    plots: Annotated[Path | None, typer.Option(help="A directory for figures.")] = None,
    write_curve: Annotated[
        bool, typer.Option("--write-curve", help="Write length_curve.json beside the model, for its card.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show how far it is.")] = True,
    as_json: Json = False,
) -> None:
    """Measure models side by side: perplexity by length and place, passkeys, order, likeness to the original.

    A model that cannot go on shows where it ends, and why.

    Example: hf-posenc eval gpt2 ./gpt2-rope --data test.txt --lengths 0.5x,1x,2x,4x --results eval.json --plots plots

    Example: accelerate launch -m hf_posenc eval ./variant --data test.txt --measure all --bf16
    """
    with said_plainly():
        from ..evaluation.run import evaluate as run

        sources = _sources(models)
        _refuse_curve(write_curve, sources, measure)
        _refuse_places(csv, plots)
        found = run(
            sources,
            data,
            lengths=_list(lengths),
            measures=_measures(measure),
            trained_length=trained_length,
            original=original,
            results=results,
            restart=restart,
            device=device,
            split=split,
            text_column=text_column,
            revision=revision,
            progress=progress,
            stride=stride,
            max_tokens=max_tokens,
            batch_tokens=batch_tokens,
            dtype=_dtype(dtype, bf16),
            task=task,
            mask_share=mask_share,
            bins=bins,
            depths=tuple(_number(depth, "--depths") for depth in _list(depths)),
            trials=trials,
            blocks=tuple(None if block == "all" else int(_number(block, "--blocks")) for block in _list(blocks)),
            confidence=confidence,
            seed=seed,
        )
        if int(os.environ.get("RANK", "0")):
            return  # the first process says what all have found
        _write(found, csv, plots, Path(next(iter(_paths(sources)))) if write_curve else None)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} in {option} is no number") from None


def _measures(text: str) -> list[str]:
    from ..evaluation.results import MEASURES

    return list(MEASURES) if text == "all" else _list(text)


def _dtype(dtype: str | None, bf16: bool) -> str | None:
    if bf16 and dtype not in (None, "bfloat16"):
        raise ValueError(f"--bf16 and --dtype {dtype} ask for two things: leave out one")
    return "bfloat16" if bf16 else dtype


def _sources(models: list[str]) -> Any:
    """A list, or names to paths where one is given with a name: the others then go by the last part of theirs."""
    if not any("=" in model and not Path(model).exists() for model in models):
        return models
    named = {}
    for model in models:
        name, equals, path = model.partition("=")
        named.update({name: path} if equals and not Path(model).exists() else {Path(model).name: model})
    if len(named) != len(models):
        raise ValueError(f"two of {models} have the same name")
    return named


def _paths(sources: Any) -> list[str]:
    return list(sources.values() if isinstance(sources, dict) else sources)


def _refuse_curve(wanted: bool, sources: Any, measure: str) -> None:
    """Before anything is measured."""
    paths = _paths(sources)
    if wanted and (len(paths) != 1 or not Path(paths[0]).is_dir()):
        raise ValueError("--write-curve writes beside one model: name one directory, not a Hub id")
    if wanted and "perplexity" not in _measures(measure):
        raise ValueError("--write-curve writes perplexities: add perplexity to --measure")


def _refuse_places(csv: Path | None, plots: Path | None) -> None:
    """What cannot be written, before anything is measured for it."""
    if csv is not None:
        from ..evaluation.report import place_for

        place_for(csv)
    if plots is not None:
        from ..plots.style import create_figure_directory, new_figure

        new_figure(1, 1)
        create_figure_directory(plots)


def _write(found: Any, csv: Path | None, plots: Path | None, beside: Path | None) -> None:
    if csv is not None:
        found.write_csv(csv)
    if plots is not None:
        from ..evaluation.figures import write_figures

        write_figures(found, plots)
    if beside is not None:
        found.write_curve(beside)
