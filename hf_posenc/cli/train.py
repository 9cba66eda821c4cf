"""`hf-posenc train`; for several devices, `accelerate launch -m hf_posenc train`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..errors import PosEncError, install_command
from .app import Json, app, echo_json, parse_scheme_option
from .messages import announce_wait, exit_on_user_error

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..hub import PushResult
    from ..training import TrainRequest

DEFAULT_ARGUMENTS = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "adam_beta2": 0.98,
    "logging_steps": 10,
    "save_total_limit": 2,
}
"""Where our defaults differ from those of TrainingArguments. The learning rate depends on the model's width."""
COMMAND_LINE_ONLY = ("config", "restart", "as_json")
RECIPE_OPTIONS = ("reorder_heads", "fold_rotation", "match_biases", "teacher", "fit_ratio")
ByRecipe = functools.partial(Option, show_default="set by --recipe", rich_help_panel="Recipe")
# Panels of --help: one table of all options would be too narrow for the longest names.
OfData = functools.partial(Option, rich_help_panel="Data")
OfParameters = functools.partial(Option, rich_help_panel="Parameters to train")
_CONFIG_EXTRAS = "hf_posenc.train.extras"


def _load_config_file(context: typer.Context, path: Path | None) -> None:
    """Make the options in a YAML file the defaults of the command, and keep the others for TrainingArguments."""
    if path is None:
        return
    with exit_on_user_error(context):
        from ..validation import MAX_YAML_LENGTH, load_yaml

        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_YAML_LENGTH + 1)
        except (OSError, ValueError) as error:
            raise PosEncError(f"Cannot read --config {path}: {error}") from None
        content = load_yaml(text, f"--config {path}")
        if not isinstance(content, dict):
            raise PosEncError(f"--config {path} must be a mapping of options to values")
        values = {str(name).replace("-", "_"): value for name, value in content.items() if value is not None}
        for name in COMMAND_LINE_ONLY:
            if name in values:
                raise PosEncError(f"{name!r} cannot be set in --config {path}, only on the command line")
    # As text, so that values are parsed as on the command line: YAML reads 1e-3 as a string.
    names = _option_names(context)
    context.default_map = {name: _to_text(value) for name, value in values.items() if name in names}
    context.meta[_CONFIG_EXTRAS] = {name: value for name, value in values.items() if name not in names}


def _to_text(value: object) -> str:
    return json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)


