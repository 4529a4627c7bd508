"""Fixtures for tests of kernels."""

import ctypes
from collections.abc import Iterator

import pytest

from sansgpu.kernels import native

M_PERTURB = -6  # malloc.h


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test with the C++ kernels and with plain torch."""
    if request.param == "native" and not native.available():
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(native, "_loaded", request.param == "native")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fills allocated memory with 3.4e38 (fp32 and bf16), so that uninitialized values show. Needs glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_PERTURB, 0x80)  # new memory gets the inverse of this byte
    yield
    mallopt(M_PERTURB, 0)
