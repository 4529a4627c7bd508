"""The table of tasks, and the defaults and keys that their settings give to a configuration."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from sansgpu.config.built_in_tasks import SETTINGS
from sansgpu.config.errors import ConfigError
from sansgpu.config.task_settings import KEY_GROUPS, TaskSettings, Values

# The classes of all kinds of runs. A kind that is not a task acts where a task's settings name it in `with_pretrained`
# `with_few_shot` or `with_kto`.
TASK_CLASSES = {
    "pretrain": "sansgpu.tasks.pretrain.objective:Pretrain",
    "graph": "sansgpu.tasks.graph.task:Graph",
    "masked": "sansgpu.tasks.graph.masked_lm:MaskedLM",
    "sft": "sansgpu.tasks.sft.objective:SFT",
    "qa": "sansgpu.tasks.qa.objective:QA",
    "classify": "sansgpu.tasks.classify.objective:Classify",
    "few_shot": "sansgpu.tasks.classify.few_shot:FewShot",
    "tokens": "sansgpu.tasks.tokens.objective:Tokens",
    "embed": "sansgpu.tasks.embed.objective:TextEmbedding",
    "preference": "sansgpu.tasks.preference.objective:Preference",
    "kto": "sansgpu.tasks.preference.objective:KTO",
}
DEFAULT_TASK = "pretrain"


def is_outside(task: str) -> bool:
    """Returns whether a task is a class outside the package, `package.module:Class`."""
    return ":" in task


def import_class(name: str, option: str = "task") -> Any:
    """Imports `package.module:Class`. Raises ConfigError if that is not possible."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{option} {name} cannot be loaded ({error}); add its folder to Python's path: "
            "PYTHONPATH=. sansgpu train ..."
        ) from None


def task_class(kind: str) -> Any:
    """Imports the class of a kind of run, which may be outside the package. Raises ConfigError."""
    found = import_class(TASK_CLASSES.get(kind, kind))
    if not isinstance(getattr(found, "settings", None), TaskSettings):
        raise ConfigError(f"task {kind} is not the class of a task: it has no TaskSettings named `settings`.")
    return found


def settings_of(kind: str) -> TaskSettings:
    """Returns the settings of a kind of run.

    A class outside the package is not imported here, because a run may come from anybody: until the user names it, all
    keys of its runs act and it has no defaults.
    """
    if kind in SETTINGS:
        return SETTINGS[kind]
    module, _, name = kind.partition(":")
    found = getattr(getattr(sys.modules.get(module), name, None), "settings", None)
    return found if isinstance(found, TaskSettings) else TaskSettings(kind, tuple(KEY_GROUPS))


def task_names() -> list[str]:
    """Returns the values of the key `task` that name a class of the package."""
    return [name for name in TASK_CLASSES if settings_of(name).task == name]


def kind_of(task: str, name_or_path: str | None, few_shot: bool | None, preference_loss: str | None) -> str:
    """Returns the task, or the kind that replaces it with a pretrained model, few-shot learning or the loss kto."""
    settings = settings_of(task)
    with_pretrained = name_or_path is not None and settings.with_pretrained
    with_kto = preference_loss == "kto" and settings.with_kto
    return (few_shot and settings.with_few_shot) or with_kto or with_pretrained or task


def kind_of_sections(task: str, model: Any, training: Any) -> str:
    """Does what `kind_of` does, for sections that are mappings or schema objects."""
    model, training = as_values(model), as_values(training)
    loss = as_values(training.get("preference")).get("loss")
    return kind_of(task, model.get("name_or_path"), training.get("few_shot"), loss)


def with_defaults(task: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` with the defaults of their kind of run for missing keys.

    Sections may be mappings or schema objects. Any other section is returned unchanged, for validation to reject.
    """
    given, model = {**values}, as_values(values.get("model"))
    settings = settings_of(kind_of_sections(task, values.get("model"), values.get("training")))
    adapted = settings.adapter_defaults if model.get("adapter", "none") != "none" else {}
    for section in dict.fromkeys((*settings.defaults, *adapted)):
        if is_section(given.get(section)):
            defaults = {**settings.defaults.get(section, {}), **adapted.get(section, {})}
            given[section] = {**defaults, **as_values(given.get(section))}
    return given


def is_section(value: Any) -> bool:
    """Returns True for a mapping, a schema object or None, which is an empty section."""
    return value is None or isinstance(value, dict) or hasattr(value, "model_dump")


def as_values(section: Any) -> Values:
    """Returns the keys that were set explicitly in a section: a mapping or a schema object."""
    if section is None:
        return {}
    if hasattr(section, "model_dump"):
        return dict(section.model_dump(exclude_unset=True))
    return dict(section) if isinstance(section, dict) else {}


def tasks_with(key: str) -> list[TaskSettings]:
    """Returns the settings of the package's tasks in which `section.key` has an effect."""
    return [settings for settings in map(settings_of, TASK_CLASSES) if settings.acts(key)]


def labels(found: list[TaskSettings], here: TaskSettings) -> str:
    """Joins the labels of several tasks, for a message about a run of task `here`."""
    plain = {settings.task for settings in found if not settings.label}
    chosen = [settings for settings in found if not (settings.label and settings.task in plain)]
    return " and ".join(s.shown if s.task == here.task else s.task for s in chosen)
