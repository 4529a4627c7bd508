"""Fixtures and settings of all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from sansgpu.kernels import native
from sansgpu.machine.compilation import missing_compiler
from tests.processes import COMPILED

# Tests of the kernels are skipped where nothing can be compiled, and for no other reason.
reason = native.load(COMPILED)
if reason is not None and missing_compiler() is None:
    raise RuntimeError(f"there is a compiler, but the kernels cannot be loaded: {reason}")

settings.register_profile("sansgpu", deadline=None)  # a busy machine must not fail an example by its time
settings.load_profile("sansgpu")

# Begun first, so that no worker is left with a long file at the end.
LONGEST = (
    "test_benchmarks.py", "scale/test_runs.py", "test_docs.py", "planning/test_plan.py", "planning/test_cluster.py",
    "jobs/test_tune.py",
    "train/test_runs.py", "scale/test_faults.py", "tasks/test_fine_tuning_runs.py", "train/test_resume.py",
    "test_cli.py", "tasks/test_graph_runs.py", "jobs/test_k8s.py", "scale/test_sums.py", "scale/test_tasks.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A run inside the test process sets its threads and its treatment of denormals; the next test finds neither."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
