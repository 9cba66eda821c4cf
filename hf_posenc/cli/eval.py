"""`hf-posenc eval`; on several devices, `accelerate launch -m hf_posenc eval ...`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ..errors import PosEncError
from .app import Json, app, echo_json
from .messages import announce_wait, exit_on_user_error

COMMAND_LINE_ONLY = ("results", "csv", "plots", "save_length_curve", "as_json")


@app.command("eval")
def evaluate(
    context: typer.Context,
    models: Annotated[list[str], Argument(help="Checkpoint directories or Hub ids; name=path sets a name.")],
    data: Annotated[str, Option(help="Text, JSONL, CSV or parquet (file, directory or pattern), or a Hub dataset.")],
    lengths: Annotated[str, Option(help="In tokens (512) or multiples of the trained length (2x).")] = "0.5x,1x,2x,4x",
    metrics: Annotated[str, Option(help="perplexity, passkey, order, similarity, or all.")] = "perplexity",
    trained_length: Annotated[
        int | None, Option(help="The length that 1x stands for.", show_default="the models' positions")
    ] = None,
    stride: Annotated[
        int | None, Option(help="Tokens to slide windows by, scoring only the new ones.", show_default="the length")
    ] = None,
    max_tokens: Annotated[int, Option(help="Tokens to read from the start of the text.")] = 131_072,
    batch_tokens: Annotated[int, Option(help="Tokens per batch.")] = 4096,
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16.", show_default="as saved")] = None,
    task: Annotated[
        str | None, Option(help="causal-lm, masked-lm or feature-extraction.", show_default="from the model's head")
    ] = None,
    mlm_probability: Annotated[float, Option(help="Fraction of tokens that masked models predict.")] = 0.15,
    position_bins: Annotated[int, Option(help="Bins for perplexity by position in the window.")] = 16,
    passkey_depths: Annotated[str, Option(help="Where to hide passkeys: 0 (start) to 1 (end).")] = "0,0.25,0.5,0.75,1",
    passkey_trials: Annotated[int, Option(help="Passkeys per length and depth.")] = 10,
    shuffle_blocks: Annotated[str, Option(help="Block sizes to shuffle; all: the whole window.")] = "4,16,all",
    reference: Annotated[str | None, Option(help="Model to compare embeddings with.", show_default="the first")] = None,
    confidence: Annotated[float, Option(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, Option(help="Seed for masking, passkeys and shuffling.")] = 0,
    split: Annotated[str, Option(help="Split of a dataset.")] = "test",
    text_column: Annotated[str | None, Option(help="Column that contains the text.", show_default="text")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of Hub ids.", show_default="main")] = None,
    device: Annotated[
        str | None, Option(help="Device, such as cpu or cuda:1.", show_default="the best available")
    ] = None,
    results: Annotated[
        Path | None, Option(help="JSON file to save results to as they arrive; rerun to resume.")
    ] = None,
    restart: Annotated[bool, Option("--restart", help="Discard earlier results in --results.")] = False,
    csv: Annotated[Path | None, Option(help="CSV file to write, with one row per number.")] = None,
    plots: Annotated[Path | None, Option(help="Directory to write figures to.")] = None,
    save_length_curve: Annotated[
        bool, Option("--save-length-curve", help="Write length_curve.json, for the model card.")
    ] = False,
    progress: Annotated[bool, Option(help="Show progress bars.")] = True,
    as_json: Json = False,
) -> None:
    """Compare models on a text: perplexity by length and position, passkeys, order sensitivity, embedding similarity.

    A model that cannot process a length is reported with the reason and the longest input that it accepts.

    Example: hf-posenc eval gpt2 ./gpt2-rope --data test.txt --lengths 0.5x,1x,2x,4x --results eval.json --plots plots

    Example: accelerate launch -m hf_posenc eval ./variant --data test.txt --metrics all --dtype bfloat16
    """
    label = f"Evaluating {len(models)} model{'s' * (len(models) > 1)} on {data}"
    with exit_on_user_error(context), announce_wait(label), contextlib.ExitStack() as locks:
        from ..checkpoints import check_writable, lock_output
        from ..evaluation import METRICS
        from ..evaluation import evaluate as run
        from ..plots.evaluation import save_evaluation_figures
        from ..plots.style import new_figure

        selected = list(METRICS) if metrics == "all" else _split(metrics)
        if csv is not None:
            check_writable(csv)
        if plots is not None:
            new_figure(1, 1)  # fails if matplotlib is missing
            check_writable(plots / "length_curve.png")
        is_main_process = not int(os.environ.get("RANK", "0"))
        for output in (csv, plots) if is_main_process else ():
            if output is not None and (output.is_file() or output.is_dir() or not output.exists()):  # not a device
                locks.enter_context(lock_output(output))
        if save_length_curve and (len(models) != 1 or not Path(models[0]).is_dir() or "perplexity" not in selected):
            raise PosEncError("--save-length-curve requires one model directory and the metric perplexity")
        options = {name: value for name, value in context.params.items() if name not in COMMAND_LINE_ONLY}
        options |= {"models": _parse_models(models), "metrics": selected, "lengths": _split(lengths)}
        try:
            options["passkey_depths"] = [float(depth) for depth in _split(passkey_depths)]
            options["shuffle_blocks"] = [None if size == "all" else int(size) for size in _split(shuffle_blocks)]
        except ValueError as error:
            raise PosEncError(f"--passkey-depths and --shuffle-blocks must be numbers: {error}") from None
        report = run(**options, results_path=results)
        if not is_main_process:
            return  # only the main process reports
        if csv is not None:
            report.save_csv(csv)
        if plots is not None:
            save_evaluation_figures(report, plots)
        if save_length_curve:
            report.save_length_curve(models[0])
    echo_json(report.to_dict()) if as_json else typer.echo(str(report))


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _parse_models(models: list[str]) -> list[str] | dict[str, str]:
    """A list, or a mapping from names to paths if any model has a name; the others are named after their paths."""
    pairs = [model.partition("=") if not Path(model).exists() else (model, "", "") for model in models]
    if not any(equals for _, equals, _ in pairs):
        return models
    named = {name if equals else Path(name).name: path if equals else name for name, equals, path in pairs}
    if len(named) != len(models):
        raise PosEncError(f"Two of {models} have the same name: set different ones")
    return named
