"""A file of lines that a command writes over a long time, and continues if it was killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import InvalidDataError
from sansgpu.files.atomic import atomic_write, make_folder, sync_to_disk
from sansgpu.files.ownership import require_file
from sansgpu.files.reading import read_object


class PartialFile:
    """Writes lines to `path`.partial, which becomes `path` once all are written.

    A command that was killed continues after the last complete line when it is repeated. `option` names the path.
    """

    def __init__(self, path: Path, target: str, fingerprint: str, weights: str, option: str = "--output") -> None:
        self._path, self._target, self._option = path, target, option
        self._content = {"fingerprint": fingerprint, "weights": weights}
        self._partial, self._request = (path.with_name(f"{path.name}.{suffix}") for suffix in ("partial", "request"))

    def open(self) -> int:
        """Returns the number of lines that an earlier run has written.

        Raises ConfigError if that run had a different request.
        """
        make_folder(self._path.parent)
        for path in (self._partial, self._request):
            if path.is_symlink() or path.is_dir():
                raise ConfigError(f"{path} is not a regular file; choose another {self._option}.")
        lines = 0
        if self._request.exists():
            self._require_own_request()
            lines = self._drop_torn_line()
        else:
            require_file(self._partial, option=self._option)
            with atomic_write(self._request) as partial:
                partial.write_text(json.dumps(self._content) + "\n", encoding="utf-8")
        self._file = self._partial.open("a", encoding="utf-8")
        return lines

    def _require_own_request(self) -> None:
        try:
            known = read_object(self._request)
        except (ConfigError, InvalidDataError):
            known = {}
        if known.get("fingerprint") == self._content["fingerprint"] and known != self._content:
            raise ConfigError(
                f"the weights of {self._target} have changed since {self._partial} was started; delete "
                f"{self._request} and {self._partial} to start over, or choose another {self._option}."
            )
        if known != self._content:
            raise ConfigError(
                f"{self._partial} was started with a different model, data or options; run that command again, delete "
                f"{self._request} and {self._partial}, or choose another {self._option}."
            )

    def _drop_torn_line(self) -> int:
        """Removes an incomplete last line; returns the number of complete lines."""
        if not self._partial.exists():
            return 0
        lines = size = 0
        with self._partial.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    lines, size = lines + 1, size + len(line)
        with self._partial.open("rb+") as file:
            file.truncate(size)
        return lines

    def write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def finish(self) -> None:
        """Renames the file to its final name."""
        self._file.close()
        sync_to_disk(self._partial)
        self._partial.replace(self._path)
        self._request.unlink()
        sync_to_disk(self._path.parent)

    def finish_with(self, select: Callable[[Iterable[str]], Iterable[str]]) -> None:
        """Writes the lines that `select` makes of those in the file to its final name."""
        self._file.close()
        with (
            self._partial.open(encoding="utf-8") as lines,
            atomic_write(self._path) as partial,
            partial.open("w", encoding="utf-8") as file,
        ):
            file.writelines(select(lines))
        self._partial.unlink()
        self._request.unlink()
