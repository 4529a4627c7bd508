"""What tests of kernels share."""

import pytest

from sansgpu.kernels import native


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test with compiled kernels and without."""
    if request.param == "native" and not native.available():
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(native, "_loaded", request.param == "native")
    return request.param
