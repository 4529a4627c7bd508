"""The built-in dataset of sums, whose answers a program can check."""

from __future__ import annotations

from collections.abc import Iterator

from sansgpu.data.order import generator
from sansgpu.data.rows import SourceRow

SUMS = {"train": 2000, "validation": 100}  # different ones
LARGEST = 99
_QUESTION = "What is {} + {}? Answer with the number only."


def sums(part: str) -> Iterator[SourceRow]:
    """Yields questions about the sum of two numbers of one or two digits, with their answers."""
    numbers = generator(0, "arithmetic").permutation((LARGEST + 1) ** 2)
    first = sum(list(SUMS.values())[: list(SUMS).index(part)])
    for place, number in enumerate(numbers[first : first + SUMS[part]].tolist(), 1):
        one, other = divmod(number, LARGEST + 1)
        question = _QUESTION.format(one, other)
        yield SourceRow(f"sum {place}", {"prompt": [{"role": "user", "content": question}], "answer": str(one + other)})


def fingerprint(part: str) -> str:
    """Identifies the rows of a split."""
    return f"arithmetic-{part}-{SUMS[part]}-{LARGEST}-{_QUESTION}"
