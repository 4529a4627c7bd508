"""Declares tasks: their keys, defaults, validation, metrics and model cards, and the table of all tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sansgpu.config.errors import ConfigError
from sansgpu.config.parse import Values
from sansgpu.config.wording import first_line, formatted

if TYPE_CHECKING:
    from sansgpu.config.section import Section


@dataclass(frozen=True)
class Metric:
    """A metric in the eval events of a task. With the defaults, it is shown as a plain number."""

    name: str  # key in events
    label: str = ""  # default: the name in words
    form: str = "{:.4f}"  # format of the value in the terminal and the live view
    text: str = "{label} {value}"  # template of the terminal; may name other keys of the event; "": not shown there
    within: str = ""  # name of the metric in whose parentheses the terminal shows this one
    unit: str = ""  # unit of the values in reports
    scale: float = 1.0  # factor from the value in events to the unit
    better: Literal["lower", "higher"] = "lower"
    short: str = ""  # label of the current value in step lines and the live view; "": not shown there
    reported: bool = True  # reports, plots and model cards show it
    plotted: bool = True  # False if its curve has the shape of the loss
    baseline: str = ""  # name of the metric with the score of a trivial predictor
    remedies: tuple[str, ...] = ()  # keys to double if the metric stays near its baseline

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    @property
    def title(self) -> str:
        """The label for reports, with the unit if it is a percentage."""
        return f"{self.label} (%)" if self.unit == "%" else self.label

    @property
    def heading(self) -> str:
        return self.label[0].upper() + self.label[1:]

    def number(self, value: Any) -> float | None:
        """Converts a value of an event to the metric's unit. Returns None if it is not a number."""
        return self.scale * value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def words(self, event: Mapping[str, Any]) -> str:
        """Returns the text of an event's value for the terminal."""
        if event.get(self.name) is None:
            return f"{self.label} not finite"
        return self.text.format(**{**event, "label": self.label, "value": self.shown(event[self.name])})

    def shown(self, value: Any) -> str:
        """Formats a value of an event."""
        return formatted(self.form, value)


def percentage(name: str, label: str, short: str = "") -> Metric:
    """Describes a score that events record as a percentage."""
    return Metric(name, label, "{:.2f}%", unit="%", better="higher", short=short)


def interval(name: str, within: str, form: str = "{0[0]:.1%} to {0[1]:.1%}") -> Metric:
    return Metric(name, "95% interval", form, within=within, reported=False)


def share(name: str, label: str = "", short: str = "", within: str = "") -> Metric:
    """Describes a score between 0 and 1 that is shown as a percentage."""
    return Metric(name, label, "{:.1%}", unit="%", scale=100.0, better="higher", short=short, within=within)


LOSS = Metric("loss")  # every task has it
BITS_PER_BYTE = Metric("bits_per_byte", text="{value} {label}", short="bits per byte")  # comparable across vocabularies


# Keys of ModelConfig, TrainingConfig and DataConfig that have an effect only in tasks that list their group in
# `TaskSettings.key_groups`. The other keys of these classes have an effect in every task.
KEY_GROUPS = {
    "from scratch": """
        model.vocab_size model.d_model model.n_heads model.n_layers model.d_ff model.max_seq_len
        model.dropout model.attention_dropout model.activation
        data.tokenizer data.vocab_size data.tokenizer_sample_mb
    """,
    "texts": "data.text_column",
    "text generation": "training.label_smoothing training.z_loss",
    "samples": "training.sample_tokens training.sample_prompt training.sample_temperature",
    "windows": "data.doc_stride",
    "packing": "data.pack_sequences",
    "pretrained": "model.name_or_path model.revision model.trust_remote_code",
    "rows": "data.on_bad_row data.max_bad_rows",
    "adapter": """
        model.adapter model.lora_rank model.lora_alpha model.lora_dropout model.lora_targets model.base_precision
        model.merge_adapter
    """,
    "trained layers": "model.trained_layers model.freeze_after",
    "kept activations": "model.keep_activations",
    "chat template": """
        data.chat_template data.template_variables data.parse_special_tokens data.system_column data.tools_column
        data.merge_turns
    """,
    "long rows": "data.long_rows",
    "pairs": "data.label_column data.text_pair_column",
    "pooling": "model.pooling",
    "labels": "data.labels",
}


def _no_problems(config: Any) -> Iterator[str]:
    return iter(())


def _no_leaves(config: Any) -> int:
    return 0


