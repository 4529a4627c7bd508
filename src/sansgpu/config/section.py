"""The base class of the sections of a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from sansgpu.config.errors import ConfigError
from sansgpu.config.other_names import KEYS, section_with_own_names
from sansgpu.config.plain_data import InvalidDataError, require_plain
from sansgpu.config.remedies import COUNTERPARTS, advice
from sansgpu.config.wording import counted, shown, truncate

# Declarations of a key in its field's `json_schema_extra`. By default, a resumed run cannot change keys of the sections
# `model` and `data`, but it can change those of `training`.
FIXED: JsonDict = {"fixed": True}
CHANGEABLE: JsonDict = {"fixed": False}
TUNABLE_DATA: JsonDict = {"tunable": True}  # `sansgpu tune` may search this key of `data` if all examples are windows


def unsearchable(reason: str) -> JsonDict:
    """Declares that `sansgpu tune` cannot search a key."""
    return {"unsearchable": reason}


INPUT_PATH: JsonDict = {"input_path": True}  # may name a file or a folder to read


def also_named(*names: str) -> JsonDict:
    """Declares names of a key in other programs, whose values cannot be used here, so errors suggest the key."""
    return {"also_named": [*names]}


def runs_code(noun: str) -> JsonDict:
    """Declares that a value with a colon names a function of the user, which runs only if the command line names it."""
    return {"runs_code": noun}


CHANGES_LOSS = unsearchable("it changes the data that the loss is computed on, so losses would not be comparable")
TOP_LEVEL_KEYS = ("device", "force_cpu")  # keys of `training` that a file may also set at the top level
MAX_UNKNOWN_KEYS, MAX_WRONG_VALUES = 40, 10  # named in one message
_NAMED_BY = {"model": "name_or_path", "data": "dataset_name"}  # other programs write `model: NAME`, `data: NAME`
MAX_SUGGESTION_LENGTH = 40  # longer keys get no "did you mean"


def problems(
    error: ValidationError, root: type[BaseModel], with_unknown: bool = True, section: tuple[str, ...] = ()
) -> list[str]:
    """Returns clauses for an error message: one for each of the first wrong keys, then the number of others.

    `root` is the class of the full configuration, and `section` the path of the validated section. pydantic reports
    an error for every member of a union; these become one clause with alternatives.
    """
    unknown: dict[str, list[str]] = {}  # paths by name
    wrong: dict[str, str] = {}  # clauses by key
    for item in error.errors(include_url=False):
        path = _field_path(root, (*section, *item["loc"]))
        where = truncate(".".join(path))
        if item["type"] == "extra_forbidden":
            unknown |= {where: path} if with_unknown else {}
        elif item["type"] == "value_error":
            wrong[where] = f"{where}: {item['ctx']['error']}" if where else str(item["ctx"]["error"])
        elif item["type"] in ("model_type", "dict_type"):
            wrong[where] = f"{where or 'it'} is {shown(item['input'])}, but a section must contain keys and values"
            if isinstance(item["input"], str) and where in _NAMED_BY:
                wrong[where] += f"; write {where}.{_NAMED_BY[where]}"
        elif where not in wrong:
            wrong[where] = f"{where} is {shown(item['input'])}, but {item['msg'][0].lower()}{item['msg'][1:]}"
        elif (other := item["msg"].removeprefix("Input should be ")) not in wrong[where]:
            wrong[where] += f", or {other}"
    rest = [f"{counted(len(wrong) - MAX_WRONG_VALUES, 'more wrong value')}"] if len(wrong) > MAX_WRONG_VALUES else []
    return [*_unknown_keys(root, unknown), *list(wrong.values())[:MAX_WRONG_VALUES], *rest]


def _unknown_keys(root: type[BaseModel], unknown: dict[str, list[str]]) -> list[str]:
    """Returns a clause about all unknown keys, given by dotted name; keys with the same hint are named together."""
    named: dict[str, list[str]] = {}  # keys by hint
    for where, path in list(unknown.items())[:MAX_UNKNOWN_KEYS]:
        named.setdefault(_hint(root, path), []).append(where)
    items = [f"{', '.join(keys)}{hint}" for hint, keys in named.items()]
    if len(unknown) > MAX_UNKNOWN_KEYS:
        items.append(f"and {len(unknown) - MAX_UNKNOWN_KEYS:,} more")
    return [f"unknown {'key' if len(unknown) == 1 else 'keys:'} {'; '.join(items)}"] if unknown else []


def _field_path(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys in an error's location, without pydantic's tags for union members."""
    path: list[str] = []
    model: Any = root
    for part in location:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        path.append(str(part))
        field = model.model_fields.get(str(part))
        model = field.annotation if field else None
    return path


