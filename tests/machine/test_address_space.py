"""A limit on the address space (`ulimit -v`) is treated as a memory limit."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment, settings, write_corpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit")
MEGABYTES = 1 << 20
IMPORTED = "import sansgpu.jobs.train; from sansgpu.machine.address_space import used_address_space as u; print(u())"


@pytest.fixture(scope="module")
def imported_bytes() -> int:
    """Returns the address space of a process that has imported torch."""
    return int(subprocess.check_output([sys.executable, "-c", IMPORTED]))


def train(folder: Path, limit: int, *more: str) -> tuple[int, str]:
    """Trains a tiny model within `limit` bytes; returns the exit code and the last line of stderr."""
    chosen = settings(data__dataset_name=write_corpus(folder / "corpus.jsonl"), training__max_steps=2)
    command = [sys.executable, "-m", "sansgpu", "train", *chosen, "--output-dir", str(folder / "run"), *more]
    limited = f"ulimit -v {limit // 1024}; exec {shlex.join(command)}"
    done = subprocess.run(
        ["bash", "-c", limited], capture_output=True, text=True, env=environment(folder / "cache"), timeout=120
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.long
def test_a_run_beyond_the_limit_is_refused_with_what_is_available(tmp_path: Path, imported_bytes: int) -> None:
    code, error = train(tmp_path, imported_bytes + 650 * MEGABYTES)
    assert code == 2, error
    assert error.startswith("sansgpu: the run needs about ")
    assert " GB are available within `ulimit -v` (" in error
    assert error.endswith("; --force starts it anyway.")


@pytest.mark.long
def test_a_failed_allocation_ends_the_run_with_advice(tmp_path: Path, imported_bytes: int) -> None:
    limit = imported_bytes + 300 * MEGABYTES
    code, error = train(tmp_path, limit, "--force")
    assert (code, error) == (
        1,
        f"sansgpu: out of memory, because `ulimit -v` allows {limit / 1e9:.1f} GB; raise that limit, lower "
        "training.batch_size or set model.gradient_checkpointing.",
    )
