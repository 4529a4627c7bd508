"""What every test may count on."""

from collections.abc import Iterator

import pytest
import torch

from sansgpu.kernels import native
from tests.processes import KERNELS

native.load(KERNELS.parent)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A run inside the test process sets its threads and its treatment of denormals; the next test finds neither."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
