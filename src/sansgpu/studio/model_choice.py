"""The models that the page offers: well-known small ones, and those on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sansgpu.config.paths import RUNS, RunPaths
from sansgpu.config.plain_data import InvalidDataError, parse_json, read_regular
from sansgpu.config.tasks import Purpose
from sansgpu.jobs.runs import run_folders
from sansgpu.views.tables import storage

MAX_LISTED, MAX_CONFIG_BYTES = 40, 4 << 20
_DECODER, _ENCODER, _RUN = "writes text", "reads text", "the result of an earlier run of this project"
_DECODERS = (
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "135M", "English; minutes on a laptop"),
    ("google/gemma-3-270m-it", "270M", "140 languages"),
    ("HuggingFaceTB/SmolLM2-360M-Instruct", "360M", "English"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "0.5B", "29 languages"),
    ("Qwen/Qwen3-0.6B", "0.6B", "100 languages; thinks before it answers"),
    ("meta-llama/Llama-3.2-1B-Instruct", "1.2B", "8 languages; the license must be accepted on the Hub"),
)
_ENCODERS = (
    ("distilbert-base-uncased", "66M", "English"),
    ("distilbert-base-multilingual-cased", "135M", "104 languages"),
    ("answerdotai/ModernBERT-base", "149M", "English; texts of up to 8,192 tokens"),
    ("FacebookAI/xlm-roberta-base", "278M", "100 languages"),
)
_EMBEDDERS = (
    ("sentence-transformers/all-MiniLM-L6-v2", "23M", "English"),
    ("BAAI/bge-small-en-v1.5", "33M", "English"),
    ("intfloat/multilingual-e5-small", "118M", "100 languages"),
)


@dataclass(frozen=True)
class OfferedModel:
    """A model to start from: a name on the Hub or a path in the project."""

    name: str
    note: str
    is_recommended: bool = False


def suggested_models(purpose: Purpose) -> list[OfferedModel]:
    """Returns models on the Hub, the recommended one first."""
    if purpose.model is None:
        return []
    groups = [group for group in (_DECODERS, _ENCODERS, _EMBEDDERS) if purpose.model in (name for name, *_ in group)]
    listed = [OfferedModel(name, f"{size} parameters, {note}") for group in groups for name, size, note in group]
    marked = [replace(model, is_recommended=model.name == purpose.model) for model in listed]
    return sorted(marked, key=lambda model: not model.is_recommended)


def local_models(root: Path, purpose: Purpose) -> list[OfferedModel]:
    """Returns finished runs, model folders and GGUF files in the project, and models that the Hub's cache has.

    Those whose kind the purpose usually starts from come first, and results of earlier runs last.
    """
    kind = _DECODER if purpose.is_decoder else _ENCODER
    found = [*_in_project(root)][:MAX_LISTED] + [*_in_cache()][:MAX_LISTED]
    found = [model for model in found if not (purpose.is_decoder and _ENCODER in model.note)]
    marked = [replace(model, is_recommended=kind in model.note and _RUN not in model.note) for model in found]
    return sorted(marked, key=lambda model: (not model.is_recommended, _RUN in model.note))


def _in_project(root: Path) -> Iterator[OfferedModel]:
    for run in run_folders(root / RUNS):
        final = RunPaths(run).final
        if (final / "config.json").is_file() or (final / "adapter_config.json").is_file():
            yield OfferedModel(str(run.relative_to(root)), f"{_kind_of(final)}, {_RUN}")
    for folder in (root, root / "models"):
        with suppress(OSError):
            for path in sorted(folder.iterdir()):
                if path.suffix == ".gguf":
                    yield OfferedModel(str(path.relative_to(root)), f"{_DECODER}, {_size(path)}, in the project")
                elif (path / "config.json").is_file():
                    yield OfferedModel(str(path.relative_to(root)), f"{_kind_of(path)}, {_size(path)}, in the project")


def _kind_of(folder: Path) -> str:
    """Returns what a model folder is for, by the class that its config.json names."""
    try:
        found = parse_json(read_regular(folder / "config.json", MAX_CONFIG_BYTES)).get("architectures") or [""]
        return _DECODER if "CausalLM" in str(found[0]) or "ConditionalGeneration" in str(found[0]) else _ENCODER
    except (OSError, ValueError, AttributeError, TypeError, InvalidDataError):
        return "a model"


def _size(path: Path) -> str:
    return storage(sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir())))


def _in_cache() -> Iterator[OfferedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound, OSError):
        for repository in sorted(scan_cache_dir().repos, key=lambda repository: repository.repo_id):
            if repository.repo_type == "model":
                yield OfferedModel(repository.repo_id, "already downloaded")
