"""TrainingArguments without effect are refused, and every field is known to be one or the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.errors import PosEncError
from hf_posenc.training import TrainRequest, check_hub_arguments, parse_train_length
from hf_posenc.training.arguments import WITHOUT_EFFECT, check_training_arguments
from hf_posenc.training.recipes import NAIVE

CONDITIONAL = {
    *("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end", "train_sampling_strategy"),
    *("average_tokens_across_devices", "label_smoothing_factor"),
    *("hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_always_push"),
}
"""Refused in some runs."""
HONORED_FIELDS = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
optim_target_modules gradient_accumulation_steps max_grad_norm bf16 fp16 bf16_full_eval fp16_full_eval tf32
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
torch_compile torch_compile_backend torch_compile_mode use_cache neftune_noise_alpha torch_empty_cache_steps
auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
logging_dir include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
trackio_space_id trackio_bucket_id trackio_static_space_id eval_steps eval_delay per_device_eval_batch_size
prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps save_strategy save_steps
save_on_each_node save_total_limit enable_jit_checkpoint hub_token metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
skip_memory_metrics do_train local_rank
"""
"""Passed on to Trainer, the command, or accelerate. `do_train` is what the command does anyway."""


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
