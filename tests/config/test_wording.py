"""Numbers in sentences are singular or plural."""

import pytest

from sansgpu.config.wording import counted, formatted


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, "thread"), "1 thread"),
        ((2, "thread"), "2 threads"),
        ((0, "batch"), "0 batches"),
        ((1000, "query"), "1,000 queries"),
        ((2, "day"), "2 days"),
        ((2, "matrix", "matrices"), "2 matrices"),
    ],
)
def test_a_number_of_things_is_singular_or_plural(words: tuple[int, str], text: str) -> None:
    assert counted(*words) == text


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        ("{:.4f}", -0.00001, "0.0000"),
        ("{:.4f}", -0.0, "0.0000"),
        ("{:.4f}", -0.0001, "-0.0001"),
        ("{:.1%}", -0.0004, "0.0%"),
        ("{:,.0f}", -20, "-20"),
    ],
)
def test_a_number_that_is_rounded_to_zero_has_no_sign(form: str, value: float, text: str) -> None:
    assert formatted(form, value) == text
