"""Fixtures for tests of kernels."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import Function
from sansgpu.machine.instruction_sets import supported
from tests.kernels import TEST_LIBRARIES
from tests.kernels.guarded import GuardedCalls

M_PERTURB = -6  # malloc.h
INSTRUCTION_SETS = {instructions.name: instructions for instructions in supported()}
FIRST, LAST = supported()[0].name, supported()[-1].name  # the portable kernels and the best ones
SETS = [pytest.param(name, marks=() if name in (FIRST, LAST) else pytest.mark.long) for name in INSTRUCTION_SETS]
OF_THE_FIRST = ("test_kernels.py", "test_library.py", "test_products.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks most tests of the portable kernels as long: they have the same source as the best ones."""
    for item in items:
        known = item.path.parent != Path(__file__).parent or item.path.name in OF_THE_FIRST or FIRST == LAST
        if known or item.get_closest_marker("long") or not isinstance(item, pytest.Function):
            continue
        if hasattr(item, "callspec") and FIRST in item.callspec.params.values():
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.portable)


@cache
def functions_of(name: str) -> Mapping[str, Function]:
    """Loads the kernels of an instruction set once, because each time all mapped files are searched for OpenMP."""
    return library.load_library(INSTRUCTION_SETS[name])


def use_set(name: str, patch: pytest.MonkeyPatch) -> None:
    """Makes this process use the kernels of an instruction set."""
    patch.setattr(library, "_library", functions_of(name))
    patch.setattr(library, "_set", INSTRUCTION_SETS[name])


@pytest.fixture(params=SETS)
def native_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test with the C++ kernels of every instruction set of this processor."""
    use_set(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(params=[*SETS, "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test with the same kernels as `native_kernels`, and with plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(library, "_loaded", False)
    else:
        use_set(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(autouse=True)
def _several_threads() -> None:
    """Makes kernels use two threads, so that ThreadSanitizer can see races; tests/conftest.py resets the number."""
    torch.set_num_threads(2)


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fills allocated memory with 3.4e38 (fp32 and bf16), so that uninitialized values show. Needs glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_PERTURB, 0x80)  # glibc fills new memory with the complement of this byte
    yield
    mallopt(M_PERTURB, 0)


@pytest.fixture(scope="module", autouse=True)
def _guarded_tensors() -> Iterator[None]:
    """Makes a kernel crash if it reads or writes outside its tensors.

    Tensors are not guarded under sanitizers, which check torch's own memory.
    """
    with pytest.MonkeyPatch.context() as patch:
        if TEST_LIBRARIES not in os.environ:
            patch.setattr(library, "call", GuardedCalls())
        yield
