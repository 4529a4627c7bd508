"""Extracts a knowledge graph from the source of Python's standard library.

A document is a module, a class or a function. Its triples describe its own code without nested definitions, which have
documents of their own.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from sansgpu.data.built_in import LibraryModule, library_modules
from sansgpu.data.forms.graphs import GraphDocument, Triple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_NOT_ENTERED = (*_DEFINITIONS, ast.Name, ast.Constant, ast.expr_context)  # nested definitions and leaf nodes
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Definition: TypeAlias = _Function | ast.ClassDef
_Fact: TypeAlias = tuple[str, str | None]  # relation and tail; None if the tail has no name
_KEYWORDS = re.compile(r"(async[ \t]+)?(def|class)[ \t]+")


def stdlib_documents(files: Mapping[str, Path]) -> Iterator[GraphDocument]:
    """Yields a document for each module, class and function of `files`, whose keys are paths in the library's folder.

    Every head has a span in the text; the group is the file. Files that this Python version cannot parse are skipped.
    """
    classes = {name for name, value in vars(builtins).items() if isinstance(value, type)}
    documents: list[GraphDocument] = []
    for parsed in library_modules(files):
        module = _Module(parsed)
        documents += module.documents()
        classes.update(module.classes)
    for document in documents:
        yield document._replace(triples=tuple(_with_instantiations(document.triples, classes)))


def _with_instantiations(triples: Iterable[Triple], classes: set[str]) -> Iterator[Triple]:
    """Replaces `calls` with `instantiates` if the tail is a class, which is only known after reading all files."""
    for triple in triples:
        instantiates = triple.relation == "calls" and triple.tail in classes
        yield triple._replace(relation="instantiates") if instantiates else triple


class _Module:
    """The documents of one file."""

    def __init__(self, parsed: LibraryModule) -> None:
        self._file, self._name, self._tree = parsed.file, parsed.name, parsed.tree
        self._lines = parsed.source.split("\n")
        self._scopes: dict[ast.AST, list[ast.AST]] = {}
        self._top_names = frozenset(_bound_names(self._scope(self._tree)))
        self.classes: list[str] = []

    def documents(self) -> Iterator[GraphDocument]:
        """Yields the module's document, then those of its definitions in source order."""
        text = self._module_text()
        span = (len("module "), len("module ") + len(self._name))
        triples = [Triple(self._name, relation, tail, span) for relation, tail in self._module_facts() if tail]
        yield GraphDocument(self._name, self._file, text, tuple(dict.fromkeys(triples)))
        yield from self._inner_documents(self._tree, "")

    def _inner_documents(self, outer: ast.AST, prefix: str) -> Iterator[GraphDocument]:
        for node in self._scope(outer):
            if isinstance(node, _DEFINITIONS):
                name = f"{prefix}{node.name}"
                document = self._document(name, node)
                if document:
                    yield document
                yield from self._inner_documents(node, f"{name}.")

    def _document(self, name: str, node: _Definition) -> GraphDocument | None:
        """Builds a definition's document; None if its name is not on the same line as `def`."""
        if isinstance(node, ast.ClassDef):
            self.classes.append(node.name)
            facts, text = self._class_facts(node), _Excerpt(self._lines, _class_lines(node), node.col_offset)
        else:
            facts, text = self._function_facts(node), _Excerpt(self._lines, _all_lines(node), node.col_offset)
        keywords = _KEYWORDS.match(self._lines[node.lineno - 1], node.col_offset)
        span = text.span(node.lineno, keywords.end(), node.name) if keywords else None
        if span is None:
            return None
        triples = [Triple(node.name, relation, tail, span) for relation, tail in facts if tail]
        if not isinstance(node, ast.ClassDef):
            triples += _parameter_triples(node, text)
        return GraphDocument(f"{self._name}:{name}", self._file, text.text, tuple(dict.fromkeys(triples)))

    def _scope(self, outer: ast.AST) -> list[ast.AST]:
        """Returns the nodes of a definition's body in source order, without those of nested definitions."""
        if outer not in self._scopes:
            nodes: list[ast.AST] = []
            stack: list[ast.AST] = list(reversed(getattr(outer, "body", [])))
            while stack:
                node = stack.pop()
                nodes.append(node)
                if not isinstance(node, _NOT_ENTERED):
                    stack.extend(reversed(list(ast.iter_child_nodes(node))))
            self._scopes[outer] = nodes
        return self._scopes[outer]

    def _module_text(self) -> str:
        parts = [f"module {self._name}", ast.get_docstring(self._tree) or ""]
        for node in self._scope(self._tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                parts.append(_Excerpt(self._lines, _all_lines(node), node.col_offset).text)
        return "\n".join(part for part in parts if part)

    def _module_facts(self) -> Iterator[_Fact]:
        for node in self._scope(self._tree):
            match node:
                case ast.Import(names=names):
                    yield from (("imports", _last(alias.name)) for alias in names)
                case ast.ImportFrom(module=None, names=names):
                    yield from (("imports", alias.name) for alias in names)
                case ast.ImportFrom(module=str(module)):
                    yield "imports", _last(module)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield "defines", name
                case ast.Assign() | ast.AnnAssign():
                    yield from (("declares", name) for name in _assigned(node))

    def _class_facts(self, node: ast.ClassDef) -> Iterator[_Fact]:
        yield from (("inherits_from", _name(base)) for base in node.bases)
        for inner in self._scope(node):
            match inner:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield "defines", name
                    yield from (("has_field", field) for field in self._own_fields(inner))
                case ast.Assign() | ast.AnnAssign():
                    yield from (("has_field", field) for field in _assigned(inner))

    def _own_fields(self, method: ast.AST) -> Iterator[str]:
        for node in self._scope(method):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=field, ctx=ast.Store()):
                    yield field

    def _function_facts(self, function: _Function) -> Iterator[_Fact]:
        yield from (("annotated_with", _name(decorator)) for decorator in function.decorator_list)
        if function.returns:
            yield "annotated_with", _name(function.returns)
        parameters = _parameters(function)
        yield from (("has_parameter", p.arg) for n, p in enumerate(parameters) if n or p.arg not in ("self", "cls"))
        raised: ast.AST | None = None
        for node in self._scope(function):
            match node:
                case ast.Call(func=called) if node is not raised and self._is_known(called):
                    yield "calls", _name(called)
                case ast.Return(value=ast.Name() | ast.Attribute() | ast.Call() | ast.Constant() as value):
                    yield "returns", _name(value)
                case ast.Raise(
                    exc=ast.expr() as raised
                ):  # skips the next node, which is the call that creates the exception
                    yield "raises", _name(raised)
                case ast.ExceptHandler(type=ast.Tuple(elts=exceptions)):
                    yield from (("catches", _name(exception)) for exception in exceptions)
                case ast.ExceptHandler(type=ast.expr() as exception):
                    yield "catches", _name(exception)
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    yield from (("declares", name) for name in names)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield "declares", name

    def _is_known(self, called: ast.expr) -> bool:
        """Returns whether the code shows which function is called. A variable's method could belong to any class."""
        match called:
            case ast.Name() | ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                return True
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(value=ast.Name(id=owner))):
                return owner in self._top_names
        return False


