"""The configuration schema: type, default and description of every key. Help, docs and errors are generated from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sansgpu.config.data import DataConfig
from sansgpu.config.learning_rate import default_learning_rate
from sansgpu.config.model import ModelConfig
from sansgpu.config.other_names import with_own_names
from sansgpu.config.section import (
    FIXED,
    TOP_LEVEL_KEYS,
    Section,
    all_keys,
    all_sections,
)
from sansgpu.config.tasks import CODE_NAME, TaskSettings, TaskTable, as_values, is_outside, is_section, joined_names
from sansgpu.config.training import ONE_DEVICE, Device, TrainingConfig
from sansgpu.config.wording import truncate

CLASS_NAME = rf"^{CODE_NAME}$"
_SECTIONS = ("model", "training", "data")


def _without_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Removes a `sampling` section, as in oxidizr's files, if it has no effect in training.

    Raises ValueError if it sets any sampling option.
    """
    sampling = values.get("sampling")
    if not isinstance(sampling, dict):
        return values
    if sampling.get("stream"):
        raise ValueError(
            "sampling.stream is not supported in training; remove it, and use `sansgpu generate` or `sansgpu chat` to "
            "stream text"
        )
    if others := [str(key) for key in sampling if key != "stream"]:
        raise ValueError(
            f"sampling.{truncate(others[0])} has no effect in training; remove it, and set the options of `sansgpu "
            "generate` instead"
        )
    return {key: value for key, value in values.items() if key != "sampling"}


class Config(Section):
    """The configuration of one run. A file may also set `TOP_LEVEL_KEYS` at the top level.

    This class has only the keys that several tasks share; `compose` adds those of the tasks.
    """

    tasks: ClassVar[TaskTable] = TaskTable()

    task: str = Field("", description="kind of run", json_schema_extra=FIXED | ONE_DEVICE)
    objective: str | None = Field(
        None,
        pattern=CLASS_NAME,
        description="`package.module:Class`, a subclass of the task's built-in class to use instead of it",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="wrap")
    @classmethod
    def _with_defaults(cls, values: Any, validate: ModelWrapValidatorHandler[Config]) -> Config:
        """Moves top-level keys to `training` and adds the defaults of the task."""
        if not isinstance(values, dict):
            return validate(values)
        values = _without_sampling(with_own_names(values)[0])
        top = {key: values[key] for key in TOP_LEVEL_KEYS if key in values}
        rest = {key: value for key, value in values.items() if key not in top}
        training = as_values(rest.get("training"))
        if top and is_section(rest.get("training")):
            clash = [key for key in top if training.get(key, top[key]) != top[key]]
            if clash:
                raise ValueError(f"{clash[0]} has different values at the top level and in training; remove one")
            rest["training"] = {**training, **top}
        config = validate(cls.tasks.with_defaults(str(rest.get("task", cls.default_task())), rest))
        if "learning_rate" not in as_values(rest.get("training")):
            rate = config.training.learning_rate if "learning_rate" in config.training.model_fields_set else None
            rate = default_learning_rate(config.training.optimizer, config.model.d_model, rate)
            config.training.__dict__["learning_rate"] = rate
        for name in _SECTIONS:  # so that assigning the task changes the defaults, too
            getattr(config, name).model_fields_set.intersection_update(as_values(rest.get(name)))
        return config

    def __setattr__(self, key: str, value: Any) -> None:
        if key in TOP_LEVEL_KEYS:
            setattr(self.training, key, value)
        else:
            super().__setattr__(key, value)

    def _take(self, other: Section, before: Section) -> None:
        super()._take(other, self)  # copies the defaults as well, because `other` may have a different task

    @field_validator("task")
    @classmethod
    def _is_task(cls, task: str) -> str:
        if task in cls.tasks.tasks:
            return task
        if not re.match(CLASS_NAME, task):
            known = f"{', '.join(map(repr, cls.tasks.tasks))} or your own class as 'package.module:Class'"
            raise PydanticCustomError("unknown_task", "Input should be {known}", {"known": known})
        return task

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        found = [*self._unused_keys(), *self._freezing_problems(), *self.settings.problems(self)]
        if is_outside(self.task) and self.objective not in (None, self.task):
            found.append(f"objective has no effect, because task {self.task} is already your own class; remove it")
        usual = self.settings.default("training", "warmup_steps", TrainingConfig.model_fields["warmup_steps"].default)
        if self.training.warmup_ratio is not None and self.training.warmup_steps != usual:
            found.append("training.warmup_steps and training.warmup_ratio both set the warmup; remove one of the two")
        if found:
            raise ValueError("; ".join(found))
        return self

    def _unused_keys(self) -> Iterator[str]:
        """Yields a clause for every key that is set although it has no effect in this kind of run."""
        here = self.settings
        for key, default in self._defaults():
            if not self.acts(key) and attrgetter(key)(self) != default:
                known = joined_names(self.tasks.with_key(key), here)
                remedy = "remove it" if "task" in self.model_fields_set else "set task, or remove it"
                yield f"{key} is for task {known}, and has no effect in {here.display_name}; {remedy}"

    def _freezing_problems(self) -> Iterator[str]:
        """Yields a clause if the run would end before any layer stops learning."""
        after, epochs = self.model.freeze_after, self.training.num_epochs
        if after and epochs is not None and after >= epochs:
            yield (
                f"model.freeze_after is {after:g}, but training.num_epochs is {epochs:g}, so that no layer would stop "
                "learning; lower freeze_after, or remove it and trained_layers"
            )

    def after_freezing(self) -> Self:
        """Returns the configuration of the steps after `model.freeze_after`, in which only the last layers learn."""
        return self.with_values("model", freeze_after=None)

    def without_effect(self, keys: Iterable[str], reason: str) -> Iterator[str]:
        """Yields a clause for every one of `keys` that is set although it has no effect."""
        for key, default in self._defaults():
            if key in keys and attrgetter(key)(self) != default:
                yield f"{key} has no effect because {reason}; remove it"

    def _defaults(self) -> Iterator[tuple[str, Any]]:
        """Yields (dotted key, default in this task) for every key of the sections."""
        for name in _SECTIONS:
            for key, field in all_keys(type(getattr(self, name))):
                yield f"{name}.{key}", self.settings.default(name, key, field.default)

    @property
    def settings(self) -> TaskSettings:
        """The settings that the task's class declares."""
        return self.tasks.settings_of(self.kind)

    @property
    def kind(self) -> str:
        """The task, or the name of its variant that the configuration selects, e.g. by naming a pretrained model."""
        return self.tasks.kind_of(self.task, self)

    def acts(self, key: str) -> bool:
        """Returns whether a dotted key has an effect in this kind of run."""
        return self.tasks.acts(self.settings, key)

    @property
    def outside_class(self) -> str | None:
        """The class outside the package that implements the task, as `package.module:Class`."""
        return self.objective or (self.task if is_outside(self.task) else None)

    @property
    def roots(self) -> int:
        """Text tokens of one training example, without the leaves of a graph."""
        return self.data.max_length or self.model.max_seq_len

    @property
    def leaf_slots(self) -> int:
        """Leaf slots per token, or 0 if the task's examples have none."""
        return self.settings.leaf_slots(self)

    @property
    def device(self) -> Device:
        return self.training.device

    def get_effective_device(self) -> Any:
        """Returns the torch.device to train on. Raises ConfigError if a GPU is requested but not available."""
        return self.training.get_effective_device()

    @property
    def window(self) -> int:
        """Tokens of one training example, including the leaves of a graph."""
        return self.roots * (1 + self.leaf_slots)

    @classmethod
    def section_class(cls, name: str) -> type[Section]:
        """Returns the class of a section, e.g. `model`."""
        return dict(all_sections(cls))[name]

    @classmethod
    def default_task(cls) -> str:
        return str(cls.model_fields["task"].default)