def _option_names(context: typer.Context) -> set[str]:
    return {str(parameter.name) for parameter in context.command.params}


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    model: Annotated[str, Option(help="Checkpoint directory or Hub id, stock or variant.")],
    data: Annotated[
        str, Option(help="Text, JSONL, CSV or parquet files, a saved dataset, a Hub id, or 'self' to sample text.")
    ],
    train_length: Annotated[str, Option(help="Tokens per row, or stages: 512,1024, or with steps, 512:300,1024:100.")],
    output_dir: Annotated[Path, Option(help="Directory for checkpoints and the variant.")],
    scheme: Annotated[
        str | None,
        Option(
            help="New scheme of a stock model: a name, or JSON.",
            show_default="the variant's or the recipe's",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens to train on: chooses batch size and passes.", show_default="all of --data"),
    ] = None,
    passes: Annotated[
        int | None, Option(min=1, help="How often each row is used, with --tokens.", show_default="set by --tokens")
    ] = None,
    config: Annotated[
        Path | None,
        Option(
            help="YAML file with options; the command line takes precedence.", callback=_load_config_file, is_eager=True
        ),
    ] = None,
    eval_data: Annotated[str | None, Option(help="Text to evaluate on, in the same forms as --data.")] = None,
    recipe: Annotated[
        str | None,
        Option(
            help="recommended, naive (plain fine-tuning), drope (drop all positions), nope-layers (drop those of every "
            "fourth layer) or p-rope (drop the lowest frequencies).",
            show_default="recommended",
        ),
    ] = None,
    teacher: Annotated[bool | None, ByRecipe(help="Distill from the stock model.")] = None,
    teacher_model: Annotated[
        str | None, Option(help="Another checkpoint to distill from.", show_default="--model")
    ] = None,
    cache_teacher: Annotated[
        bool | None, Option("--cache-teacher", help="Run the teacher only in the first pass; store its predictions.")
    ] = None,
    reorder_heads: Annotated[
        bool | None, ByRecipe(help="Reorder heads so that each gets the bias that suits it best.")
    ] = None,
    fold_rotation: Annotated[
        bool | None, ByRecipe(help="Fold the mean of a dropped rotation into the query weights.")
    ] = None,
    match_biases: Annotated[bool | None, ByRecipe(help="Initialize biases from the stock model's attention.")] = None,
    fit_ratio: Annotated[float | None, ByRecipe(help="Fraction of the training tokens to fit attention on.")] = None,
    kl_loss_weight: Annotated[float | None, ByRecipe(help="Weight of the loss on the teacher's predictions.")] = None,
    hidden_loss_weight: Annotated[
        float | None, ByRecipe(help="Weight of the loss on the teacher's hidden states.")
    ] = None,
    label_loss_weight: Annotated[float | None, ByRecipe(help="Weight of the loss on the text itself.")] = None,
    trainable: Annotated[
        str | None,
        OfParameters(help="all, positions (scheme parameters only) or lora (those and adapters).", show_default="all"),
    ] = None,
    lora_rank: Annotated[int | None, OfParameters(min=1, help="Rank of the LoRA adapters.", show_default="16")] = None,
    position_learning_rate: Annotated[
        float | None, OfParameters(help="Learning rate of the scheme's parameters.", show_default="set by --recipe")
    ] = None,
    task: Annotated[
        str | None,
        Option(
            help="causal-lm, masked-lm, feature-extraction or classification.", show_default="from the model's head"
        ),
    ] = None,
    split: Annotated[str | None, OfData(help="Split of --data.", show_default="train")] = None,
    eval_split: Annotated[str | None, OfData(help="Split of --eval-data.", show_default="validation")] = None,
    text_column: Annotated[str | None, OfData(help="Column with the text.", show_default="text")] = None,
    label_column: Annotated[
        str | None, OfData(help="Column with the labels of a classification task.", show_default="label")
    ] = None,
    streaming: Annotated[bool | None, OfData("--streaming", help="Stream the data.")] = None,
    packing: Annotated[bool | None, Option(help="Pack documents into rows.", show_default="for causal models")] = None,
    positions: Annotated[
        str | None,
        OfData(
            help="How to sample positions up to --target-length: pose, randomized or shape.",
            show_default="none: consecutive positions",
        ),
    ] = None,
    target_length: Annotated[
        int | None,
        OfData(
            min=2,
            help="Length up to which --positions samples positions; required with it.",
            show_default="none: --train-length",
        ),
    ] = None,
    mlm_probability: Annotated[
        float | None, OfData(help="Fraction of tokens to mask, for masked LMs.", show_default="0.15")
    ] = None,
    self_generated_rows: Annotated[
        int | None, OfData(min=1, help="Rows to sample with --data self.", show_default="as many as the run uses")
    ] = None,
    self_eval_rows: Annotated[
        int | None,
        Option(
            min=0,
            help="Rows sampled from the original to evaluate on as well; 0 for none.",
            show_default="8 with --eval-data, for causal models",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum length to write to the variant's files.",
            show_default="the longest of stock, training and table length",
        ),
    ] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.", show_default="main")] = None,
    restart: Annotated[bool, Option("--restart", help="Delete an earlier run in --output-dir.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model under a new position scheme.

    Takes every field of transformers' TrainingArguments as well: --max-steps,
    --learning-rate, --per-device-train-batch-size, --bf16, --report-to, ...

    Rerun the same command to resume an interrupted run.

    Example: hf-posenc train --model gpt2 --scheme alibi --data self --train-length 512 --output-dir out

    Example: hf-posenc train --model ./my-llama --recipe drope --data text.txt --train-length 2048 --output-dir out

    Example: accelerate launch -m hf_posenc train --config run.yaml --output-dir out
    """
    skipped = (*COMMAND_LINE_ONLY, "output_dir", "passes")
    options = {name: value for name, value in context.params.items() if value is not None and name not in skipped}
    # Trainer prints its logs, which are not JSON.
    stdout = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with exit_on_user_error(context), announce_wait(f"Loading {model} and {data}"), stdout:
        not_installed = [name for name in ("accelerate", "datasets") if find_spec(name) is None]
        if not_installed:
            raise PosEncError(f"Training requires {' and '.join(not_installed)}: {install_command('train')}")
        from ..training import train as run

        request = build_request(options)
        arguments = parse_training_arguments(request, context)
        repo = _hub_repo(arguments)
        directory = run(request, arguments, restart)
        is_main_process, pushed = arguments.process_index == 0, None
        if repo is not None and is_main_process:
            from ..hub import push_directory

            options = {"private": arguments.hub_private_repo, "revision": getattr(arguments, "hub_revision", None)}
            with announce_wait(f"Pushing {directory} to {repo}"):
                pushed = push_directory(directory, repo, token=arguments.hub_token, **options)
    if is_main_process and as_json:
        echo_json(_summary(directory, pushed))
    elif is_main_process:
        typer.echo(_describe(directory, request))
        if pushed is not None:
            typer.echo(str(pushed))


def build_request(options: dict[str, Any]) -> TrainRequest:
    """The training request of the command's options. Options that are not set keep their defaults."""
    from ..training import TrainRequest, get_recipe

    if "scheme" in options:
        options["scheme"] = parse_scheme_option(options["scheme"])
    recipe = get_recipe(options.pop("recipe", "recommended"), options.get("scheme"))
    kinds = [kind for kind in ("kl", "hidden", "label") if f"{kind}_loss_weight" in options]
    weights = {kind: options.pop(f"{kind}_loss_weight") for kind in kinds}
    changes: dict[str, Any] = {field: options.pop(field) for field in RECIPE_OPTIONS if field in options}
    changes["loss_weights"] = dataclasses.replace(recipe.loss_weights, **weights)
    return TrainRequest(recipe=dataclasses.replace(recipe, **changes), **options)


def parse_training_arguments(request: TrainRequest, context: typer.Context) -> TrainingArguments:
    """TrainingArguments from our defaults, a config file's values and the command line, in this order."""
    from transformers import HfArgumentParser, TrainingArguments

    from ..training import check_numbers

    values = {**DEFAULT_ARGUMENTS, "output_dir": context.params["output_dir"], **context.meta.get(_CONFIG_EXTRAS, {})}
    words: list[str] = []
    for name, value in values.items():
        words += [f"--{name}", *map(_to_text, value if isinstance(value, list) else [value])]
    words += context.args
    parser = HfArgumentParser(TrainingArguments, prog="hf-posenc train", usage="%(prog)s [options]", allow_abbrev=False)
    try:
        arguments, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except (ValueError, TypeError, ImportError, ArithmeticError) as error:  # values that contradict each other
        raise PosEncError(f"The training arguments do not fit together: {error}") from error
    if unknown:
        names = [*_option_names(context), *(field.name for field in dataclasses.fields(TrainingArguments))]
        options = [f"--{name.replace('_', '-')}" for name in names]
        matches = difflib.get_close_matches(unknown[0].replace("_", "-"), options, 1)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise PosEncError(
            f"Unknown option {' '.join(unknown)}.{hint} Expected one of the options in --help, or a field of "
            "transformers.TrainingArguments"
        )
    check_numbers(arguments)
    given = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    _apply_budget(request, arguments, context.params["passes"], given)
    return arguments


def _apply_budget(request: TrainRequest, arguments: TrainingArguments, passes: int | None, given: set[str]) -> None:
    """Set what follows from the number of tokens and the model's width, unless it was given."""
    from ..training import budget_arguments, default_learning_rate, load_config, parse_train_length, rows_per_step

    length = parse_train_length(request.train_length, arguments.max_steps)[0].length
    if request.tokens is not None:
        if arguments.max_steps > 0:
            raise PosEncError("--tokens and --max-steps both say how long to train: leave one of them out")
        budget = budget_arguments(request.tokens, length, passes, arguments.world_size)
        for name in budget.keys() - given:
            setattr(arguments, name, budget[name])
    elif passes is not None:
        raise PosEncError("--passes needs --tokens; without a budget, use --num-train-epochs")
    if "learning_rate" not in given:
        config = load_config(request)
        arguments.learning_rate = default_learning_rate(config, rows_per_step(arguments) * length)


def _hub_repo(arguments: TrainingArguments) -> str | None:
    """The repository for --push-to-hub. The token is checked before training."""
    from ..training import check_hub_arguments

    check_hub_arguments(arguments)
    if not arguments.push_to_hub:
        return None
    from huggingface_hub import HfApi

    from ..checkpoints import translate_hub_errors

    arguments.push_to_hub = False  # Trainer would upload checkpoints too, with another model card
    repo = str(arguments.hub_model_id or Path(arguments.output_dir).resolve().name)
    if arguments.process_index == 0:
        with translate_hub_errors(repo):
            HfApi(token=arguments.hub_token).whoami()
    return repo


def _describe(directory: Path, request: TrainRequest) -> str:
    from ..checkpoints import RECOVERY_FILE, read_json_object
    from ..training import format_recovery, infer_objective, load_config

    objective = infer_objective(load_config(request), request.task)
    return format_recovery(read_json_object(directory / RECOVERY_FILE), directory, objective)


def _summary(directory: Path, pushed: PushResult | None) -> dict[str, object]:
    from ..checkpoints import RECOVERY_FILE, RUN_STATE_FILE, read_json_object

    state, recovery = read_json_object(directory / RUN_STATE_FILE), directory / RECOVERY_FILE
    return {
        "directory": str(directory),
        "position_scheme": read_json_object(directory / "config.json")["position_scheme"],
        **{name: state[name] for name in ("steps", "train_loss", "dataset", "arguments", "request")},
        "recovery": read_json_object(recovery) if recovery.is_file() else None,
        "pushed": None if pushed is None else dataclasses.asdict(pushed),
    }