class _Excerpt:
    """Dedented lines of a source file, with a mapping from source positions to characters of the excerpt."""

    def __init__(self, lines: list[str], numbers: Iterable[int], indent: int) -> None:
        self._lines = lines
        self._starts: dict[int, int] = {}  # by line number from 1: offset of column 0 in the text
        dedented, length = [], 0
        for number in numbers:
            line = lines[number - 1]
            cut = min(indent, len(line) - len(line.lstrip()))  # multi-line strings may be indented less
            self._starts[number] = length - cut
            dedented.append(line[cut:])
            length += len(line) - cut + 1
        self.text = "\n".join(dedented)

    def span(self, number: int, column: int, name: str) -> tuple[int, int] | None:
        """Returns the span in the excerpt of `name` at a line and column of the file; None if it is not there."""
        start = self._starts[number] + column
        return (start, start + len(name)) if self.text.startswith(name, start) else None

    def node_span(self, node: ast.arg) -> tuple[int, int] | None:
        """Returns the span of a parameter's name; `ast` counts columns in UTF-8 bytes."""
        line = self._lines[node.lineno - 1]
        return self.span(node.lineno, len(line.encode()[: node.col_offset].decode()), node.arg)


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, _DEFINITIONS) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _all_lines(node: ast.stmt) -> Iterable[int]:
    return range(_first_line(node), (node.end_lineno or node.lineno) + 1)


def _class_lines(node: ast.ClassDef) -> Iterable[int]:
    """Returns the line numbers before the first method, then the `def` line of each method."""
    methods = [inner for inner in node.body if isinstance(inner, _FUNCTIONS)]
    if not methods:
        return _all_lines(node)
    return [*range(_first_line(node), _first_line(methods[0])), *(method.lineno for method in methods)]


def _parameters(function: _Function) -> list[ast.arg]:
    """Returns the parameters in source order."""
    arguments = function.args
    ordered = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [parameter for parameter in ordered if parameter]


def _parameter_triples(function: _Function, text: _Excerpt) -> Iterator[Triple]:
    for parameter in _parameters(function):
        tail = _name(parameter.annotation) if parameter.annotation else None
        span = text.node_span(parameter)
        if tail and span:
            yield Triple(parameter.arg, "annotated_with", tail, span)


def _bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names bound by imports and definitions."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, _DEFINITIONS):
            yield node.name


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    """Yields the names that are assigned to, including those in a tuple."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        yield from (name.id for name in names if isinstance(name, ast.Name))


def _name(node: ast.expr) -> str | None:
    """Returns the last name of an expression: `c` for `a.b.c(x)[y]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.BinOp(left=inner):
            return _name(inner)
        case ast.Constant(value=bool() | None as value):
            return str(value)
        case ast.Constant(value=str(value)) if value.isidentifier():
            return value  # a forward reference
    return None


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]
