"""Loading the kernels: the best that are installed, or plain torch with one warning."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sansgpu.kernels import native
from sansgpu.machine.instruction_sets import supported

SCRIPT = """
import sys
from pathlib import Path
import torch
from sansgpu.kernels import native
from sansgpu.kernels.choice import load_kernels

native.LIBRARIES = Path(sys.argv[1])
print(load_kernels("auto", torch.device("cpu"), print))
"""
NEEDS_TWO = pytest.mark.skipif(len(supported()) == 1, reason="this processor has one instruction set")


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A copy of the installed kernels."""
    return shutil.copytree(native.LIBRARIES, tmp_path / "libraries")


def loaded(libraries: Path) -> list[str]:
    """Returns the warnings of a process that loads the kernels in a folder, and the name of those that it uses."""
    command = [sys.executable, "-c", SCRIPT, str(libraries)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


@NEEDS_TWO
def test_the_best_installed_kernels_are_used(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, second, best = supported()
    assert loaded(libraries) == [f"native {best.name}"]
    monkeypatch.setenv("SANSGPU_ISA", second.name)
    assert loaded(libraries) == [f"native {second.name}"]
    monkeypatch.delenv("SANSGPU_ISA")
    (libraries / f"{best.name}.so").unlink()
    assert loaded(libraries) == [f"native {second.name}"]


def test_without_kernels_torch_runs_and_a_warning_says_why(tmp_path: Path) -> None:
    warning, kernels = loaded(tmp_path)
    best = supported()[-1].name
    assert warning.startswith(f"the native kernels cannot be loaded (this installation has none for {best} on ")
    assert kernels == "torch"


def test_a_damaged_library_is_named(libraries: Path) -> None:
    damaged = libraries / f"{supported()[-1].name}.so"
    damaged.write_text("not a library")
    warning, kernels = loaded(libraries)
    assert str(damaged) in warning
    assert kernels == "torch"


def test_the_process_has_one_openmp_runtime() -> None:
    """A second one would start threads of its own for each of ours."""
    script = (
        "from sansgpu.kernels import native\nfrom sansgpu.machine.openmp import openmp_files\n"
        "assert native.load() is None\nprint(len(openmp_files()))"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_runtime_in_a_folder_with_a_space_is_found(tmp_path: Path) -> None:
    (folder := tmp_path / "my packages").mkdir()
    script = (
        "import ctypes, shutil, sys\nimport torch\nfrom sansgpu.machine.openmp import openmp_files\n"
        "[file] = openmp_files()\ncopy = shutil.copy(file, sys.argv[1])\nctypes.CDLL(copy)\n"
        "print({str(found) for found in openmp_files()} == {str(file), copy})"
    )
    command = [sys.executable, "-c", script, str(folder)]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "True\n"
