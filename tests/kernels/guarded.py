"""Memory between two inaccessible pages, so that a kernel crashes if it reads or writes outside its tensors."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import torch

from sansgpu.kernels import library


class Guarded:
    """Memory for one tensor of up to `most` bytes, between two inaccessible pages."""

    def __init__(self, most: int) -> None:
        self.size = max(1, -(-most // mmap.PAGESIZE)) * mmap.PAGESIZE
        memory = mmap.mmap(-1, self.size + 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE, count=self.size)
        protect = ctypes.CDLL(None).mprotect
        for guard in (start, start + mmap.PAGESIZE + self.size):
            assert protect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def tensor(self, values: torch.Tensor, at_end: bool = True) -> torch.Tensor:
        """Copies a contiguous tensor to the end or to the start of the memory."""
        taken = values.numel() * values.element_size()
        place = self.bytes[self.size - taken :] if at_end else self.bytes[:taken]
        return place.view(values.dtype).view(values.shape).copy_(values)


class GuardedCalls:
    """Calls kernels with copies of their tensors, alternately at the end and at the start of guarded memory.

    Tensors that a kernel also reaches through pointers in its structs are not copied.
    """

    def __init__(self) -> None:
        self._call, self._at_end = library.call, False

    def __call__(self, name: str, *arguments: Any) -> Any:
        self._at_end = not self._at_end
        in_structs = [value for argument in arguments for value in _numbers(argument)]
        flat: dict[int, torch.Tensor] = {}
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.numel() > 0:
                values = _flat(argument.detach())
                memory = range(values.data_ptr(), values.data_ptr() + values.nbytes)
                if any(value in memory for value in in_structs):
                    continue
                flat[values.data_ptr()] = max(values, flat.get(values.data_ptr(), values), key=len)
        moved = {place: Guarded(values.nbytes).tensor(values, self._at_end) for place, values in flat.items()}
        before = {place: values.clone() for place, values in flat.items()}
        result = self._call(
            name, *(moved.get(a.data_ptr(), a) if isinstance(a, torch.Tensor) else a for a in arguments)
        )
        for place, values in flat.items():
            # Only what the kernel has changed, because tensors may overlap, such as views of every second row.
            old, new = before[place].view(torch.uint8), moved[place].view(torch.uint8)
            if not torch.equal(old, new):
                torch.where(old == new, values.view(torch.uint8), new, out=values.view(torch.uint8))
        return result


def _numbers(argument: Any) -> Iterator[int]:
    """Yields the numbers, some of which are addresses, in a tuple, a struct or an array of structs."""
    if isinstance(argument, int):
        yield argument
    elif isinstance(argument, tuple | ctypes.Array):
        for value in argument:
            yield from _numbers(value)
    elif isinstance(argument, ctypes.Structure):
        for field, _ in argument._fields_:  # type: ignore[misc]
            yield from _numbers(getattr(argument, field))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor with any strides, from its first to its last value."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))
