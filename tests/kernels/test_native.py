"""Compiling and loading the kernels, with small sources that compile in no time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sansgpu.kernels import native
from sansgpu.machine.compilation import cxx
from sansgpu.machine.compiled import compiled_in

SCRIPT = """
import sys
from pathlib import Path
import torch
from sansgpu.kernels import native
from sansgpu.kernels.choice import load_kernels

native.SOURCES = Path(sys.argv[2])
print(load_kernels("auto", Path(sys.argv[1]), torch.device("cpu"), print, print))
"""
ANNOUNCED = "compiling the C++ kernels, once for this machine"
NEEDS_COMPILER = pytest.mark.skipif(not native.available(), reason="no C++ compiler here")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return folder


def compiler(folder: Path, script: str) -> Path:
    """Writes a compiler that runs `script` and then the real one, but fails for the allocator, which takes long."""
    path = folder / f"compiler-{len(list(folder.iterdir()))}"
    path.write_text(f'#!/bin/sh\ncase "$*" in *memory.cpp*) exit 1;; esac\n{script}\nexec {cxx()} "$@"\n')
    path.chmod(0o700)
    return path


def start(cache: Path, sources: Path, compiler: Path | str) -> subprocess.Popen[str]:
    """Starts a process that loads the kernels, and prints announcements, warnings and the kernels that it uses."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(cache), str(sources)],
        env={**os.environ, "CXX": str(compiler)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    """Returns what the process prints until it ends."""
    return process.communicate()[0].splitlines()


def test_a_compilation_is_announced_before_it_starts_and_may_fail(tmp_path: Path, sources: Path) -> None:
    announced, warning, kernels = lines(start(tmp_path, sources, "false"))
    assert announced == ANNOUNCED
    assert warning.startswith("the native kernels cannot be compiled (")
    assert kernels == "torch"


@NEEDS_COMPILER
def test_an_error_of_the_compiler_is_shown(tmp_path: Path, sources: Path) -> None:
    (sources / "two.cpp").write_text("void two() { return 2; }\n")
    _, warning, kernels = lines(start(tmp_path, sources, compiler(tmp_path, ":")))
    assert "two.cpp" in warning
    assert "error:" in warning
    assert kernels == "torch"


@NEEDS_COMPILER
def test_the_kernels_run_without_the_allocator(tmp_path: Path, sources: Path) -> None:
    announced, allocator, warning, kernels = lines(start(tmp_path, sources, compiler(tmp_path, ":")))
    assert (announced, allocator) == (ANNOUNCED, "compiling the memory allocator, once for this version of torch")
    assert warning.startswith("the memory allocator cannot be compiled (")
    assert kernels == native.name()


@NEEDS_COMPILER
def test_of_two_processes_one_compiles(tmp_path: Path, sources: Path) -> None:
    slow = compiler(tmp_path, "sleep 0.5")
    printed = [lines(process) for process in [start(tmp_path, sources, slow) for _ in range(2)]]
    assert sorted(ANNOUNCED in found for found in printed) == [False, True]
    assert [found[-1] for found in printed] == [native.name()] * 2


@NEEDS_COMPILER
def test_a_killed_compilation_is_repeated(tmp_path: Path, sources: Path) -> None:
    started = tmp_path / "started"
    process = start(tmp_path, sources, compiler(tmp_path, f"touch {started}; sleep 60"))
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert lines(process) == [ANNOUNCED] or lines(process) == []  # unless it was not written yet
    again = lines(start(tmp_path, sources, compiler(tmp_path, ":")))
    assert (again[0], again[-1]) == (ANNOUNCED, native.name())
    assert len(list((compiled_in(tmp_path) / "kernels").glob("*.so"))) == 1


@NEEDS_COMPILER
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_a_library_of_another_user_is_refused(tmp_path: Path, sources: Path) -> None:
    assert lines(start(tmp_path, sources, compiler(tmp_path, ":")))[-1] == native.name()
    (library,) = (compiled_in(tmp_path) / "kernels").glob("*.so")
    os.chown(library, 65534, 65534)
    *_, warning, kernels = lines(start(tmp_path, sources, compiler(tmp_path, ":")))
    assert f"{library} belongs to another user" in warning
    assert kernels == "torch"
