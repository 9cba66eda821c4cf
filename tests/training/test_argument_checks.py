"""TrainingArguments without effect are refused, and every field is known to be one or the other."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.errors import PosEncError
from hf_posenc.training import TrainRequest, check_hub_arguments, parse_train_length
from hf_posenc.training.argument_checks import (
    WITHOUT_EFFECT,
    check_metric,
    check_numbers,
    check_training_arguments,
)
from hf_posenc.training.objectives import Objective
from hf_posenc.training.recipes import NAIVE

CONDITIONAL = {
    *("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end", "train_sampling_strategy"),
    *("average_tokens_across_devices", "label_smoothing_factor", "fsdp_config", "optim_args", "optim_target_modules"),
    *("metric_for_best_model", "greater_is_better", "eval_delay", "lr_scheduler_kwargs"),
    *("hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_always_push"),
}
"""Refused in some runs."""
HONORED_FIELDS = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
warmup_steps warmup_ratio optim weight_decay adam_beta1 adam_beta2 adam_epsilon
gradient_accumulation_steps max_grad_norm bf16 fp16 bf16_full_eval fp16_full_eval tf32
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
torch_compile torch_compile_backend torch_compile_mode use_cache neftune_noise_alpha torch_empty_cache_steps
auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
logging_dir include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
trackio_space_id trackio_bucket_id trackio_static_space_id eval_steps per_device_eval_batch_size
prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps save_strategy save_steps
save_on_each_node save_total_limit enable_jit_checkpoint hub_token
ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp deepspeed debug
skip_memory_metrics do_train local_rank
"""
"""Passed on to Trainer, the command, or accelerate. `do_train` is what the command does anyway.

Some are tested to have an effect: optimizer, schedule, batches, seeds, logs, evaluations and checkpoints in
test_honored_arguments.py, gradient_checkpointing and bf16 also in test_run.py, fsdp and deepspeed in test_sharded.py.
The others (other precisions, compilation, workers of the data loader, DDP, logging services, debugging, the token) are
not: it is only known that Trainer gets them, because a run passes on the same object.
"""


EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


def check(request: dict[str, Any], **changes: Any) -> None:
    arguments = TrainingArguments("out", max_steps=4, report_to="none", use_cpu=True, **changes)
    train_request = TrainRequest(**{"model": "m", "data": "d", "train_length": "8", "scheme": "alibi", **request})
    check_training_arguments(train_request, arguments, parse_train_length(train_request.train_length, 4))


