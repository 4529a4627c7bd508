"""The folder of the studio: uploaded data, runs, and "ways" to a model, which are a configuration with choices each."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sansgpu.config import ConfigError, RunPaths, SansGPUError
from sansgpu.config.parse import finish_time, normal_time
from sansgpu.config.paths import RUNS, contains_run
from sansgpu.config.plain_data import InvalidDataError, parse_json, read_regular
from sansgpu.config.wording import truncate
from sansgpu.files.atomic import make_folder, write_failures_as, write_text
from sansgpu.files.marks import has_link_in_path
from sansgpu.jobs.init.answers import PURPOSES
from sansgpu.studio.commands import Commands, Detached

STATE = ".studio"  # choices, the output of runs, and the processes that were started
DATA = Path("data")  # uploaded files, in a folder for each way
MAX_STATE_BYTES = 1 << 20
MAX_UPLOAD_BYTES = 4 << 30
MAX_NAME = 60
MAX_WATCHED = 1000  # files of a dataset whose changes are seen
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Choices:
    """The user's choices for one model: task, data, base model, training time, and other configuration keys."""

    task: str | None = None
    task_is_guessed: bool = False  # from the rows
    data: str | None = None
    model: str | None = None
    time: str = ""  # hours or minutes such as 2h or 30m, or a time of day such as 07:00; "": as proposed
    settings: tuple[str, ...] = ()  # each is key.path=value
    written: str = ""  # the SHA-256 of the configuration as it was written

    def init_command(self, name: str) -> list[str]:
        """Returns the command that writes the configuration."""
        command = ["init", f"{name}.yaml", "--text", self.data or "", "--task", self.task or ""]
        command += ["--model", self.model] if self.model else []
        settings = list(self.settings)
        if ":" in self.time:
            try:
                left = finish_time(normal_time(self.time), datetime.now()) - datetime.now()
            except ValueError as error:
                raise ConfigError(f"the time cannot be used: {error}.") from None
            command += ["--hours", f"{max(1, round(left.total_seconds() / 60))}m"]
            settings.append(f"training.until={self.time}")
        elif self.time:
            command += ["--hours", self.time]
        return [*command, *replace(self, settings=tuple(settings)).set_arguments, "--yes", "--force"]

    def with_setting(self, setting: str) -> Choices:
        """Returns the choices with a key set; an earlier value of the key is replaced."""
        key = setting.partition("=")[0].strip()
        return replace(self, settings=(*self.without_key(key).settings, setting))

    def with_form(self, form: Mapping[str, str]) -> Choices:
        """Returns the choices with the keys that a form sets; an empty value removes a key. Raises ConfigError."""
        choices = self
        for key, value in form.items():
            if key == "task":
                choices = replace(choices, task=known_task(value), task_is_guessed=False)
            elif key == "setting":
                choices = choices.with_setting(value)
            elif "." in key:
                choices = choices.with_setting(f"{key}={value}") if value else choices.without_key(key)
        return choices

    @property
    def set_arguments(self) -> list[str]:
        return [part for setting in self.settings for part in ("--set", setting)]

    def without_key(self, key: str) -> Choices:
        return replace(self, settings=tuple(one for one in self.settings if one.partition("=")[0].strip() != key))


_CHOICES = TypeAdapter(Choices)


