"""Train language models on machines without a GPU."""

from __future__ import annotations

from sansgpu.version import __version__

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would delay the handling of Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from sansgpu.api import Callback, Run, fit

__all__ = ["Callback", "Run", "__version__", "fit"]


def __getattr__(name: str) -> Any:
    """Imports `sansgpu.api` on first use, because importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module sansgpu has no attribute {name}")
    from importlib import import_module

    from sansgpu.machine.launch import set_openmp

    set_openmp()  # must run before torch is imported
    return getattr(import_module("sansgpu.api"), name)
