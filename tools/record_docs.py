"""Runs the commands of documentation pages again, and updates the outputs that the pages show.

    python -m tools.record_docs docs/train.md README.md

Run it on an idle machine. The commands of a page run in order, in a copy of the checkout with an empty cache: those in
`bash` blocks, and those in `console` blocks that show an output, in the next `text` block or below a line that begins
with `$`.

A page shows parts of an output, separated by lines `...`, and of a JSON line the keys before `...`. A new part begins
at the line that is most similar to the first line of the old part, apart from numbers, and ends at the line that is
most similar to the last one. A part that is not found, such as a generated text, follows the previous part or ends the
output, with as many lines as before.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from benchmarks.contest import ROOT, say

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# (\w+\.py)\n")
PROMPT, ELLIPSIS = "$ ", "..."
SHORTENED = ", ...}"  # ends a line of JSON of which a page shows the first keys
WIDTH = "120"  # columns of the terminal
SIMILAR = 0.6  # minimum difflib ratio of lines that correspond to each other
MOST_GROWTH = 2  # a new part has at most this many times the lines of the old part

Run = Callable[[str], str]  # runs shell commands and returns what they print


def record_page(page: str, run: Run, write: Callable[[str, str], object]) -> str:
    """Returns the page with new outputs. Calls `write(name, source)` for each Python file that the page shows."""
    blocks, parts, end, output = list(BLOCK.finditer(page)), [], 0, None
    languages = [block[1] for block in blocks] + [""]
    for block, following in zip(blocks, languages[1:], strict=True):
        language, body = block[1], block[2]
        if language == "python" and (name := FILE_NAME.match(body)):
            write(name[1], body)
        elif language == "text" and output is not None:
            body, output = renewed(body, output), None
        elif language == "bash" or (language == "console" and PROMPT not in body and following == "text"):
            output = run(body)
        elif language == "console":
            body, output = _with_prompts(body, run, following == "text")
        parts += [page[end : block.start(2)], body]
        end = block.end(2)
    return "".join([*parts, page[end:]])


def _with_prompts(body: str, run: Run, shown_below: bool) -> tuple[str, str | None]:
    """Returns a block of commands after `$` with their new outputs, and all output if a block below shows it."""
    commands = re.split(rf"^{re.escape(PROMPT)}", body, flags=re.MULTILINE)[1:]
    pairs = [command.split("\n", 1) for command in commands]
    if not shown_below and not any(shown.strip() for _, shown in pairs):
        return body, None
    outputs = [run(command) for command, _ in pairs]
    new = [f"{PROMPT}{c}\n{renewed(old, out) if old else ''}" for (c, old), out in zip(pairs, outputs, strict=True)]
    return "".join(new), "".join(outputs)


def renewed(old: str, output: str) -> str:
    """Returns the parts of `output` that correspond to the parts of an old output."""
    lines, result, position = [line.rstrip() for line in output.splitlines()], [], 0
    parts = list(_parts(old.splitlines()))
    for number, part in enumerate(parts):
        if part == [ELLIPSIS]:
            result += part
            continue
        start = _find(part[0], lines, position)
        if start is None:
            start = max(position, len(lines) - len(part)) if number == len(parts) - 1 and number else position
        last = _find(part[-1], lines[: start + MOST_GROWTH * len(part)], start) if len(part) > 1 else start
        position = start + len(part) if last is None or last == start else last + 1
        shown = zip_longest(part, lines[start:position], fillvalue="")
        result += [_shortened(line, old) for old, line in shown][: position - start]
    return "".join(f"{line}\n" for line in result)


def _parts(lines: Sequence[str]) -> Iterator[list[str]]:
    """Splits lines at those that are an ellipsis, and yields the parts and the ellipses."""
    part: list[str] = []
    for line in lines:
        if line.strip() == ELLIPSIS:
            yield from ([part] if part else [])
            yield [ELLIPSIS]
            part = []
        else:
            part.append(line)
    yield from ([part] if part else [])


def _find(old: str, lines: Sequence[str], start: int) -> int | None:
    """Returns the index of the most similar line; numbers only decide between lines that are otherwise equal."""

    def similarity(number: int) -> tuple[float, float]:
        new = lines[number][: len(old)] if old.endswith(SHORTENED) else lines[number]
        pairs = ((_without_numbers(old), _without_numbers(new)), (old, new))
        return tuple(difflib.SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs)  # type: ignore

    best = max(range(start, len(lines)), key=similarity, default=None)
    return best if best is not None and similarity(best)[0] >= SIMILAR else None


def _shortened(line: str, old: str) -> str:
    """Returns a JSON line with only the keys that the old line shows, if the old line is shortened."""
    if not old.endswith(SHORTENED) or not line.startswith("{"):
        return line
    values, keys = json.loads(line), re.findall(r'"([^"]+)": ', old)
    return json.dumps({key: values[key] for key in keys if key in values})[:-1] + SHORTENED


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d,.:]*", "#", line).strip()


def copy_checkout(folder: Path) -> None:
    """Copies what git tracks or would track, links the virtual environment, and makes the folder a repository."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))


def runner(folder: Path) -> Run:
    """Returns a function that runs commands in a folder, and ends this process if they fail."""
    path = os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ["PATH"]))
    variables = {
        **os.environ,
        "PATH": path,
        "SANSGPU_CACHE": str(folder / ".cache"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": WIDTH,
    }

    def run(commands: str) -> str:
        say(commands.strip())
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=folder, env=variables, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode} of\n{commands}\n{done.stdout[-2000:]}")
        return done.stdout

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    for page in parser.parse_args().pages:
        with tempfile.TemporaryDirectory(prefix="sansgpu-docs-") as name:
            copy_checkout(folder := Path(name))

            def write(file: str, source: str, folder: Path = folder) -> None:
                (folder / file).write_text(source, encoding="utf-8")

            new = record_page(page.read_text(encoding="utf-8"), runner(folder), write)
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