def test_every_field_is_known() -> None:
    """Fails when transformers adds a field: find out whether a run honors it."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert not names - CONDITIONAL - {*HONORED_FIELDS.split()} - WITHOUT_EFFECT.keys()


@pytest.mark.parametrize(
    ("request_changes", "changes", "match"),
    [
        ({}, {"resume_from_checkpoint": "out/checkpoint-2"}, "--resume-from-checkpoint has no effect.*rerun"),
        ({}, {"resume_from_checkpoint": "true"}, "--resume-from-checkpoint"),
        ({}, {"do_predict": True}, "--do-predict.*hf-posenc eval"),
        ({}, {"save_only_model": True}, "--save-only-model"),
        ({}, {"batch_eval_metrics": True}, "--batch-eval-metrics"),
        ({}, {"include_for_metrics": ["inputs"]}, "--include-for-metrics"),
        ({}, {"use_liger_kernel": True}, "--use-liger-kernel"),
        ({}, {"liger_kernel_config": {"rope": True}}, "--liger-kernel-config"),
        ({}, {"push_to_hub": True}, "--push-to-hub"),
        ({}, {"do_eval": True}, "--do-eval.*--eval-data"),
        ({}, {"eval_strategy": "steps", "eval_steps": 1}, "--eval-strategy.*--eval-data"),
        ({"train_length": "4,8"}, {"train_sampling_strategy": "group_by_length"}, "--train-sampling-strategy"),
        ({}, {"average_tokens_across_devices": False}, "--average-tokens-across-devices"),
        ({}, {"metric_for_best_model": "nope"}, "--metric-for-best-model.*no evaluations"),
        ({"eval_data": "text"}, {"metric_for_best_model": "loss"}, "--metric-for-best-model.*--eval-strategy"),
        ({}, {"greater_is_better": True}, "--greater-is-better"),
        ({}, {"eval_delay": 1}, "--eval-delay"),
        ({}, {"save_strategy": "best"}, "--save-strategy best saves nothing"),
        ({"eval_data": "text"}, {**EVERY_STEP, "save_strategy": "best"}, "best needs a metric"),
        ({}, {"fsdp_config": {"xla": True}}, "--fsdp-config.*pass --fsdp"),
        ({}, {"optim_args": "a=b"}, "--optim-args.*adamw_torch_fused does not take a=b"),
        ({}, {"optim": "sgd", "optim_args": "momentum=0.9,a=b"}, "does not take a=b"),
        ({}, {"optim_target_modules": "all-linear"}, "--optim-target-modules"),
        ({}, {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"x": 1}}, "--lr-scheduler-kwargs"),
    ],
)
def test_arguments_without_effect_are_refused(
    request_changes: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(PosEncError, match=match):
        check(request_changes, **changes)


def test_arguments_with_an_effect_are_accepted() -> None:
    check({})
    check({}, do_train=True, gradient_accumulation_steps=2, neftune_noise_alpha=5.0)
    check({"eval_data": "text"}, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_steps=2)
    check({"train_length": "4,8"}, train_sampling_strategy="sequential")  # which it is
    check({"train_length": "8"}, train_sampling_strategy="group_by_length")
    check({"recipe": NAIVE}, average_tokens_across_devices=False)
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": False, "eval_delay": 1}
    check({"eval_data": "text"}, **EVERY_STEP, **best)
    check({}, optim="sgd", optim_args="momentum=0.9,nesterov=true")
    check({}, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0})
    check({}, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optim": "adamw_bnb_8bit"}, "--optim adamw_bnb_8bit cannot be used.*bitsandbytes"),
        ({"optim_args": "x"}, r"--optim-args \(name=value"),
        ({"optim": "sgd", "optim_args": "momentum=x"}, "--optim-args"),
        ({"lr_scheduler_kwargs": {"x": 1}}, "--lr-scheduler-kwargs.*unexpected keyword argument 'x'"),
        ({"lr_scheduler_kwargs": "[1]"}, "--lr-scheduler-kwargs .a JSON object."),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 0.0, "lr_scheduler_kwargs": {"lr_end": 0.0}}, "lr-sched"),
        ({"gradient_checkpointing_kwargs": {"x": 1}}, "--gradient-checkpointing-kwargs"),
        ({"gradient_checkpointing_kwargs": "[1]"}, "--gradient-checkpointing-kwargs .a JSON object."),
        ({"torch_compile_backend": "nope"}, "Unknown --torch-compile-backend 'nope'.*inductor"),
        ({"torch_compile_mode": "nope"}, "--torch-compile-mode cannot be used"),
        ({"fsdp": "full_shard"}, "--fsdp needs several processes"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(PosEncError, match=match):
        check({}, **changes)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "seed": [-1, 2**32, 2**70],
        "data_seed": [-1, 2**70],
        "adam_beta1": [-0.1, 1.0, 2.0, math.nan],
        "adam_beta2": [1.0, math.nan],
        "adam_epsilon": [0.0, -1.0, math.nan, math.inf],
        "warmup_steps": [math.nan, math.inf],
        "max_grad_norm": [-1.0, math.nan, math.inf],
        "weight_decay": [-1.0, math.nan],
        "label_smoothing_factor": [-0.1, 1.0, 5.0, math.nan],
        "dataloader_num_workers": [-1, 10**9],
        "neftune_noise_alpha": [-1.0, math.nan, math.inf],
        "eval_delay": [-1, math.nan, math.inf],
        "learning_rate": [-1.0, math.nan, math.inf],
        "per_device_train_batch_size": [0, 10**20],
        "per_device_eval_batch_size": [0, 10**20],
        "gradient_accumulation_steps": [0, 10**20],
        "eval_accumulation_steps": [0, -1],
        "max_steps": [10**30],
        "num_train_epochs": [0.0, -1.0, math.nan, math.inf],
    }.items(),
)
def test_numbers_out_of_range(name: str, values: list[float]) -> None:
    """Set afterwards, because transformers checks some of them itself, in some releases."""
    for value in values:
        arguments = TrainingArguments("out", report_to="none", use_cpu=True)
        check_numbers(arguments)
        setattr(arguments, name, value)
        with pytest.raises(PosEncError, match=f"^--{name.replace('_', '-')} must be"):
            check_numbers(arguments)


@pytest.mark.parametrize(
    ("objective", "metric", "greater", "match"),
    [
        (Objective.CAUSAL, "nope", None, "must be one of loss, perplexity; got 'nope'"),
        (Objective.CAUSAL, "accuracy", None, "one of loss, perplexity"),
        (Objective.CLASSIFICATION, "perplexity", None, "one of loss, accuracy"),
        (Objective.CAUSAL, "perplexity", None, "Lower perplexities are better"),
        (Objective.CAUSAL, "eval_perplexity", False, None),
        (Objective.CLASSIFICATION, "eval_accuracy", None, None),
        (Objective.FEATURE_EXTRACTION, "loss", None, None),
        (Objective.CAUSAL, None, None, None),
    ],
)
def test_metrics(objective: Objective, metric: str | None, greater: bool | None, match: str | None) -> None:
    options = {"metric_for_best_model": metric, "greater_is_better": greater}
    arguments = TrainingArguments("out", report_to="none", use_cpu=True, **EVERY_STEP, **options)
    if match is None:
        check_metric(arguments, objective)
        return
    with pytest.raises(PosEncError, match=match):
        check_metric(arguments, objective)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hub_model_id": "me/model"}, "--hub-model-id.*--push-to-hub"),
        ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "--hub-strategy"),
        ({"push_to_hub": True, "hub_always_push": True}, "--hub-always-push"),
        ({"push_to_hub": True, "hub_model_id": "me/model", "hub_strategy": "end"}, None),
        ({}, None),
    ],
)
def test_hub_arguments(changes: dict[str, Any], match: str | None) -> None:
    arguments = TrainingArguments("out", report_to="none", use_cpu=True, **changes)
    if match is None:
        check_hub_arguments(arguments)
        return
    with pytest.raises(PosEncError, match=match):
        check_hub_arguments(arguments)


def test_command_line_exits_before_anything_is_written(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    line = ["train", "--model", str(stock["gpt2"]), "--data", str(text), "--scheme", "alibi", "--train-length", "8"]
    line += ["--output-dir", str(tmp_path / "out"), "--max-steps", "2", "--use-cpu"]
    result = CliRunner().invoke(app, [*line, "--resume-from-checkpoint", "elsewhere"])
    assert result.exit_code == 2
    assert "rerun the same command" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_the_best_model_cannot_be_loaded_into_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_steps": 2}
    check({"eval_data": "text"}, **options)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PosEncError, match="--load-best-model-at-end does not work with FSDP or DeepSpeed"):
        check({"eval_data": "text"}, **options)
