"""Flags of other trainers (transformers' Trainer and its examples, oxidizr) that `sansgpu train` accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from sansgpu.cli.options import flag, option

GROUP = "Flags of other trainers"
_PER_DEVICE = "training.per_device_train_batch_size"  # not batch_size, which is meant for all processes together
# Keys by flag. A dash may also be written as an underscore.
_VALUES = {
    ("--learning-rate", "--lr"): "training.learning_rate",
    ("--lr-scheduler-type",): "training.lr_scheduler",
    ("--warmup-steps",): "training.warmup_steps",
    ("--weight-decay",): "training.weight_decay",
    ("--max-grad-norm",): "training.max_grad_norm",
    ("--num-train-epochs",): "training.num_epochs",
    ("--per-device-train-batch-size",): _PER_DEVICE,
    ("--gradient-accumulation-steps",): "training.gradient_accumulation_steps",
    ("--logging-steps",): "training.logging_steps",
    ("--save-steps",): "training.save_steps",
    ("--save-total-limit",): "training.keep_last",
    ("--ddp-backend",): "training.distributed_backend",
    ("--eval-steps",): "training.eval_steps",
    ("--model-name-or-path",): "model.name_or_path",
    ("--dataset-name", "--train-file"): "data.dataset_name",
    ("--validation-file",): "data.validation_name",
    ("--dataset-config-name",): "data.dataset_config",
    ("--max-seq-length", "--block-size"): "data.max_length",
    ("--doc-stride",): "data.doc_stride",
}
_OWN_NAMES = {_PER_DEVICE: "training.batch_size"}
_SWITCHES = {
    ("--bf16",): "training.precision=bf16",
    ("--use-cpu", "--no-cuda"): "training.force_cpu=true",
    ("--version-2-with-negative",): "data.null_answers=true",
}
# Flags for what `sansgpu train` always does, with their help text.
_ALWAYS = {
    "--do-train": "Accepted for compatibility. `sansgpu train` always trains.",
    "--do-eval": "Accepted for compatibility. `sansgpu train` always evaluates.",
}
# Unsupported flags, with the hint that the error message gives.
EXPLAINED = {
    "--do-predict": "`sansgpu predict RUN` writes predictions",
    "--fp16": "CPUs compute in bf16 or fp32; use --bf16",
    "--jit-mode-eval": "the kernels are already compiled; remove it",
    "--overwrite-output-dir": "a run never overwrites an existing one; remove it and choose a new --output-dir",
    "--per-device-eval-batch-size": "evaluation uses the training batch size; remove it",
    "--use-ipex": "sansgpu has its own CPU kernels; remove it",
}


def with_other_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the flags to a command, which receives them in its parameter `override`, in the form of --set."""
    keys = {_parameter(names[0]): key for names, key in _VALUES.items()}
    settings = {_parameter(names[0]): setting for names, setting in _SWITCHES.items()}
    added: dict[str, Any] = {
        _parameter(names[0]): Annotated[
            str | None, option(f"Sets {_OWN_NAMES.get(key, key)}.", GROUP, *names, metavar="VALUE")
        ]
        for names, key in _VALUES.items()
    }
    switches = {names: f"Sets {setting}." for names, setting in _SWITCHES.items()}
    switches |= {(name,): text for name, text in _ALWAYS.items()}
    added |= {_parameter(names[0]): Annotated[bool, flag(text, GROUP, *names)] for names, text in switches.items()}

    @wraps(command)
    def with_flags(override: list[str] | None = None, **values: Any) -> int:
        given = {name: values.pop(name) for name in added}
        if given["do_eval"] and not given["do_train"]:
            raise typer.BadParameter("--do_eval without --do_train trains nothing; use `sansgpu eval RUN`")
        texts = [f"{key}={given[name]}" for name, key in keys.items() if given[name] is not None]
        switched = [setting for name, setting in settings.items() if given[name]]
        return command(override=[*(override or ()), *texts, *switched], **values)

    own = inspect.signature(command, eval_str=True)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword_only, default=None if name in keys else False, annotation=annotation)
        for name, annotation in added.items()
    ]
    with_flags.__signature__ = own.replace(  # type: ignore[attr-defined]  # read by typer
        parameters=[*own.parameters.values(), *parameters]
    )
    return with_flags


def _parameter(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