def compose(tasks: Sequence[TaskSettings], unknown: Literal["forbid", "ignore"] = "forbid") -> type[Config]:
    """Returns the schema with the keys of all `tasks`. The first task is the default.

    `unknown` says what happens to keys of sections that no task declares.
    """
    table = TaskTable(tasks)
    added = dict.fromkeys(section for settings in table.kinds.values() for section in settings.sections)
    sections: dict[str, type[Section]] = {}
    for base in (ModelConfig, TrainingConfig, DataConfig):
        extensions = [section for section in added if issubclass(section, base)]
        inherited = {parent for section in extensions for parent in section.__mro__[1:]}  # subclasses have their keys
        bases = (*(section for section in reversed(extensions) if section not in inherited), base)
        attributes = {"__doc__": base.__doc__, "__module__": __name__, "model_config": ConfigDict(extra=unknown)}
        sections[base.section_name] = type(base.__name__, bases, attributes)
    fields: dict[str, Any] = {name: (section, Field(default_factory=section)) for name, section in sections.items()}
    key = Config.model_fields["task"]
    task = Field(tasks[0].task, description=key.description, json_schema_extra=key.json_schema_extra)
    schema = create_model("Config", __base__=Config, __module__=__name__, task=(str, task), **fields)
    schema.tasks = table
    Section.root = Section.root or schema  # contains the sections of sections, which all schemas share
    composed: list[type[Section]] = [schema, *sections.values()]
    for section in composed:
        section.root = schema
    return schema
