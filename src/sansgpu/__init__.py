"""Train language models on machines without a GPU."""

# Without `from __future__ import annotations`, Python 3.6 compiles this file, too, and gets to the check.
import sys

if sys.version_info < (3, 11):  # noqa: UP036  # pip refuses an older one, but in a checkout nothing else does
    _problem = (
        "{} is Python {}.{}, but sansgpu needs Python 3.11 or newer; install a newer one, or run sansgpu in another "
        "environment."
    ).format(sys.executable, *sys.version_info)
    if sys.argv[:1] == ["-m"]:  # `python -m sansgpu` is importing this package
        sys.stderr.write("sansgpu: " + _problem + "\n")
        sys.exit(2)
    raise ImportError(_problem)

from sansgpu.version import __version__

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would delay the handling of Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from sansgpu.api import Callback, Run, fit

__all__ = ["Callback", "Run", "__version__", "fit"]
# Classes of the configuration with the keys of all tasks, which users import from sansgpu.config.
CONFIGURATION = {"Config": "SCHEMA"} | {n: n for n in ("ModelConfig", "TrainingConfig", "DataConfig", "load_config")}


def __getattr__(name: str) -> "Any":
    """Imports a name on first use, because importing torch takes seconds, and pydantic a tenth of one."""
    from importlib import import_module

    if name in CONFIGURATION:
        return getattr(import_module("sansgpu.tasks.configuration"), CONFIGURATION[name])
    if name not in __all__:
        raise AttributeError(f"module sansgpu has no attribute {name}")
    from sansgpu.machine.launch import set_openmp

    set_openmp()  # must run before torch is imported
    return getattr(import_module("sansgpu.api"), name)
