"""The best installed kernels are loaded, or else plain torch with one warning; calls of C functions are checked."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import HEADER, constants, declared, functions, structs
from sansgpu.machine.instruction_sets import supported

NEEDS_TWO = pytest.mark.skipif(len(supported()) == 1, reason="this processor has one instruction set")


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """Returns a folder with a copy of the installed kernels."""
    return shutil.copytree(library.LIBRARIES, tmp_path / "libraries")


@pytest.fixture
def _unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test load kernels as a new process does; afterwards this process has its own again."""
    for name in ("LIBRARIES", "_library", "_set"):
        monkeypatch.setattr(library, name, getattr(library, name))
    monkeypatch.setattr(library, "_loaded", False)


def loaded(libraries: Path) -> list[str]:
    """Loads the kernels of a folder; returns the warnings and the name of the kernels that are used."""
    library.LIBRARIES, library._loaded = libraries, False
    said: list[str] = []
    used = library.load_kernels("auto", torch.device("cpu"), said.append)
    return [*said, used]


@NEEDS_TWO
@pytest.mark.usefixtures("_unloaded")
def test_the_best_installed_kernels_are_used(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, lower = supported()[-1], supported()[0]  # `make test` compiles these two
    assert loaded(libraries) == [f"native {best.name}"]
    monkeypatch.setenv("SANSGPU_ISA", lower.name)
    assert loaded(libraries) == [f"native {lower.name}"]
    monkeypatch.delenv("SANSGPU_ISA")
    for instructions in supported()[1:]:  # `make test-long` compiles those between them too
        (libraries / f"{instructions.name}.so").unlink(missing_ok=True)
    assert loaded(libraries) == [f"native {lower.name}"]


@pytest.mark.usefixtures("_unloaded")
def test_without_kernels_torch_runs_and_a_warning_says_why(tmp_path: Path) -> None:
    warning, kernels = loaded(tmp_path)
    best = supported()[-1].name
    assert warning.startswith(
        f"sansgpu's C++ kernels cannot be loaded (this installation does not include kernels for {best} on "
    )
    assert kernels == "torch"


@pytest.mark.usefixtures("_unloaded")
def test_a_damaged_library_is_named(libraries: Path) -> None:
    damaged = libraries / f"{supported()[-1].name}.so"
    damaged.write_text("not a library")
    warning, kernels = loaded(libraries)
    assert str(damaged) in warning
    assert kernels == "torch"


def test_the_process_has_one_openmp_runtime() -> None:
    """A second runtime would start threads of its own, which would compete with those of the first."""
    script = (
        "from sansgpu.kernels import library\nfrom sansgpu.machine.kernel_files import openmp_files\n"
        "assert library.load() is None\nprint(len(openmp_files()))"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_runtime_in_a_folder_with_a_space_is_found(tmp_path: Path) -> None:
    (folder := tmp_path / "my packages").mkdir()
    script = (
        "import ctypes, shutil, sys\nimport torch\nfrom sansgpu.machine.kernel_files import openmp_files\n"
        "[file] = openmp_files()\ncopy = shutil.copy(file, sys.argv[1])\nctypes.CDLL(copy)\n"
        "print({str(found) for found in openmp_files()} == {str(file), copy})"
    )
    command = [sys.executable, "-c", script, str(folder)]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "True\n"


def test_the_libraries_have_the_functions_that_their_header_declares() -> None:
    allocator = {"install", "give_back"}
    compiled = [
        one for one in supported() if (library.LIBRARIES / f"{one.name}.so").exists()
    ]  # `make test`: two of them
    assert {supported()[0], supported()[-1]} <= {*compiled}
    for instructions in compiled:
        assert library.load_library(instructions).keys() == declared().keys() - allocator
    if library.ALLOCATOR.exists():
        assert functions(library.ALLOCATOR).keys() == allocator


def test_python_reads_the_header_as_a_compiler_does(tmp_path: Path) -> None:
    """Constants have the same values, structs the same fields at the same places, and functions the same parameters."""
    lines = [f'#include "{HEADER}"', "#include <stddef.h>"]
    checks = {**constants()}
    for name, struct in structs().items():
        checks[f"sizeof(struct {name})"] = ctypes.sizeof(struct)
        for field, _ in struct._fields_:
            checks[f"offsetof(struct {name}, {field})"] = getattr(struct, field).offset
            checks[f"sizeof(((struct {name}*)0)->{field})"] = getattr(struct, field).size
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in checks.items()]
    for name, signature in declared().items():
        # A pointer converts to and from void*, but a call with a different number of arguments, or with a number
        # for a pointer, does not compile.
        values = {ctypes.c_void_p: "(void*)0", ctypes.c_int64: "(int64_t)0", ctypes.c_double: "0.0"}
        arguments = ", ".join(values[parameter.c_type] for parameter in signature.parameters)
        result, keyword = ("int64_t", "return ") if signature.returns else ("void", "")
        lines.append(f"{result} call_{name}(void) {{ {keyword}{name}({arguments}); }}")
    source = tmp_path / "header.c"
    source.write_text("\n".join(lines))
    command = ["c++", "-x", "c", "-std=c11", "-pedantic-errors", "-Werror", "-fsyntax-only", str(source)]
    subprocess.run(command, check=True)
    assert len(checks) > 100
    assert HEADER.read_text().count("SANSGPU_CONSTANT(") == len(constants()) + 2  # and two macro definitions


def test_an_int_is_converted_where_c_takes_a_double() -> None:
    x, seed, results = torch.randn(100), torch.zeros(1, dtype=torch.int64), []
    for p in (0, 0.0, 1, 1.0):
        results.append(torch.full((100,), torch.nan))
        library.call("dropout", False, x, results[-1], 100, p, seed)
    assert torch.equal(results[0], x)
    assert torch.equal(results[1], x)
    assert not results[2].any()
    assert not results[3].any()


def test_arguments_that_do_not_fit_are_refused_before_c_runs() -> None:
    x, seed = torch.ones(4), torch.zeros(1, dtype=torch.int64)
    fitting = (False, x, torch.empty(4), 4, 0.5, seed)
    library.call("dropout", *fitting)  # a valid call must not let later invalid ones through
    for place, wrong, sentence in (
        (0, 0.0, "argument 1 of dropout must be an int, not float."),
        (3, x, "argument 4 of dropout must be an int, not Tensor."),
        (3, None, "argument 4 of dropout must be an int, not NoneType."),
        (4, x, "argument 5 of dropout must be a number, not Tensor."),
        (4, (1, 2), "argument 5 of dropout must be a number, not tuple."),
        (5, 7, "argument 6 of dropout must be a tensor, a tuple of ints or None, not int."),
        (1, (1, 2), "argument 2 of dropout must be a tensor or None, not tuple."),
    ):
        arguments = [*fitting]
        arguments[place] = wrong  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=sentence):
            library.call("dropout", *arguments)
    for count in (5, 7):
        with pytest.raises(TypeError, match=f"dropout expects 6 arguments, got {count}"):
            library.call("dropout", *(*fitting, seed)[:count])
    for wrong, why in ((((0.5,), (0,)), "pointer"), (((0,), (0.5,)), "float")):
        with pytest.raises(TypeError, match=why):
            library.call("squared_norms", 1, *wrong, (0,), torch.empty(1, dtype=torch.float64))
    matmul = structs()["Matmul"]()
    for wrong in (x, structs()["LoraSizes"](), (structs()["LoraSizes"] * 2)()):
        with pytest.raises(TypeError, match="argument 2 of matmuls must be a struct Matmul, or a tuple or an array of"):
            library.call("matmuls", False, wrong, 0)
    with pytest.raises(TypeError, match="LoraSizes"):
        library.call("matmuls", False, (matmul, structs()["LoraSizes"]()), 0)
