"""Runs the kernel tests with kernels that are compiled with GCC's sanitizers: `make sanitize`.

AddressSanitizer and UndefinedBehaviorSanitizer share a build; ThreadSanitizer needs its own. Each must first report
deliberate errors, because a sanitizer that does not work reports nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sansgpu.machine.instruction_sets import supported
from tests.kernels import TEST_LIBRARIES

ROOT = Path(__file__).parents[2]
# These tests start new processes or measure memory, and sanitizers need more of it.
LEFT_OUT = ("test_library.py", "test_memory.py")
CHECKED = "not torch and not emulated_amx"  # skips plain torch, and a library that CMake does not build
PREPARE = """
import torch
from pathlib import Path
from sansgpu.kernels import library
library.LIBRARIES = Path("{libraries}")
assert library.load() is None
"""
BEYOND_A_TENSOR = """
x, out = torch.ones(64), torch.empty(64)
library.call("dropout", False, x, out, 65, 0.5, torch.zeros(1, dtype=torch.int64))
"""
BEYOND_A_TABLE = """
x, out = torch.ones(64), torch.empty(64)
library.call("activation", 9, False, x, None, out, 64)
"""
TWO_THREADS_IN_ONE_PLACE = """
from sansgpu.kernels.matmul import Matmul, MatmulPrecision, multiply
a, out = (torch.ones(512, 512, dtype=torch.bfloat16) for _ in range(2))
multiply(MatmulPrecision.of(a.dtype), *(Matmul(a, a, out) for _ in range(4)))
"""


@dataclass(frozen=True)
class Sanitizer:
    """Sanitizers that share a build: GCC's flags, runtime library, environment, and deliberate errors by report."""

    flags: str
    library: str
    settings: dict[str, str]
    errors: dict[str, str]
    left_out: tuple[str, ...] = ()


SANITIZERS = {
    "address": Sanitizer(
        "address,undefined",
        "libasan.so",
        {
            # Python does not free everything at exit. New memory is filled, as in conftest.py.
            "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=127",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
        {"heap-buffer-overflow": BEYOND_A_TENSOR, "index 9 out of bounds": BEYOND_A_TABLE},
    ),
    "thread": Sanitizer(
        "thread",
        "libtsan.so",
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},  # torch and Python are not instrumented
        {"data race": TWO_THREADS_IN_ONE_PLACE},
        ("test_no_rows.py::test_new_memory_is_poisoned",),  # ThreadSanitizer does not fill new memory
    ),
}


def main() -> None:
    for name in sys.argv[1:] or SANITIZERS:
        folder, sanitizer = ROOT / f"build/sanitize-{name}", SANITIZERS[name]
        build(folder, sanitizer)
        for report, code in sanitizer.errors.items():
            script = PREPARE.format(libraries=folder / "libraries") + code
            done = start(folder, sanitizer, "-c", script, stderr=subprocess.PIPE)
            if done.returncode == 0 or report not in done.stderr:
                raise SystemExit(f'sanitize: a deliberate error was not reported as "{report}": {done.stderr}')
            print(f"sanitize {name}: {report} was reported, as expected.", flush=True)
        # By default pytest captures reports, and loses them if a sanitizer ends the process.
        options = ("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=sys", "-k", CHECKED)
        options += ("-m", "portable or not long")
        options += tuple(f"--ignore=tests/kernels/{file}" for file in LEFT_OUT)
        options += tuple(f"--deselect=tests/kernels/{test}" for test in sanitizer.left_out)
        if start(folder, sanitizer, "-m", "pytest", *options, "tests/kernels").returncode != 0:
            raise SystemExit(f"sanitize {name}: failed; the reports are above.")


def build(folder: Path, sanitizer: Sanitizer) -> None:
    """Compiles the kernels of the portable instruction set and of this processor's best one."""
    cmake, ninja = (str(Path(sys.executable).parent / tool) for tool in ("cmake", "ninja"))
    settings = {
        "SANITIZERS": sanitizer.flags,
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(folder / "libraries"),
        "CMAKE_MAKE_PROGRAM": ninja,
    }
    command = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "--log-level=WARNING"]
    subprocess.run([*command, *(f"-D{key}={value}" for key, value in settings.items())], check=True)
    sets = sorted({supported()[0].name, supported()[-1].name})
    subprocess.run([cmake, "--build", str(folder), "--target", *sets], check=True)


def start(
    folder: Path, sanitizer: Sanitizer, *arguments: str, stderr: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the sanitizer's runtime and, as ThreadSanitizer requires, without random addresses."""
    runtimes = " ".join(library_of_gcc(name) for name in (sanitizer.library, "libstdc++.so"))
    own = {"LD_PRELOAD": runtimes, TEST_LIBRARIES: str(folder / "libraries"), **sanitizer.settings}
    command = ["setarch", platform.machine(), "-R", sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, **own}, cwd=ROOT, stderr=stderr, text=True, check=False)


def library_of_gcc(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], stdout=subprocess.PIPE, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


if __name__ == "__main__":
    main()
