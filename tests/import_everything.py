"""`python -m tests.import_everything` imports every module of sansgpu in a Python that has no compiled packages.

Stand-ins replace the packages of others, such as torch, except a few in pure Python. So each of our own modules is
compiled and run by this Python, with its standard library.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Packages in pure Python that evaluate our annotations or templates, and the packages that they need.
REAL = {
    "annotated_doc",
    "click",
    "jinja2",
    "markupsafe",
    "pygments",
    "rich",
    "shellingham",
    "typer",
    "typing_extensions",
}
BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
OPERATORS = (*BINARY, *(f"r{name}" for name in BINARY), "neg", "invert", "getitem", "setitem", "lt", "le", "gt", "ge")


class StandInType(type):
    """The type of stand-ins, which are classes, so that ours can inherit from them."""

    def __getattr__(cls, name: str) -> StandInType:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __index__(cls) -> int:  # also of int() and float()
        return 0

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __call__(cls, *arguments: object, **options: object) -> object:
        """Creates an instance of one of our classes. A stand-in as a decorator returns what it decorates."""
        if cls.__module__.partition(".")[0] == "sansgpu":
            return super().__call__(*arguments, **options)
        decorates = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if decorates else stand_in(cls.__name__)


def stand_in(name: str) -> StandInType:
    return StandInType(name, (), {})


for operator in OPERATORS:
    setattr(StandInType, f"__{operator}__", lambda cls, *_: stand_in(cls.__name__))


class StandInModule(ModuleType):
    """A module in which every name is a stand-in."""

    def __getattr__(self, name: str) -> StandInType:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


class StandInFinder(MetaPathFinder, Loader):
    """Finds a stand-in for every package but ours, those of the standard library and those in REAL."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.partition(".")[0]
        is_real = package in sys.stdlib_module_names or package in REAL or package == "sansgpu"
        return None if is_real else ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    sys.meta_path.insert(0, StandInFinder())
    import sansgpu

    names = [module.name for module in pkgutil.walk_packages(sansgpu.__path__, "sansgpu.")]
    for name in names:
        if not name.endswith(".__main__"):
            importlib.import_module(name)
    print(len(names))


if __name__ == "__main__":
    main()
