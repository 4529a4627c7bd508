"""Example data that needs no download: the modules of Python's standard library, and sums of two numbers."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from sansgpu.data.order import generator
from sansgpu.data.rows import SourceRow

_MIN_ANSWER = 20  # characters; shorter sentences are not informative enough
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)


def stdlib_conversations(files: Mapping[str, Path]) -> Iterator[SourceRow]:
    """Yields a question and an answer for each public module, class and function with a docstring.

    The answer is the first sentence of the docstring. Skips files that this Python version cannot parse.
    """
    public = {file: path for file, path in files.items() if _is_public(file)}
    for module in library_modules(public):
        for name, question, docstring in _documented(module.tree, module.name):
            found = _SENTENCE.match(inspect.cleandoc(docstring).strip())
            answer = " ".join(found[1].split()) if found else ""
            if len(answer) >= _MIN_ANSWER:
                yield SourceRow(name, {"prompt": question, "completion": answer})


def _is_public(file: str) -> bool:
    return not any(part.startswith("_") and part != "__init__.py" for part in PurePath(file).parts)


def _documented(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str, str]]:
    """Yields (name, question, docstring) for a module or class and its public definitions."""
    if docstring := ast.get_docstring(node, clean=False):
        yield name, f"What is {name}?", docstring
    for inner in node.body:
        if isinstance(inner, ast.ClassDef) and not inner.name.startswith("_"):
            yield from _documented(inner, f"{name}.{inner.name}")
        elif (
            isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))
            and not inner.name.startswith("_")
            and (docstring := ast.get_docstring(inner, clean=False))
        ):
            yield f"{name}.{inner.name}", f"What does {name}.{inner.name} do?", docstring


_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # folders


class LibraryModule(NamedTuple):
    """A parsed module."""

    file: str  # path relative to the library's folder
    name: str  # dotted, with the names of its packages
    source: str
    tree: ast.Module


def library_files() -> tuple[Path, list[Path]]:
    """Returns the library's folder and its modules, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # installed packages may be many thousands
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return root, sorted(found)


def library_modules(files: Mapping[str, Path]) -> Iterator[LibraryModule]:
    """Parses `files`, whose keys are paths relative to the library's folder; skips those that cannot be parsed."""
    for file, path in files.items():
        try:
            with tokenize.open(path) as opened:  # uses the file's declared encoding
                source = opened.read()
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        place = PurePath(file)
        parts = place.parent.parts if place.name == "__init__.py" else place.with_suffix("").parts
        yield LibraryModule(file, ".".join(parts), source, tree)


SUMS = {"train": 2000, "validation": 100}  # rows; splits share no sums
LARGEST = 99
_QUESTION = "What is {} + {}? Answer with the number only."


def sums(part: str) -> Iterator[SourceRow]:
    """Yields questions about the sum of two numbers of one or two digits, with their answers."""
    numbers = generator(0, "arithmetic").permutation((LARGEST + 1) ** 2)
    first = sum(list(SUMS.values())[: list(SUMS).index(part)])
    for place, number in enumerate(numbers[first : first + SUMS[part]].tolist(), 1):
        one, other = divmod(number, LARGEST + 1)
        question = _QUESTION.format(one, other)
        yield SourceRow(f"sum {place}", {"prompt": [{"role": "user", "content": question}], "answer": str(one + other)})


def sums_fingerprint(part: str) -> str:
    """Identifies the sums of a split."""
    return f"arithmetic-{part}-{SUMS[part]}-{LARGEST}-{_QUESTION}"