@dataclass(frozen=True)
class CardText:
    """Describes the models of a task in their model cards."""

    description: str  # completes "This is ..."
    pipeline_tag: str = ""  # pipeline tag of the Hugging Face Hub
    auto_class: str = ""  # suffix of the `AutoModelFor` class; "": transformers cannot load the model
    command: str = ""  # sansgpu command that uses the model, with the placeholder `MODEL`
    layout: str = ""  # layout of the weights of a model trained from scratch
    note: str = ""  # a sentence about its use
    library: str = ""  # Python library that loads the model, if it is not transformers


class Variant(NamedTuple):
    """A variant of a task, selected by the value of a key."""

    key: str
    value: Any  # None: any value
    settings: TaskSettings


@dataclass(frozen=True)
class Purpose:
    """The description of a task in `sansgpu init` and the studio, and the settings that it suggests."""

    title: str  # names the model
    words: str  # completes "a model to ..."
    rows: str  # the data it needs
    model: str | None = None  # suggested base model; None: trained from scratch
    built_in: str | None = None  # name of a built-in dataset for the task
    batch: int | None = 16  # examples per step; None: the default of the task
    epochs: int = 3
    is_decoder: bool = False  # True: fine-tuned with an adapter
    trained: str = "all weights"  # the weights that are fine-tuned if there is no adapter, in words


@dataclass(frozen=True)
class TaskSettings:
    """Declares a task's configuration, metrics and model card."""

    task: str  # value of the key `task`
    key_groups: tuple[str, ...]  # the KEY_GROUPS that have an effect
    extra_keys: tuple[str, ...] = ()  # further KEY_GROUPS keys, without the rest of their groups
    sections: tuple[type[Section], ...] = ()  # subclasses of ModelConfig, ... that declare the task's own keys
    implementation: str = ""  # the class, as `package.module:Class`. Default: `task`
    kind: str = ""  # name of a variant. Default: `task`
    variants: tuple[Variant, ...] = ()
    defaults: Mapping[str, Values] = field(default_factory=dict)  # by section, where they differ from the schema's
    adapter_defaults: Mapping[str, Values] = field(default_factory=dict)  # further defaults if model.adapter is set
    scales_rate: bool = False  # the default learning rate depends on the model's width (`rate_for_width`)
    problems: Callable[[Any], Iterable[str]] = _no_problems  # yields a clause for each inconsistency of a Config
    rows: str = "texts"  # the forms of its rows: a key of data.forms.registry.FORMS
    label: str = ""  # the configuration that selects the task, for messages. Default: `task`
    description: str = ""  # meaning of the value `task`, for help
    purpose: Purpose | None = None  # offered by `sansgpu init`
    varying_length: bool = True  # False if all examples are windows of equal length
    generates: bool = False  # True if the model generates text in every training step and evaluation
    leaf_slots: Callable[[Any], int] = _no_leaves  # returns the leaf slots per token of a Config's examples
    metrics: tuple[Metric, ...] = ()  # all except the loss, including those of variants, in display order
    # Shown by curves, lists of runs and step lines, instead of the loss if that says little. In step and eval events.
    main_metric: Metric = LOSS
    card: Callable[[Values], CardText] | None = None  # makes the card text from the section `model`

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys and nested sections that have an effect in this task, but not in every task."""
        groups = (key for group in self.key_groups for key in KEY_GROUPS[group].split())
        own = (f"{section.section_name}.{key}" for section in self.sections for key in section.added_keys())
        return frozenset((*groups, *self.extra_keys, *own))

    def own_keys(self, name: str) -> set[str]:
        """Returns the keys that the task itself declares for section `name`, e.g. `training`."""
        return {key for section in self.sections if section.section_name == name for key in section.added_keys()}

    def default(self, section: str, key: str, otherwise: Any) -> Any:
        """Returns the default of a key, or the schema's default `otherwise`."""
        return self.defaults.get(section, {}).get(key, otherwise)

    @property
    def fine_tunes(self) -> bool:
        return "pretrained" in self.key_groups

    @property
    def display_name(self) -> str:
        return self.label or self.task


CODE_NAME = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # pattern of the names for which `is_outside` returns True


def is_outside(name: str) -> bool:
    """Returns whether a value names a class or function outside the package, `package.module:Name`."""
    return ":" in name


