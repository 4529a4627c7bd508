"""A file system that cannot flush folders to disk, as some network and FUSE file systems, stops no run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from tests.processes import environment, settings


@pytest.fixture(scope="module")
def library(home: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and LD_PRELOAD")
    made = home / "refuse_sync.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, Path(__file__).with_name("refuse_sync.c")], check=True)
    return made


@pytest.mark.long
def test_only_a_file_that_cannot_be_flushed_stops_a_run(home: Path, library: Path) -> None:
    processes = {}
    for refused in ("folders", "files"):
        variables = {**environment(home / refused), "LD_PRELOAD": str(library), "REFUSED_SYNC": refused}
        chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=8, training__save_steps=2)
        command = [sys.executable, "-m", "sansgpu", "train", *chosen, "--output-dir", str(home / f"run {refused}")]
        processes[refused] = subprocess.Popen(
            command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    out, err = processes["folders"].communicate(timeout=120)
    assert processes["folders"].returncode == 0, err
    assert out.count("does not flush folders to disk (Invalid argument)") == 1
    assert cli(["snapshots", "verify", str(home / "run folders")]) == 0
    assert (home / "run folders/final/model.safetensors").is_file()
    _, err = processes["files"].communicate(timeout=120)
    assert processes["files"].returncode != 0
    assert "cannot be written" in err
    assert "Traceback" not in err
