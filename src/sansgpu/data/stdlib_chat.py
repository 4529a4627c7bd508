"""Builds conversations from the docstrings of Python's standard library."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from sansgpu.data.rows import SourceRow
from sansgpu.data.stdlib import library_modules

_MIN_ANSWER = 20  # characters; shorter answers say too little
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)


def stdlib_conversations(files: Mapping[str, Path]) -> Iterator[SourceRow]:
    """Yields a question and an answer for each public module, class and function with a docstring.

    The answer is the docstring's first sentence. Files that this Python version cannot parse are skipped.
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
