"""Fixtures and settings shared by all tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import HEADER
from sansgpu.machine.instruction_sets import supported
from tests.kernels import TEST_LIBRARIES
from tests.processes import use_cache, write_corpus, write_rows
from tests.tasks.graph.graph_files import Write

gc.disable()  # until all is collected, because the objects of modules and tests stay

if folder := os.environ.get(TEST_LIBRARIES):
    library.LIBRARIES = Path(folder)

REBUILD = "run `make setup` to rebuild the C++ kernels"
if (reason := library.load()) is not None:
    raise RuntimeError(f"the kernels cannot be loaded ({reason}); {REBUILD}")
sources = [path.stat().st_mtime for path in (library.LIBRARIES.parent / "native").glob("*")]  # a wheel has no sources
sources += [HEADER.stat().st_mtime] if sources else []
tested = [library.LIBRARIES / f"{supported()[place].name}.so" for place in (0, -1)]
if max(sources, default=0) > min((path.stat().st_mtime for path in tested if path.exists()), default=0):
    raise RuntimeError(f"the kernels are older than their sources; {REBUILD}")

torch.set_num_threads(1)  # small models run slower with more threads, especially next to other pytest workers

# No deadline, because a busy machine is slow. Derandomized, so that a passing test does not fail on new examples.
settings.register_profile("sansgpu", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("random", deadline=None)  # `pytest --hypothesis-profile random` tries others, and more
settings.load_profile("sansgpu")

# The slowest files run first, so that no pytest worker is left with one of them at the end.
LONGEST = (
    "train/test_runs.py", "tasks/test_fine_tuning_runs.py", "hostile/test_models.py", "jobs/test_init.py",
    "hostile/test_rubbish.py", "jobs/tune/test_tune.py", "hostile/test_written_files.py",
    "tasks/test_architectures.py", "test_layers.py", "models/formats/test_gguf.py", "hostile/test_data.py",
    "train/test_resume.py", "tasks/classify/test_classify.py", "jobs/test_gguf_commands.py",
    "tasks/embed/test_embedding_runs.py", "kernels/test_head.py", "tasks/adapters/test_trained_adapters.py",
    "tasks/test_parity.py", "jobs/serve/test_serve_under_attack.py", "kernels/test_library.py",
    "models/generation/test_generate.py", "tasks/graph/test_entities.py", "test_cli.py", "tasks/grpo/test_grpo.py",
    "kernels/test_integer_matmul.py", "test_docs.py", "tasks/tokens/test_tokens.py",
    "models/generation/test_greedy_texts.py", "test_optional_packages.py", "train/test_snapshots.py",
    "jobs/test_ask.py", "tasks/graph/test_graph_runs.py", "tasks/test_distillation.py",
    "tasks/preference/test_preference.py", "kernels/test_kernels.py", "scale/test_tasks.py",
    "jobs/test_push_to_hub.py", "hostile/test_runs.py", "kernels/test_pointwise.py", "data/test_shards.py",
    "data/test_dialects.py", "hostile/fuzz/test_fuzz.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Exempts all modules and tests from garbage collection, which would take a second each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """Resets the thread count and the flushing of denormals, which training in the test process changes."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def _fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl")


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a folder that the tests of a module share; it contains their cache and a corpus.

    A module that needs different data defines `fill(home)`, which writes it instead of the corpus.
    """
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, folder / "cache")
        getattr(request.module, "fill", _fill)(folder)
        yield folder


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an empty folder the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that writes rows to a file, one per line."""

    def write(*rows: object, name: str = "a.jsonl") -> Path:
        return write_rows(tmp_path / name, rows)

    return write