class Project:
    """The folder, in which the studio runs its commands."""

    def __init__(self, root: Path) -> None:
        self.root, self.state = root, root / STATE
        self.commands = Commands(root)

    # Ways

    def ways(self) -> list[str]:
        """Returns the names of all ways, the last changed one first."""
        files = [file for file in self.state.glob("*.json") if _is_name(file.stem)]
        files.sort(key=lambda file: (file.lstat().st_mtime, file.name), reverse=True)
        return [file.stem for file in files]

    def answers(self, name: str) -> Choices:
        """Returns what was chosen on a way. Raises ConfigError if there is none of this name."""
        try:
            answers = _CHOICES.validate_python(parse_json(read_regular(self._answers_file(name), MAX_STATE_BYTES)))
        except FileNotFoundError:
            raise ConfigError(f"there is no way {truncate(name)}; begin a new one.") from None
        except (OSError, ValueError, InvalidDataError):
            answers = None
        if answers is None or answers.task not in (None, *PURPOSES):
            raise ConfigError(f"{STATE}/{name}.json is damaged; delete it.")
        return answers

    def answers_or_problem(self, name: str) -> Choices | str:
        try:
            return self.answers(name)
        except ConfigError as error:
            return str(error)

    def save(self, name: str, answers: Choices) -> None:
        """Keeps the choices, with which failed commands may succeed. Raises SansGPUError if that is not possible."""
        file = self._answers_file(name)
        with write_failures_as(SansGPUError, file):
            make_folder(self.state)
            write_text(file, json.dumps(asdict(answers), indent=1) + "\n")
        self.commands.forget_failed(name)

    def change(self, name: str, **changes: Any) -> None:
        self.save(name, replace(self.answers(name), **changes))

    def new_way(self, wanted: str, answers: Choices) -> str:
        """Saves choices under the wanted name, or with a number after it if the name is taken."""
        stem = safe_name(wanted) or "model"
        files = [*self.root.glob("*.yaml"), *self.root.glob(f"{RUNS}/*/"), *self.root.glob(f"{DATA}/*/")]
        taken = {*self.ways(), *(path.name.removesuffix(".yaml") for path in files)}
        name = next(one for one in numbered(stem) if one not in taken)
        self.save(name, answers)
        return name

    def _answers_file(self, name: str) -> Path:
        if not _is_name(name):
            raise ConfigError(f"{truncate(name)!r} is not a name; use letters, digits, hyphens and underscores.")
        return self._without_links(self.state / f"{name}.json")

    def _without_links(self, path: Path) -> Path:
        """Returns a path in the project. Raises ConfigError if it has a symlink, which may lead out of the project."""
        if has_link_in_path(self.root, str(path.relative_to(self.root))):
            raise ConfigError(
                f"{path.relative_to(self.root)} is a symlink or below one, which is not followed; remove it."
            )
        return path

    def has(self, name: str) -> bool:
        """Returns whether a file or folder exists; `name` is relative to the project, or absolute."""
        try:
            return (self.root / name).exists()
        except (OSError, ValueError):  # the name is too long, or has a null character
            return False

    # The configuration

    def config_text(self, name: str) -> str:
        """Returns the configuration of a way as it is on the disk; "" if there is none."""
        try:
            return read_regular(self.root / f"{name}.yaml", MAX_STATE_BYTES).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def note_written(self, name: str) -> None:
        """Records the content of a configuration that was just written."""
        self.save(name, replace(self.answers(name), written=_digest(self.config_text(name))))

    def is_edited(self, name: str) -> bool:
        """Returns whether the configuration was changed or written by hand, so that it must not be replaced."""
        text = self.config_text(name)
        return bool(text) and _digest(text) != self.answers(name).written

    # Data

    def upload_folder(self, name: str) -> Path:
        self._answers_file(name)  # checks the name
        return self._without_links(self.root / DATA / name)

    def dataset(self, name: str) -> str | None:
        """Returns the path of a way's uploaded file in the project, or of their folder if there are several files."""
        folder = self.upload_folder(name)
        files = sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
        return str((files[0] if len(files) == 1 else folder).relative_to(self.root)) if files else None

    def state_of(self, data: str) -> Any:
        """Returns what changes when the files of a dataset change."""
        path = self.root / data
        try:
            files = [path, *islice(path.rglob("*"), MAX_WATCHED)] if path.is_dir() else [path]
            return [(str(one), one.stat().st_mtime_ns, one.stat().st_size) for one in files]
        except (OSError, ValueError):
            return None

    # Runs

    def run_folder(self, path: str) -> Path:
        """Returns the folder of a run by its path in the project. Raises ConfigError if it leaves the project."""
        with suppress(OSError, ValueError, RuntimeError):  # too long, a null character, or a circle of links
            folder = (self.root / path).resolve()
            folder.is_dir()  # raises OSError if the name is too long
            if folder.is_relative_to(self.root) and folder != self.root and STATE not in folder.parts:
                return folder
        raise ConfigError(f"{truncate(path)} is not a run of this project; choose one from the list.")

    def run_path(self, path: str) -> str:
        """Returns the path of a run in the project, which no command takes for an option. Raises ConfigError."""
        return as_argument(str(self.run_folder(path).relative_to(self.root)))

    def runs_of(self, name: str) -> list[str]:
        """Returns the run folders of a way, the newest first."""
        folders = [RUNS / one for one in self._started_names(name)]
        return [str(path) for path in reversed(folders)]

    def _started_names(self, name: str) -> Iterator[str]:
        for one in numbered(name):
            if not (contains_run(self.root / RUNS / one) or self.process_file(str(RUNS / one)).exists()):
                return
            yield one

    def new_run(self, name: str) -> str:
        """Returns the path of a new folder for the next run of a way."""
        return next(str(RUNS / one) for one in numbered(name) if self._is_free(RUNS / one))

    def _is_free(self, path: Path) -> bool:
        return not (self.root / path).exists() and not self.process_file(str(path)).exists()

    def process_file(self, run: str) -> Path:
        """Returns the file that says which process trains a run."""
        return self._without_links(self.state / "processes" / f"{_flat(run)}.json")

    def start(self, run: str, command: list[str]) -> None:
        """Starts a process that goes on if the studio ends. Raises SansGPUError if it cannot be started."""
        with write_failures_as(SansGPUError, self.state):
            make_folder(self.process_file(run).parent)
            Detached.start(command, self.root, self.process_file(run))

    def process(self, run: str) -> Detached:
        """Returns the process that the studio started last for a run; it may have ended."""
        return Detached(self.process_file(run), RunPaths(self.root / run).lock)


def known_task(task: str) -> str:
    """Returns the task. Raises ConfigError if it has no purpose."""
    if task not in PURPOSES:
        raise ConfigError(f"there is no purpose {truncate(task)}; choose one from the page.")
    return task


def safe_name(text: str, others: str = "") -> str:
    """Returns a file name made of the English letters, digits and `others` of a text; "" if it has none."""
    return re.sub(rf"[^A-Za-z0-9._{others}-]+", "-", text).strip(".-_")[:MAX_NAME].rstrip(".-_")


def as_argument(path: str) -> str:
    """Returns a path that a command does not take for an option."""
    return f"./{path}" if path.startswith("-") else path


def shown_command(arguments: list[str]) -> str:
    return shlex.join(["sansgpu", *arguments])


def numbered(stem: str) -> Iterator[str]:
    """Yields a name, and then the same name with the numbers from 2."""
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and len(name) <= MAX_NAME + 10


def _flat(run: str) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:12] if len(run) > MAX_NAME * 2 else run.replace("/", "__")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