def _hint(root: type[BaseModel], path: list[str]) -> str:
    """Returns what to write instead of an unknown key, in parentheses, or the keys that its section has."""
    model: Any = root
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    *sections, name = path
    known = list(model.model_fields) + (list(TOP_LEVEL_KEYS) if model is root else [])
    if len(name) > MAX_SUGGESTION_LENGTH:
        return ""
    if text := advice(name):
        return f" ({text})"
    if key := counterpart(root, name):
        return f" (write {key.replace('=', ': ')})"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f" (did you mean {'.'.join([*sections, near[0]])}?)"
    return f" (known keys: {', '.join(known)})"


def counterpart(root: type[BaseModel], name: str) -> str | None:
    """Returns the dotted key, or `key=value`, that a name of another program or another section stands for, or None."""
    renamed = (f"{section}.{keys[name]}" for section, keys in KEYS.items() if name in keys)
    keys = dict(all_keys(root))
    named = (key for key, field in keys.items() if name in declared(field, "also_named", ()))
    same = [key for key in keys if key.rpartition(".")[2] == name]
    return COUNTERPARTS.get(name) or next(named, None) or next(renamed, None) or " or ".join(same) or None


class _Automatic(str):
    """The string `auto`. Arithmetic with it raises TypeError; a plain string would be repeated, as in `"auto" * 8`."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "this configuration value is auto, which is resolved when the run starts; assign a number to compute with "
            "it, e.g. config.training.batch_size = 8"
        )

    __index__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse


AUTO = cast(Literal["auto"], _Automatic("auto"))
yaml.SafeDumper.add_representer(_Automatic, yaml.SafeDumper.represent_str)
Auto = Annotated[Literal["auto"], AfterValidator(lambda _: AUTO)]


class Section(BaseModel):
    """A section that rejects unknown keys, integers of more than 64 bits and strings that are not valid Unicode.

    Values can be assigned: `config.training.learning_rate = 1e-3`. A configuration copies the sections passed to it, so
    an assignment changes only one configuration.
    """

    root: ClassVar[type[Section] | None] = None  # class of the full configuration, for keys in error messages
    section_name: ClassVar[str] = ""  # this section's name in the tables of other_names.py

    model_config = ConfigDict(
        extra="forbid",
        revalidate_instances="always",
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,  # most sections are only parts of others, and building each validator takes milliseconds
    )

    @classmethod
    def of(cls, config: Section) -> Self:
        """Returns the section of `config` that contains this class's keys."""
        section = getattr(config, cls.section_name)
        assert isinstance(section, cls), f"{type(section).__name__} lacks the keys of {cls.__name__}"
        return section

    @classmethod
    def added_keys(cls) -> list[str]:
        """Returns the keys that this class and its bases add to the section that they extend."""
        base = next(one for one in reversed(cls.__mro__) if issubclass(one, Section) and one.section_name)
        return [key for key in cls.model_fields if key not in base.model_fields]

    def __setattr__(self, key: str, value: Any) -> None:
        """Validates the section with the new value. Raises ConfigError, and changes nothing, if it is not valid."""
        self._take(self.copy(update={key: value}), self.copy())

    def copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = True) -> Self:  # type: ignore[override]  # pydantic's is deprecated
        """Returns a copy with the values of `update`. Raises ConfigError if they are not valid.

        Sections inside it are copied whether `deep` or not, so that a change of the copy never changes the original.
        """
        changes = section_with_own_names(self.section_name, update or {})
        try:
            return type(self).model_validate({**self.given_values(), **changes})
        except ValidationError as error:
            root = type(self).root or type(self)
            path = next((name.split(".") for name, section in all_sections(root) if section is type(self)), [])
            raise ConfigError(f"the configuration: {'; '.join(problems(error, root, section=(*path,)))}.") from None

    def given_values(self) -> dict[str, Any]:
        """Returns the values that were set explicitly, with nested sections as mappings."""
        inner = {key: value for key, value in self.__dict__.items() if isinstance(value, Section)}
        given = {key: self.__dict__[key] for key in self.model_fields_set}
        return {**given, **{key: section.given_values() for key, section in inner.items()}}

    def with_values(self, section: str, **values: Any) -> Self:
        """Returns a copy with other values in a nested section such as `training.distillation`, without validation."""
        first, _, inner = section.partition(".")
        nested = getattr(self, first)
        changed = nested.with_values(inner, **values) if inner else nested.model_copy(update=values)
        return self.model_copy(update={first: changed})

    def _take(self, other: Section, before: Section) -> None:
        """Applies a change: `other` is a validated copy with the change, and `before` is the section without it.

        Copies the values that are set in `other` or differ between the two. Others, e.g. the task's defaults, stay.

        Nested sections are updated in place, because a caller may hold references to them.
        """
        for key, value in other.__dict__.items():
            if isinstance(own := self.__dict__.get(key), Section):
                own._take(value, before.__dict__[key])
            elif key in other.model_fields_set or value != before.__dict__[key]:
                self.__dict__[key] = value
        object.__setattr__(self, "__pydantic_fields_set__", other.model_fields_set)

    @model_validator(mode="before")
    @classmethod
    def _from_fewer_keys(cls, values: Any) -> Any:
        """Accepts a section without the keys of tasks, e.g. that of a model which was loaded from a folder."""
        is_part = isinstance(values, Section) and not isinstance(values, cls) and issubclass(cls, type(values))
        return values.given_values() if is_part else values

    @model_validator(mode="before")
    @classmethod
    def _with_own_names(cls, values: Any) -> Any:
        """Renames other trainers' keys to sansgpu's, so that `TrainingConfig(bf16=True)` works as it does in a file."""
        return section_with_own_names(cls.section_name, values) if isinstance(values, dict) else values

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, values: Any) -> Any:
        """Removes sections without keys, e.g. `data:` alone, which are null in YAML."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in _sections(cls)}

    @model_validator(mode="after")
    def _plain(self) -> Any:
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, (str, int, list, dict)):
                try:
                    require_plain({key: value})
                except InvalidDataError as error:
                    raise ValueError(str(error)) from None
        return self


def _sections(model: type[BaseModel]) -> dict[str, type[Section]]:
    """Returns the classes of the sections inside `model` by name."""
    found = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: known for name, known in found.items() if isinstance(known, type) and issubclass(known, Section)}


def all_sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yields (dotted name, class) of every section inside `model`, including nested ones."""
    for name, section in _sections(model).items():
        yield prefix + name, section
        yield from all_sections(section, f"{prefix}{name}.")


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields (dotted key, field) of every key of `model`, e.g. `training.seed`."""
    sections = _sections(model)
    for name, field in model.model_fields.items():
        if name in sections:
            yield from all_keys(sections[name], f"{prefix}{name}.")
        else:
            yield prefix + name, field


def declared(field: FieldInfo, name: str, otherwise: Any = None) -> Any:
    """Returns what a field declares in its `json_schema_extra`."""
    return field.json_schema_extra.get(name, otherwise) if isinstance(field.json_schema_extra, dict) else otherwise


def declared_keys(model: type[BaseModel], name: str) -> dict[str, Any]:
    """Returns the keys of `model` that declare `name`, with what they declare."""
    found = {key: declared(field, name) for key, field in all_keys(model)}
    return {key: value for key, value in found.items() if value}
