"""`hf-posenc train`: also under `accelerate launch -m hf_posenc train ...`, for several devices."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import app, said_plainly, scheme_of

if TYPE_CHECKING:
    from ..training.request import Request

OTHER_DEFAULTS = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "adam_beta2": 0.98,
    "logging_steps": 10,
    "save_total_limit": 2,
}
"""Where ours are not those of TrainingArguments. The learning rate is found by the model's width."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A checkpoint's directory or Hub id; stock, or a variant.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Of a stock model: name of a scheme, or JSON.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A text, JSONL, CSV or parquet file, a directory or pattern of them, a saved dataset, a Hub id, or "
            "'self': text that a causal model writes itself."
        ),
    ] = None,
    train_length: Annotated[
        str | None, typer.Option(help="Tokens of a row; or stages: 512,1024, or with their steps, 512:300,1024:100.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Where checkpoints and the variant go.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with any of these options; those given here win.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Text to evaluate on, as --data.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="recommended, or naive: change the encoding and fine-tune.")
    ] = None,
    teacher: Annotated[bool | None, typer.Option(help="Learn from the model as it was.")] = None,
    teacher_model: Annotated[str | None, typer.Option(help="Another teacher than that.")] = None,
    fit_share: Annotated[
        float | None, typer.Option(help="Of the steps, spent before on fitting attention to the old encoding's.")
    ] = None,
    handover_share: Annotated[
        float | None, typer.Option(help="Of the steps, over which the old encoding fades.")
    ] = None,
    state_weight: Annotated[float | None, typer.Option(help="Of the teacher's hidden states in the loss.")] = None,
    prediction_weight: Annotated[float | None, typer.Option(help="Of the teacher's predictions in the loss.")] = None,
    label_weight: Annotated[
        float | None, typer.Option(help="Of the text itself in the loss, beside a teacher.")
    ] = None,
    train_: Annotated[
        str | None, typer.Option("--train", help="all, positions (only the scheme's parameters), or lora (and these).")
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Of the adapters that --train lora adds.")] = None,
    position_learning_rate: Annotated[float | None, typer.Option(help="For the scheme's parameters.")] = None,
    task: Annotated[str | None, typer.Option(help="causal-lm, masked-lm, states or classification.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a dataset to train on.")] = None,
    eval_split: Annotated[str | None, typer.Option(help="Of a dataset to evaluate on.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Where the text is, if not in 'text'.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Where the labels are, to classify.")] = None,
    streaming: Annotated[bool | None, typer.Option("--streaming", help="Read the data as it is needed.")] = None,
    packing: Annotated[
        bool | None, typer.Option(help="Several documents to a row; causal models do unless told not to.")
    ] = None,
    mask_share: Annotated[float | None, typer.Option(help="Of the tokens, to be guessed by masked models.")] = None,
    self_rows: Annotated[int | None, typer.Option(help="How many rows a model writes itself.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a Hub id: branch, tag or commit.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what the directory has of an earlier run.")
    ] = False,
) -> None:
    """Bring a model back to quality under a new position scheme.

    Every field of transformers' TrainingArguments is an option as well: --max-steps, --learning-rate,
    --per-device-train-batch-size, --bf16, --gradient-checkpointing, --report-to, and so on.

    Asked for the same again, a run that was cut short goes on from its last whole checkpoint.

    Example: hf-posenc train --model gpt2 --scheme alibi --data self --train-length 512 --output-dir out

    Example: accelerate launch -m hf_posenc train --config run.yaml --output-dir out
    """
    given = {
        name: value for name, value in context.params.items() if value is not None and name not in ("config", "restart")
    }
    with said_plainly():
        _refuse_without_extra()
        asked = {**_from_file(config), **{("trained" if name == "train_" else name): v for name, v in given.items()}}
        from ..training.run import train as run

        request, rest = request_of(asked)
        arguments = training_arguments(request, rest, context.args)
        directory = run(request, arguments, restart)
    if arguments.process_index == 0:
        typer.echo(f"The variant is in {directory}: AutoModel.from_pretrained({str(directory)!r})")


def _refuse_without_extra() -> None:
    missing = [name for name in ("accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise ValueError(f"training takes {' and '.join(missing)}, not installed here: pip install hf_posenc[train]")


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must be a mapping of options to values")
    named = {str(name).replace("-", "_"): value for name, value in found.items()}
    return {("trained" if name == "train" else name): value for name, value in named.items()}


def request_of(asked: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
    """What is asked of us, and what is left for TrainingArguments."""
    from ..training.recipe import RECIPES
    from ..training.request import Request

    for name in ("model", "data", "train_length", "output_dir"):
        if name not in asked:
            raise ValueError(f"--{name.replace('_', '-')} is missing")
    asked = dict(asked)
    name = asked.pop("recipe", "recommended")
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are {sorted(RECIPES)}")
    recipe = RECIPES[name]
    for option, field in (("teacher", "teacher"), ("fit_share", "fit"), ("handover_share", "handover")):
        if option in asked:
            recipe = dataclasses.replace(recipe, **{field: asked.pop(option)})
    weights = recipe.weights
    for option, field in (("state_weight", "states"), ("prediction_weight", "predictions"), ("label_weight", "labels")):
        if option in asked:
            weights = dataclasses.replace(weights, **{field: asked.pop(option)})
    if "teacher_model" in asked:
        asked["teacher"] = asked.pop("teacher_model")
    if isinstance(asked.get("scheme"), str):
        asked["scheme"] = scheme_of(asked["scheme"])
    asked["train_length"] = str(asked["train_length"])
    own = {field.name for field in dataclasses.fields(Request)}
    mine = {name: value for name, value in asked.items() if name in own}
    rest = {name: value for name, value in asked.items() if name not in own}
    return Request(**mine, recipe=dataclasses.replace(recipe, weights=weights)), rest


def training_arguments(request: Request, from_file: dict[str, Any], from_line: list[str]) -> Any:
    """TrainingArguments from what the file and the command line say, in this order."""
    from transformers import HfArgumentParser, TrainingArguments

    from ..training.parts import config_of
    from ..training.recipe import recommended_learning_rate

    model = config_of(request)
    options = {**OTHER_DEFAULTS, "learning_rate": recommended_learning_rate(model), **from_file}
    line = []
    for name, value in options.items():
        told = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
        line += [f"--{name}", told]
    usage = "hf-posenc train [our options] [any field of transformers.TrainingArguments, as --max-steps 100]"
    parser = HfArgumentParser(TrainingArguments, prog="hf-posenc train", usage=usage, allow_abbrev=False)
    (arguments,) = parser.parse_args_into_dataclasses([*line, *from_line])
    return arguments
