"""Builds conversations from the docstrings of Python's standard library, which every machine has."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from sansgpu.data.rows import SourceRow

_MIN_ANSWER = 20  # characters; shorter answers say too little
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)


def stdlib_conversations(files: Mapping[str, Path]) -> Iterator[SourceRow]:
    """Yields a question and an answer for each public module, class and function with a docstring.

    The answer is the docstring's first sentence. Files that this Python version cannot parse are skipped.
    """
    for file, path in files.items():
        if any(part.startswith("_") and part != "__init__.py" for part in PurePath(file).parts):
            continue
        try:
            with tokenize.open(path) as source:  # uses the file's declared encoding
                tree = ast.parse(source.read())
        except (SyntaxError, ValueError):
            continue
        place = PurePath(file)
        module = ".".join(place.parent.parts if place.name == "__init__.py" else place.with_suffix("").parts)
        for name, question, docstring in _documented(tree, module):
            found = _SENTENCE.match(inspect.cleandoc(docstring).strip())
            answer = " ".join(found[1].split()) if found else ""
            if len(answer) >= _MIN_ANSWER:
                yield SourceRow(name, {"prompt": question, "completion": answer})


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
