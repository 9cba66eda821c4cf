"""The commands `convert`, `export`, `inspect` and `push`."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ..errors import PosEncError
from .app import Json, app, echo_json, parse_scheme_option
from .messages import announce_wait, exit_on_user_error


@app.command()
def convert(
    context: typer.Context,
    source: Annotated[str, Argument(help="A checkpoint directory or a Hub id.")],
    scheme: Annotated[str, Option(help="A scheme name, or JSON for options or several schemes.")],
    out: Annotated[Path, Option(help="The output directory.")],
    force: Annotated[bool, Option("--force", help="Replace the output directory if it is not empty.")] = False,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Seed for schemes with random initial values.")] = 0,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.", show_default="main")] = None,
    rotary_weights: Annotated[
        str | None, Option(help="Reorder rotary features: interleaved_to_halves or halves_to_interleaved.")
    ] = None,
    warm_start: Annotated[
        Path | None,
        Option(help="A text file: initialize the scheme from the source's attention on it. Loads both models."),
    ] = None,
    drift_text: Annotated[
        Path | None, Option(help="A text file on which to compare the outputs of source and variant.")
    ] = None,
    stock: Annotated[
        bool, Option("--stock", help="Write a stock checkpoint, as `export` does, if the scheme allows it.")
    ] = False,
    max_length: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum length to write to its files, for other tools.",
            show_default="the source's, or that of a longer table",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to another position scheme, without building the model.

    Example: hf-posenc convert openai-community/gpt2 --scheme rope --out gpt2-rope

    Example: hf-posenc convert ./my-bert --scheme '["learned", {"type": "t5", "num_buckets": 64}]' --out my-bert-t5

    Example: hf-posenc convert ./my-llama --scheme '{"type": "rope", "theta": 5e5}' --out my-llama-long --stock
    """
    with exit_on_user_error(context), announce_wait(f"Converting {source}"):
        from ..checkpoints import convert_checkpoint, convert_to_stock

        start = None
        if warm_start is not None:
            from ..training import ClosedFormStart

            start = ClosedFormStart(warm_start)
        result = (convert_to_stock if stock else convert_checkpoint)(
            source,
            parse_scheme_option(scheme),
            out,
            force=force,
            seed=seed,
            revision=revision,
            rotary_weights=rotary_weights,  # type: ignore[arg-type]
            warm_start=start,
            drift_text=drift_text,
            max_length=max_length,
            notify=None if stock else partial(typer.echo, err=True),
        )
    echo_json(dataclasses.asdict(result)) if as_json else typer.echo(str(result))


@app.command()
def export(
    context: typer.Context,
    source: Annotated[str, Argument(help="The directory or Hub id of a variant.")],
    out: Annotated[Path, Option(help="The output directory.")],
    max_positions: Annotated[
        int | None, Option(min=1, help="Number of positions of the stock model.", show_default="the variant's")
    ] = None,
    text: Annotated[
        Path | None, Option(help="A text file on which to compare both models, in addition to random tokens.")
    ] = None,
    verify: Annotated[
        bool, Option("--verify/--no-verify", help="Load both models in float32 and compare their outputs.")
    ] = True,
    force: Annotated[bool, Option("--force", help="Replace the output directory if it is not empty.")] = False,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.", show_default="main")] = None,
    as_json: Json = False,
) -> None:
    """Write a variant as a stock checkpoint that computes the same and loads without this package.

    Refuses schemes that no stock architecture has, and lists those that can be exported.

    Example: hf-posenc export gpt2-rope --out gpt2-rope-stock

    Example: hf-posenc export my-bert-sinusoidal --out stock --max-positions 2048 --text sample.txt
    """
    with exit_on_user_error(context), announce_wait(f"Exporting {source}"):
        from ..checkpoints import export_checkpoint

        result = export_checkpoint(
            source, out, max_positions=max_positions, text=text, verify=verify, force=force, revision=revision
        )
    echo_json(dataclasses.asdict(result)) if as_json else typer.echo(str(result))


@app.command()
def inspect(
    context: typer.Context,
    directory: Annotated[Path, Argument(help="A variant, a stock checkpoint or the output of a training run.")],
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains and whether it is intact, without loading weights.

    Shows the position scheme, the attention path of each layer, parameters,
    files, and the progress of a training run. Exits with 2 if anything is
    damaged or missing.

    Example: hf-posenc inspect gpt2-rope

    Example: hf-posenc inspect out/checkpoint-500 --json
    """
    with exit_on_user_error(context), announce_wait(f"Inspecting {directory}"):
        from ..checkpoints import inspect_checkpoint

        inspection = inspect_checkpoint(directory)
        echo_json(inspection.to_dict()) if as_json else typer.echo(str(inspection))
        if inspection.problems:
            raise PosEncError("; ".join(inspection.problems))


@app.command()
def push(
    context: typer.Context,
    directory: Annotated[Path, Argument(help="The directory of a variant.")],
    repo_id: Annotated[str, Argument(help="The repository, such as user/model; created if it does not exist.")],
    private: Annotated[
        bool, Option("--private", help="Create a private repository; refuse one that is public.")
    ] = False,
    revision: Annotated[
        str | None, Option(help="The branch; created if it does not exist.", show_default="main")
    ] = None,
    message: Annotated[str | None, Option(help="The commit message.")] = None,
    create_pr: Annotated[bool, Option("--create-pr", help="Open a pull request.")] = False,
    base_model: Annotated[
        str | None, Option(help="Hub id of the stock checkpoint, for the model card.", show_default="as recorded")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Overwrite a repository that contains something other than a variant.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Push a variant to the Hub with a model card.

    Uses the token of `hf auth login` or HF_TOKEN. A README.md that somebody wrote is never replaced.

    Example: hf-posenc push gpt2-rope me/gpt2-rope --private
    """
    with exit_on_user_error(context), announce_wait(f"Pushing {directory} to {repo_id}"):
        from ..hub import push_directory

        result = push_directory(
            directory,
            repo_id,
            private=private or None,
            revision=revision,
            message=message,
            create_pr=create_pr,
            base_model=base_model,
            force=force,
        )
    echo_json(dataclasses.asdict(result)) if as_json else typer.echo(str(result))
