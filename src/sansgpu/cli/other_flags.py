"""Flags of other trainers (transformers' Trainer and its examples, oxidizr) that `sansgpu train` accepts."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from sansgpu.cli.options import flag, option, warn

GROUP = "Flags of other trainers"
_PER_DEVICE = "training.per_device_train_batch_size"  # not batch_size, which is meant for all processes together
# Keys by flag. A dash may also be written as an underscore.
_VALUES = {
    ("--learning-rate", "--lr"): "training.learning_rate",
    ("--lr-scheduler-type",): "training.lr_scheduler",
    ("--warmup-steps",): "training.warmup_steps",
    ("--warmup-ratio",): "training.warmup_ratio",
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
    ("--early-stopping-patience",): "training.early_stopping_patience",
    ("--model-name-or-path",): "model.name_or_path",
    ("--dataset-name", "--train-file"): "data.dataset_name",
    ("--validation-file",): "data.validation_name",
    ("--dataset-config-name",): "data.dataset_config",
    ("--max-seq-length", "--block-size"): "data.max_length",
    ("--doc-stride",): "data.doc_stride",
}
_OWN_NAMES = {_PER_DEVICE: "training.batch_size"}
# The settings of a flag that is alone or followed by True, and of one followed by False.
_SWITCHES = {
    ("--bf16",): ("training.precision=bf16", "training.precision=fp32"),
    ("--load-best-model-at-end",): ("training.load_best_model_at_end=true", "training.load_best_model_at_end=false"),
    ("--use-cpu", "--no-cuda"): ("training.force_cpu=true", "training.force_cpu=false"),
    ("--version-2-with-negative",): ("data.null_answers=true", "data.null_answers=false"),
}
# Flags for what `sansgpu train` always does, with their help text and the error message if False follows.
_ALWAYS = {
    "--do-train": (
        "Accepted for compatibility. `sansgpu train` always trains.",
        "--do_train False trains nothing; use `sansgpu eval RUN`",
    ),
    "--do-eval": (
        "Accepted for compatibility. `sansgpu train` always evaluates.",
        "`sansgpu train` always evaluates; remove --do_eval False, or use --eval_steps 0 to evaluate only at the end",
    ),
}
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_SQUAD = "squad", "squad_v2"  # names of datasets on the Hub, without their owner


def with_other_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the flags to a command, which receives them in its parameter `override`, in the form of --set."""
    keys = {_parameter(names[0]): key for names, key in _VALUES.items()}
    settings = {_parameter(names[0]): setting for names, (setting, _) in _SWITCHES.items()}
    added: dict[str, Any] = {
        _parameter(names[0]): Annotated[
            str | None, option(f"Sets {_OWN_NAMES.get(key, key)}.", GROUP, *names, metavar="VALUE")
        ]
        for names, key in _VALUES.items()
    }
    switches = {names: f"Sets {setting}." for names, (setting, _) in _SWITCHES.items()}
    switches |= {(name,): text for name, (text, _) in _ALWAYS.items()}
    added |= {_parameter(names[0]): Annotated[bool, flag(text, GROUP, *names)] for names, text in switches.items()}

    @wraps(command)
    def with_flags(override: list[str] | None = None, **values: Any) -> int:
        given = {name: values.pop(name) for name in added}
        if given["do_eval"] and not given["do_train"]:
            raise typer.BadParameter("--do_eval without --do_train trains nothing; use `sansgpu eval RUN`")
        texts = [f"{key}={given[name]}" for name, key in keys.items() if given[name] is not None]
        switched = [setting for name, setting in settings.items() if given[name]]
        all_given = [*(override or ()), *texts, *switched]
        if not (values["config"] or values["config_option"] or values["resume"] or values["objective"]):
            all_given += _settings_without_configuration(given, all_given)
        return command(override=all_given, **values)

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


def _settings_without_configuration(given: dict[str, Any], overrides: list[str]) -> list[str]:
    """Returns the task that the flags of an example script mean, and the batch size as the script counts it.

    Raises BadParameter if the flags name a model to fine-tune, but nothing says for which task.
    """
    if any(override.partition("=")[0].strip() == "task" for override in overrides):
        return []
    dataset = str(given["dataset_name"])
    if given["doc_stride"] or given["version_2_with_negative"] or dataset.rpartition("/")[2] in _SQUAD:
        from sansgpu.machine.distributed.world import find_world

        if find_world().rank == 0:
            warn("the flags are those of question answering, so the task is qa; --set task=TASK chooses another.")
        is_batch = given["per_device_train_batch_size"] and not given["gradient_accumulation_steps"]
        return ["task=qa", *(["training.gradient_accumulation_steps=1"] if is_batch else [])]
    if given["model_name_or_path"]:
        from sansgpu.tasks.configuration import SCHEMA

        tasks = dict.fromkeys(settings.task for settings in SCHEMA.tasks.with_key("model.name_or_path"))
        raise typer.BadParameter(
            "--model_name_or_path does not say what the model should learn; add a configuration, e.g. -f "
            f"configs/sft.yaml, or --set task=TASK, where TASK is one of {', '.join(tasks)}"
        )
    return []


def with_switch_values(arguments: list[str]) -> list[str]:
    """Replaces `--bf16 True` and `--bf16=True` with `--bf16`, and `--bf16 False` with the setting that it means.

    Scripts of transformers take their flags in all of these forms. Raises BadParameter for a flag that cannot be false.
    """
    settings = {_parameter(name): setting for names, (_, setting) in _SWITCHES.items() for name in names}
    refused = {_parameter(name): message for name, (_, message) in _ALWAYS.items()}
    replaced, rest = list[str](), deque(arguments)
    while rest:
        argument = rest.popleft()
        name, _, value = argument.partition("=")
        flag = _parameter(name)
        if flag in {**settings, **refused}:
            if not value and rest and rest[0].lower() in (*_TRUE, *_FALSE):
                value = rest.popleft()
            if value and value.lower() not in (*_TRUE, *_FALSE):
                raise typer.BadParameter(f"{name} is {value}, but must be true or false")
            if value.lower() in _FALSE and flag in refused:
                raise typer.BadParameter(refused[flag])
            replaced += ["--set", settings[flag]] if value.lower() in _FALSE else [name]
        else:
            replaced.append(argument)
    return replaced


def _parameter(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
