"""Checks that results do not depend on the number of threads."""

from collections.abc import Callable, Sequence

import torch


def assert_equal_on_all_threads(compute: Callable[[], Sequence[torch.Tensor | None]]) -> None:
    """Checks that `compute` returns the same bytes with 1, 2, 5 and 16 threads, and twice with 5."""
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5, 5, 16):
        torch.set_num_threads(threads)
        results.append(compute())
    torch.set_num_threads(before)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
