"""`hf-posenc train`: also under `accelerate launch -m hf_posenc train ...`, for several devices."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from .app import Json, app, said_plainly, scheme_of

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
NOT_ASKED = ("config", "restart", "as_json", "json", "help")
"""Options that say nothing of the run itself."""
OURS = ("--model", "--scheme", "--data", "--train-length", "--output-dir", "--eval-data", "--streaming", "--packing")
"""Some that are often meant."""


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
    as_json: Json = False,
) -> None:
    """Bring a model back to quality under a new position scheme.

    Every field of transformers' TrainingArguments is an option as well: --max-steps, --learning-rate,
    --per-device-train-batch-size, --bf16, --gradient-checkpointing, --report-to, and so on.

    Asked for the same again, a run that was cut short goes on from its last whole checkpoint.

    Example: hf-posenc train --model gpt2 --scheme alibi --data self --train-length 512 --output-dir out

    Example: accelerate launch -m hf_posenc train --config run.yaml --output-dir out
    """
    given = {name: value for name, value in context.params.items() if value is not None and name not in NOT_ASKED}
    # What a Trainer prints on its way is no JSON.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with said_plainly(), elsewhere:
        _refuse_without_extra()
        asked = _under_our_names({**_from_file(config), **given})
        from ..training.run import train as run

        request, rest = request_of(asked)
        arguments = training_arguments(request, rest, context.args)
        repo = _repo_to_push_to(arguments)
        directory = run(request, arguments, restart)
        pushed = _push(directory, repo, arguments) if repo is not None and arguments.process_index == 0 else None
    if arguments.process_index:
        return
    if as_json:
        typer.echo(json.dumps(_result(directory, pushed), indent=1))
        return
    typer.echo(f"The variant is in {directory}: AutoModel.from_pretrained({str(directory)!r})")
    if pushed is not None:
        typer.echo(str(pushed))


def _result(directory: Path, pushed: Any) -> dict[str, Any]:
    """What came out, for programs."""
    from ..checkpoints.file_names import RECOVERY_FILE
    from ..training.request import NOTE

    note = json.loads((directory / NOTE).read_text(encoding="utf-8"))
    recovery = directory / RECOVERY_FILE
    return {
        "directory": str(directory),
        "position_scheme": json.loads((directory / "config.json").read_text(encoding="utf-8"))["position_scheme"],
        **{name: note[name] for name in ("steps", "train_loss", "rows", "settings", "request") if name in note},
        "recovery": json.loads(recovery.read_text(encoding="utf-8")) if recovery.is_file() else None,
        "pushed": None if pushed is None else dataclasses.asdict(pushed),
    }


def _repo_to_push_to(arguments: Any) -> str | None:
    """With --push-to-hub, whose token is tried before anything is trained. The Trainer's own push would send the
    whole directory, checkpoints and all, with another card: it is told of none."""
    if not arguments.push_to_hub:
        return None
    from ..hub.troubles import told_what_to_do

    arguments.push_to_hub = False
    repo = str(arguments.hub_model_id or Path(arguments.output_dir).resolve().name)
    if arguments.process_index == 0:
        with told_what_to_do(repo):
            from huggingface_hub import HfApi

            HfApi(token=arguments.hub_token).whoami()
    return repo


def _push(directory: Path, repo: str, arguments: Any) -> Any:
    from ..hub.push import push_directory

    options = {"private": arguments.hub_private_repo, "revision": getattr(arguments, "hub_revision", None)}
    return push_directory(directory, repo, token=arguments.hub_token, **options)


def _under_our_names(asked: dict[str, Any]) -> dict[str, Any]:
    """`--train` says what is trained."""
    return {("trained" if name == "train_" else name): value for name, value in asked.items()}


def _refuse_without_extra() -> None:
    missing = [name for name in ("accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise ValueError(f"training takes {' and '.join(missing)}, not installed here: pip install hf_posenc[train]")


def _from_file(path: Path | None) -> dict[str, Any]:
    """What a YAML file says, each of our options read as it would be on the command line."""
    if path is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must be a mapping of options to values")
    ours = {name: hint for name, hint in get_type_hints(train).items() if name not in ("context", "scheme", "return")}
    read = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        name = "train_" if name == "train" else name
        if name in NOT_ASKED:
            raise ValueError(f"{key!r} in --config {path} is for the command line only")
        if value is not None:
            read[name] = _as_option(str(key), ours[name], value, path) if name in ours else value
    return read


def _as_option(name: str, hint: Any, value: Any, path: Path) -> Any:
    """YAML reads 1e-3 as words and 512 as a number: a value of the kind that the option has."""
    kind = next(part for part in (*get_args(hint), hint) if part is not type(None))
    try:
        if isinstance(value, (dict, list)) or (kind is bool) != isinstance(value, bool):
            raise ValueError(value)
        return value if kind is bool else kind(str(value))
    except ValueError:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "one value")
        raise ValueError(f"{name!r} in --config {path} must be {wanted}, got {value!r}") from None


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
    for option, field in (("teacher", "teacher"), ("fit_share", "fit")):
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
        told = [json.dumps(value)] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        line += [f"--{name}", *map(str, told)]
    usage = "hf-posenc train [our options] [any field of transformers.TrainingArguments, as --max-steps 100]"
    parser = HfArgumentParser(TrainingArguments, prog="hf-posenc train", usage=usage, allow_abbrev=False)
    arguments, unknown = parser.parse_args_into_dataclasses([*line, *from_line], return_remaining_strings=True)
    if unknown:
        _refuse_unknown(unknown, parser)
    return arguments


def _refuse_unknown(words: list[str], parser: Any) -> None:
    known = [name for action in parser._actions for name in action.option_strings if "_" not in name]
    near = difflib.get_close_matches(words[0].replace("_", "-"), [*known, *OURS], 1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"{' '.join(words)} is no option of hf-posenc train.{meant} It takes those that --help lists, and every field "
        "of transformers.TrainingArguments"
    )
