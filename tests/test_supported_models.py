"""The page of supported models agrees with trials of every model family."""

from pathlib import Path

import pytest
import torch
from tools.family_trials import try_family
from tools.supported_models import FAMILIES, refusals_of, row_of, written_rows

from sansgpu.models.family import Family

ANSWERS = {"yes", "partly", "no"}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_the_page_says_what_works_with_a_family(home: Path, family: Family) -> None:
    """`python -m tools.supported_models --write` updates the page."""
    torch.set_num_threads(1)  # small models run slower with more threads; conftest.py resets the number
    support = try_family(family, home / family.title)
    assert row_of(family, support) in written_rows("family")
    assert refusals_of(support) <= {*written_rows("trial")}


def test_the_page_lists_every_family() -> None:
    rows = [row.strip("| ").split(" | ") for row in written_rows("family")]
    assert [(row[0], row[1]) for row in rows] == [(family.title, f"`{family.model_type}`") for family in FAMILIES]
    assert {answer for row in rows for answer in row[3:]} == ANSWERS
