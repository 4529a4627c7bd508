"""Calls the C functions of the compiled libraries with Python values.

native.h declares all functions, their structs, and the constants that C++ and Python share. Argument types are checked
and converted only here: the C code relies on them.
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
_CONSTANT = re.compile(r"SANSGPU_CONSTANT\((\w+), (-?\d+)\);")
_STRUCT = re.compile(r"struct (\w+) \{([^}]*)\};")
_FUNCTION = re.compile(r"SANSGPU_KERNEL (void|int64_t) (\w+)\(([^)]*)\);")
_FIELDS = re.compile(r"(\w+\**) (\w+(?:\[\d+\])?(?:, \w+(?:\[\d+\])?)*)")  # a type and its fields, which may be arrays
_PARAMETER = re.compile(r"(\w+)(\**) \w+")
_C_TYPES: dict[str, Any] = {
    "uint8_t": ctypes.c_uint8,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}

Argument = torch.Tensor | ctypes.Structure | ctypes.Array[Any] | tuple[Any, ...] | float | None


class ParameterType(NamedTuple):
    """How the arguments for one type of parameter are passed."""

    c_type: Any
    accepts: tuple[type, ...]
    description: str
    element: Any = None  # type of the values that a pointer points to; None: any


class Signature(NamedTuple):
    """The parameters of a function, in order, and whether it returns an int64_t."""

    parameters: tuple[ParameterType, ...]
    returns: bool


@cache
def constants() -> dict[str, int]:
    """Returns the constants of native.h by name."""
    return {name: int(value) for name, value in _CONSTANT.findall(_header())}


@cache
def structs() -> dict[str, Any]:
    """Returns the structs of native.h by name, as ctypes classes. Pointer fields hold addresses; None is null."""
    found: dict[str, Any] = {}
    for name, body in _STRUCT.findall(_header()):
        found[name] = type(name, (ctypes.Structure,), {"_fields_": [*_fields(body, found)]})
    return found


@cache
def declared() -> dict[str, Signature]:
    """Returns the functions of native.h by name."""
    return {
        name: Signature(tuple(_types(within)), result != "void")
        for result, name, within in _FUNCTION.findall(_header())
    }


@cache
def _header() -> str:
    """Returns native.h without comments."""
    return re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))


def _plain(declaration: str) -> str:
    """Removes `const` and `struct` from a declaration, because they do not change how a value is passed."""
    return re.sub(r"\b(const|struct)\b ?", "", declaration.strip()).replace("* *", "**")


def _fields(body: str, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    *declarations, _ = body.split(";")
    for declaration in map(_plain, declarations):
        match = _FIELDS.fullmatch(declaration)
        if match is None:
            raise RuntimeError(f'{HEADER}: "{declaration}" declares fields of an unsupported type.')
        one = ctypes.c_void_p if match[1].endswith("*") else {**_C_TYPES, **known}[match[1]]
        for field in match[2].split(", "):
            name, _, count = field.rstrip("]").partition("[")
            yield name, one * int(count) if count else one


def _types(parameters: str) -> Iterator[ParameterType]:
    for parameter in [] if parameters == "void" else map(_plain, parameters.split(",")):
        match = _PARAMETER.fullmatch(parameter)
        parameter_type = _type(*match.groups()) if match else None
        if parameter_type is None:
            raise RuntimeError(f'{HEADER}: "{parameter}" has an unsupported type; use a pointer, int64_t or double.')
        yield parameter_type


@cache
def _type(name: str, stars: str) -> ParameterType | None:
    """Returns how to pass a parameter of a C type, or None if the type is not supported."""
    if not stars:
        values = {"int64_t": ((int,), "an int"), "double": ((int, float), "a number")}
        return ParameterType(_C_TYPES[name], *values[name]) if name in values else None
    if struct := structs().get(name):
        given = (struct, tuple, ctypes.Array)
        return ParameterType(ctypes.c_void_p, given, f"a struct {name}, or a tuple or an array of them", struct)
    element = ctypes.c_void_p if stars == "**" else _C_TYPES.get(name)
    if element is None:
        return ParameterType(ctypes.c_void_p, (torch.Tensor, type(None)), "a tensor or None")
    accepts = (torch.Tensor, tuple, type(None))
    numbers = "numbers" if name in ("float", "double") else "ints"
    return ParameterType(ctypes.c_void_p, accepts, f"a tensor, a tuple of {numbers} or None", element)


class Function:
    """A C function that takes Python values. Raises TypeError if their types do not match its declaration.

    A tensor is passed as a pointer to its data, a tuple as a pointer to an array of numbers or structs of the declared
    type, a struct or an array of structs as a pointer to it, and None as a null pointer. An int or bool becomes an
    int64_t or a double, and a float a double. The caller must ensure that tensors are on the CPU and have the dtypes
    and strides that the function expects.
    """

    def __init__(self, name: str, signature: Signature, function: Any) -> None:
        self._name, self._parameters, self._function = name, signature.parameters, function
        pointers = [
            place for place, parameter in enumerate(signature.parameters) if parameter.c_type is ctypes.c_void_p
        ]
        self._pointers = [(place, signature.parameters[place].element) for place in pointers]
        self._fitting = set[tuple[type, ...]]()  # argument types that passed `_check`, which depends only on them
        function.argtypes = [parameter.c_type for parameter in signature.parameters]
        function.restype = ctypes.c_int64 if signature.returns else None

    def __call__(self, *arguments: Argument) -> Any:
        types = tuple(map(type, arguments))
        if types not in self._fitting:
            self._check(arguments)
            self._fitting.add(types)
        values: list[Any] = [*arguments]
        for place, element in self._pointers:
            value = values[place]
            if isinstance(value, torch.Tensor):
                values[place] = value.data_ptr()
            elif isinstance(value, tuple):
                values[place] = (element * len(value))(*value)
            elif isinstance(value, ctypes.Structure):
                values[place] = ctypes.byref(value)
        return self._function(*values)

    def _check(self, arguments: tuple[Argument, ...]) -> None:
        if len(arguments) != len(self._parameters):
            raise TypeError(f"{self._name} expects {len(self._parameters)} arguments, got {len(arguments)}.")
        for place, (argument, parameter) in enumerate(zip(arguments, self._parameters, strict=True), start=1):
            is_other = isinstance(argument, ctypes.Array) and argument._type_ is not parameter.element
            if is_other or not isinstance(argument, parameter.accepts):
                given = type(argument).__name__
                raise TypeError(f"argument {place} of {self._name} must be {parameter.description}, not {given}.")


@cache
def functions(library: Path) -> dict[str, Function]:
    """Loads a library and returns its declared functions by name. Raises OSError if this system cannot load it."""
    loaded = ctypes.CDLL(str(library))
    return {
        name: Function(name, signature, getattr(loaded, name))
        for name, signature in declared().items()
        if hasattr(loaded, name)
    }
