"""Compares the matmul of native/product.h with float64, on every instruction set of this processor and emulated AMX."""

import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.kernels.c_functions import Function, functions
from sansgpu.kernels.library import load_library
from sansgpu.machine.instruction_sets import ARM
from tests.kernels.conftest import INSTRUCTION_SETS, SETS
from tests.kernels.emulate_arm import PROCESSORS
from tests.kernels.guarded import Guarded

Library = Mapping[str, Function]
ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/sansgpu/kernels/native"
EMULATED = ("-O1", "-std=c++20", "-fPIC", "-DSANSGPU_EMULATE_AMX", f"-I{Path(__file__).parent}")
ROUNDING = 2.0**-24  # the relative error of an fp32 operation


@pytest.fixture(scope="module", params=[*SETS, "emulated_amx"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if request.param == "emulated_amx":
        file = tmp_path_factory.mktemp("amx") / "products.so"
        subprocess.run(["c++", *EMULATED, "-shared", "-o", str(file), str(SOURCES / "product.cpp")], check=True)
        return functions(file)
    return load_library(INSTRUCTION_SETS[request.param])


A_MEMORY, B_MEMORY, C_MEMORY = (Guarded(1 << 20) for _ in range(3))


def padded(values: torch.Tensor, ld: int, filler: float) -> torch.Tensor:
    """Pads all rows but the last to the length `ld` and returns them flattened."""
    rows = torch.full((values.shape[0], ld), filler, dtype=values.dtype)
    rows[:, : values.shape[1]] = values
    return rows.flatten()[: rows.numel() - ld + values.shape[1]]


def packed(values: torch.Tensor, ld: int) -> torch.Tensor:
    """Returns B in the layout that `product` requires: rows of bf16 are interleaved in pairs."""
    if values.dtype == torch.float32:
        return padded(values, ld, torch.nan)
    pairs = values.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1)
    return padded(pairs, 2 * ld, torch.nan)


def run(
    library: Library, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, gaps: list[int], add: bool
) -> torch.Tensor:
    """Computes A B, or C + A B with `add`, and checks that nothing outside C is written."""
    rows, length, columns = *a.shape, b.shape[1]
    lda, ldb, ldc = length + gaps[0], columns + gaps[1], columns + gaps[2]
    left, right = A_MEMORY.tensor(padded(a, lda, torch.nan)), B_MEMORY.tensor(packed(b, ldb))
    out = C_MEMORY.tensor(padded(c, ldc, 7.0))
    sizes = (int(a.dtype == torch.bfloat16), 1, rows, columns, length)
    arguments = (*sizes, left, lda, right, ldb, out, ldc, int(add))
    library["product"](*arguments)
    result = torch.cat((out, torch.full((gaps[2],), 7.0))).view(rows, ldc)
    assert (result[:, columns:] == 7.0).all()
    return result[:, :columns].clone()


def check(library: Library, shape: tuple[int, int, int], dtype: torch.dtype, gaps: list[int], add: bool) -> None:
    """Compares a product of `shape` (rows, columns, length of the sums) with float64."""
    rows, columns, length = shape
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(rows * columns * length))
    a, b, c = draw(rows, length).to(dtype), draw(length, columns).to(dtype), draw(rows, columns)
    result = run(library, a, b, c, gaps, add)
    start = c.double() if add else torch.zeros(rows, columns, dtype=torch.float64)
    expected = start + a.double() @ b.double()
    magnitude = start.abs() + a.double().abs() @ b.double().abs()
    assert ((result.double() - expected).abs() <= (length + 2) * ROUNDING * magnitude).all()
    assert torch.equal(result, run(library, a, b, c, gaps, add))


DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 64, 64), (16, 256, 64), (48, 64, 80), (130, 40, 1200), (1, 1, 2), (64, 33, 1026)]


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 150), st.integers(1, 100).map(lambda half: 2 * half)),
    dtype=st.sampled_from(DTYPES),
    gaps=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    add=st.booleans(),
)
def test_products_of_any_shape(
    library: Library, shape: tuple[int, int, int], dtype: torch.dtype, gaps: list[int], add: bool
) -> None:
    check(library, shape, dtype, gaps, add)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_the_kernels(library: Library, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(library, shape, dtype, [0, 0, 0], add=False)
    check(library, shape, dtype, [16, 2, 1], add=True)


def test_products_of_an_odd_length(library: Library) -> None:
    check(library, (5, 37, 333), torch.float32, [0, 0, 0], add=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_without_rows_or_columns(library: Library, dtype: torch.dtype) -> None:
    check(library, (0, 5, 4), dtype, [0, 0, 0], add=False)
    check(library, (5, 0, 4), dtype, [0, 0, 0], add=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(library: Library, dtype: torch.dtype) -> None:
    """For results that do not depend on the division of work, sums need the same order for any number of rows."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    a, b = draw(64, 600).to(dtype), draw(600, 96).to(dtype)
    whole = run(library, a, b, torch.zeros(64, 96), [0, 0, 0], False)
    for rows in (1, 7, 32):
        part = run(library, a[:rows], b, torch.zeros(rows, 96), [0, 0, 0], False)
        assert torch.equal(part, whole[:rows])


@pytest.fixture(scope="module")
def arm_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configures a build for ARM, and returns its folder."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    build = tmp_path_factory.mktemp("arm")
    target = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": compiler}
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build)]
    subprocess.run([*command, *(f"-DCMAKE_{key}={value}" for key, value in target.items())], check=True)
    return build


@pytest.mark.long
@pytest.mark.parametrize("name", [instructions.name for instructions in ARM])
def test_products_of_arm(arm_build: Path, name: str) -> None:
    """Compiles all kernels for ARM, and runs the products on an emulated processor that has no better instructions."""
    subprocess.run(["cmake", "--build", str(arm_build), "--target", name, f"products_{name}"], check=True)
    assert (arm_build / f"{name}.so").exists()
    program = str(arm_build / f"products_{name}")
    done = subprocess.run(
        ["qemu-aarch64", "-cpu", PROCESSORS[name], program], check=True, capture_output=True, text=True
    )
    errors = [float(error) for error in done.stdout.split()]
    assert len(errors) == 4
    assert max(errors) < 1
    lower = {"neon_dotprod": "neon", "neon_bf16": "neon_dotprod"}.get(name)
    if lower is not None:  # the products use the instructions after which the set is named
        done = subprocess.run(["qemu-aarch64", "-cpu", PROCESSORS[lower], program], capture_output=True, check=False)
        assert done.returncode == -signal.SIGILL