def import_class(name: str, option: str = "task") -> Any:
    """Imports a class or function, `package.module:Name`. Raises ConfigError if that is not possible."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # the module may raise anything
        known = isinstance(error, (ImportError, AttributeError))
        reason = str(error) if known else f"{type(error).__name__}: {first_line(error)}"
        path = "add its folder to PYTHONPATH, e.g. PYTHONPATH=. sansgpu train ..."
        remedy = "correct the name after the colon." if module in sys.modules else path
        raise ConfigError(f"{option} {name} cannot be imported ({reason}); {remedy}") from None


class TaskTable:
    """The tasks of a schema."""

    def __init__(self, tasks: Sequence[TaskSettings] = ()) -> None:
        self.tasks = {settings.task: settings for settings in tasks}
        # Settings by the name of a kind of run: each task, followed by its variants.
        self.kinds = {
            kind.kind or kind.task: kind for one in tasks for kind in (one, *(v.settings for v in one.variants))
        }
        grouped = (key for keys in KEY_GROUPS.values() for key in keys.split())
        # The keys that have an effect only in tasks that list them.
        self._listed = frozenset((*grouped, *(key for settings in self.kinds.values() for key in settings.keys)))

    def acts(self, settings: TaskSettings, key: str) -> bool:
        """Returns whether a dotted key has an effect in a task."""
        key = ".".join(key.split(".")[:2])  # either all keys of a nested section have an effect, or none
        return key in settings.keys or key not in self._listed

    def with_key(self, key: str) -> list[TaskSettings]:
        """Returns the settings of the tasks in which `section.key` has an effect."""
        return [settings for settings in self.kinds.values() if self.acts(settings, key)]

    def settings_of(self, kind: str) -> TaskSettings:
        """Returns the settings of a kind of run.

        A class outside the package is not imported here, because an untrusted run may name it. Until the user names
        it, all keys count as having an effect, and the defaults are those of the schema.
        """
        known = self.kinds.get(kind) or imported_settings(kind)
        return known or TaskSettings(kind, tuple(KEY_GROUPS), extra_keys=tuple(sorted(self._listed)))

    def kind_of(self, task: str, values: Any) -> str:
        """Returns the task, or the variant of it that `values` select: a mapping, or a schema object with sections."""
        for key, wanted, settings in self.settings_of(task).variants:
            found = values
            for part in key.split("."):
                found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
            if found is not None if wanted is None else found == wanted:
                return settings.kind
        return task

    def defaults(self, task: str, values: dict[str, Any]) -> dict[str, Values]:
        """Returns the defaults of the kind of run of `values` that replace those of the schema, by section."""
        settings, model = self.settings_of(self.kind_of(task, values)), as_values(values.get("model"))
        adapted = settings.adapter_defaults if model.get("adapter", "none") != "none" else {}
        return {
            section: {**settings.defaults.get(section, {}), **adapted.get(section, {})}
            for section in dict.fromkeys((*settings.defaults, *adapted))
        }

    def with_defaults(self, task: str, values: dict[str, Any]) -> dict[str, Any]:
        """Returns `values` with the defaults of their kind of run for missing keys.

        Sections may be mappings or schema objects. Any other section is returned unchanged, for validation to reject.
        """
        given = {**values}
        for section, defaults in self.defaults(task, values).items():
            if is_section(given.get(section)):
                given[section] = {**defaults, **as_values(given.get(section))}
        return given


def imported_settings(kind: str) -> TaskSettings | None:
    """Returns the settings of a class outside the package, `package.module:Class`, if it is already imported."""
    module, _, name = kind.partition(":")
    found = getattr(getattr(sys.modules.get(module), name, None), "settings", None)
    return found if isinstance(found, TaskSettings) else None


def require_task_class(found: Any, name: str) -> None:
    """Raises ConfigError if what a configuration names as its task is not a class with settings."""
    if not isinstance(getattr(found, "settings", None), TaskSettings):
        raise ConfigError(
            f"task {name} is not a task class, because it has no attribute `settings` with a TaskSettings; set task to "
            "package.module:Class."
        )


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


def joined_names(found: list[TaskSettings], here: TaskSettings) -> str:
    """Joins the names of several kinds of runs, for a message about a run of kind `here`."""
    plain = {settings.task for settings in found if not settings.label}
    chosen = [settings for settings in found if not (settings.label and settings.task in plain)]
    *others, last = (s.display_name if s.task == here.task else s.task for s in chosen)
    return f"{', '.join(others)} and {last}" if others else last
