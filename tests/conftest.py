"""What every test may count on."""

from collections.abc import Iterator

import pytest
import torch

from sansgpu.kernels import native
from sansgpu.machine.compilation import missing_for_compile
from tests.processes import KERNELS

# Tests of the kernels are skipped where nothing can be compiled, and for no other reason.
reason = native.load(KERNELS.parent)
if reason is not None and missing_for_compile() is None:
    raise RuntimeError(f"there is a compiler, but the kernels cannot be loaded: {reason}")


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A run inside the test process sets its threads and its treatment of denormals; the next test finds neither."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
