"""The C functions of the compiled libraries, called with Python values.

native.h declares them all. Their arguments are checked and converted here only: C trusts whatever it gets.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

HEADER = Path(__file__).parent / "native.h"
_DECLARATION = re.compile(r"SANSGPU_KERNEL (void|int64_t) (\w+)\(([^)]*)\);")
_PARAMETER = re.compile(r"(?:(?P<pointer>.*\*)|(?P<value>int64_t|double)) \w+")

Argument = torch.Tensor | tuple[int, ...] | float | None


class ParameterKind(NamedTuple):
    """How the arguments for one kind of parameter are passed."""

    c_type: Any
    accepts: tuple[type, ...]
    description: str


_KINDS = {
    "pointer": ParameterKind(ctypes.c_void_p, (torch.Tensor, tuple, type(None)), "a tensor, a tuple of ints or None"),
    "int64_t": ParameterKind(ctypes.c_int64, (int,), "an int"),
    "double": ParameterKind(ctypes.c_double, (int, float), "a number"),
}


class Signature(NamedTuple):
    """The parameters of a function, in order, and whether it returns an int64_t."""

    kinds: tuple[ParameterKind, ...]
    returns: bool


@cache
def declared() -> dict[str, Signature]:
    """Returns the functions of native.h by name."""
    text = HEADER.read_text(encoding="utf-8")
    return {
        name: Signature(tuple(_kinds(within)), result != "void") for result, name, within in _DECLARATION.findall(text)
    }


def _kinds(parameters: str) -> Iterator[ParameterKind]:
    for parameter in [] if parameters == "void" else parameters.split(","):
        match = _PARAMETER.fullmatch(parameter.strip())
        if match is None:
            raise RuntimeError(f'{HEADER}: "{parameter.strip()}" is neither a pointer nor an int64_t nor a double.')
        yield _KINDS["pointer" if match["pointer"] else match["value"]]


class Function:
    """A C function that takes Python values and refuses, with TypeError, those that do not fit its declaration.

    A tensor becomes a pointer to its data, a tuple of ints a pointer to int64_t, None a null pointer, an int or bool an
    int64_t or a double, and a float a double. Tensors must be on the CPU, and their dtypes and strides must be those
    that the function expects.
    """

    def __init__(self, name: str, signature: Signature, function: Any) -> None:
        self._name, self._kinds, self._function = name, signature.kinds, function
        self._pointers = [place for place, kind in enumerate(signature.kinds) if kind is _KINDS["pointer"]]
        self._fitting = set[tuple[type, ...]]()  # types of arguments that passed the check, which depends on them alone
        function.argtypes = [kind.c_type for kind in signature.kinds]
        function.restype = ctypes.c_int64 if signature.returns else None

    def __call__(self, *arguments: Argument) -> Any:
        types = tuple(map(type, arguments))
        if types not in self._fitting:
            self._check(arguments)
            self._fitting.add(types)
        values: list[Any] = [*arguments]
        for place in self._pointers:
            value = values[place]
            if isinstance(value, tuple):
                values[place] = (ctypes.c_int64 * len(value))(*value)
            elif value is not None:
                values[place] = value.data_ptr()
        return self._function(*values)

    def _check(self, arguments: tuple[Argument, ...]) -> None:
        if len(arguments) != len(self._kinds):
            raise TypeError(f"{self._name} takes {len(self._kinds)} arguments, but was called with {len(arguments)}.")
        for place, (argument, kind) in enumerate(zip(arguments, self._kinds, strict=True), start=1):
            if not isinstance(argument, kind.accepts):
                given = type(argument).__name__
                raise TypeError(f"argument {place} of {self._name} must be {kind.description}, not {given}.")


@cache
def functions(library: Path) -> dict[str, Function]:
    """Loads a library and returns its declared functions by name. Raises OSError if it does not fit this system."""
    loaded = ctypes.CDLL(str(library))
    return {
        name: Function(name, signature, getattr(loaded, name))
        for name, signature in declared().items()
        if hasattr(loaded, name)
    }
