"""Exceptions whose message is one sentence: what is wrong, where, and what to do."""

from __future__ import annotations

from importlib.util import find_spec


class SansGPUError(Exception):
    """A runtime failure. The message is shown to the user, and the process exits with `exit_code`."""

    exit_code = 1


class ConfigError(SansGPUError):
    """A usage, configuration or input error, found before any work starts."""

    exit_code = 2


class UnreachableError(ConfigError):
    """Data is neither on this machine nor reachable over the network."""


# The extra of sansgpu that installs each optional package, by the package's import name.
EXTRAS = {
    "transformers": "hf",
    "peft": "hf",
    "datasets": "hf",
    "torchmetrics": "hf",
    "gguf": "gguf",
    "pyarrow": "parquet",
    "python_calamine": "tables",
    "zstandard": "tables",
    "plotly": "report",
    "markdown_it": "report",
    "optuna": "tune",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "alembic": "mlflow",
    "matplotlib": "plots",
    "usearch": "search",
    "pypdfium2": "documents",
    "mteb": "mteb",
    "starlette": "serve",
    "uvicorn": "serve",
    "lm_eval": "harness",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
}
FINE_TUNING_PACKAGES = ("transformers", "peft", "torchmetrics")  # every task that fine-tunes a model needs them


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def require(purpose: str, *packages: str) -> None:
    """Raises ConfigError with the line that installs `packages`, unless all of them are installed.

    `purpose` is what the user asked for, e.g. `--format onnx`. All packages must belong to the same extra.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise ConfigError(how_to_install(purpose, *missing))


def how_to_install(purpose: str, *missing: str) -> str:
    """Returns the error message for packages that are not installed."""
    *first, last = missing
    named, which = (f"{', '.join(first)} and {last}", "which are") if first else (last, "which is")
    return f'{purpose} needs {named}, {which} not installed; run `pip install "sansgpu[{EXTRAS[missing[0]]}]"`.'


def missing_package(error: BaseException) -> ConfigError | None:
    """Returns the error to show for a failed import of an optional package, or None for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRAS or is_installed(package):  # an installed one failed to import a dependency of its own
        return None
    return ConfigError(how_to_install("this command", package))
