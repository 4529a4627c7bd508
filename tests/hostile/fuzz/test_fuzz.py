"""Bad input of any kind causes a one-sentence error within time and memory limits, never a traceback.

Set `SANSGPU_FUZZ_SEED` to draw different cases. `python -m tests.hostile.fuzz HOME KIND NUMBER` repeats one that
failed.
"""

import os
from collections.abc import Iterator

import pytest

from tests.hostile.fuzz.bases import Bases, make_bases
from tests.hostile.fuzz.generators import cases
from tests.hostile.fuzz.harness import Runner
from tests.hostile.fuzz.odd_folders import delete_deep

SEED = int(os.environ.get("SANSGPU_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    home = tmp_path_factory.mktemp("fuzz")
    yield Runner(home)
    delete_deep(home)


def complaints(bases: Bases, run: Runner, seed: int, scale: float) -> list[str]:
    found = []
    for name, case in cases(bases, seed, scale):
        outcome = run(case)
        if why := outcome.complaint(case):
            found.append(f"{name}: {why}; {case.arguments} {case.environment or ''}\n{outcome.err[-500:]}")
    return found


def test_a_sample_of_bad_inputs_ends_in_one_sentence_each(bases: Bases, run: Runner) -> None:
    """Draws one case of each kind."""
    assert not (found := complaints(bases, run, seed=0, scale=0.003)), "\n\n".join(found)


@pytest.mark.long
def test_a_thousand_bad_inputs_end_in_one_sentence_each(bases: Bases, run: Runner) -> None:
    found = complaints(bases, run, SEED, scale=1.0)
    assert not found, f"{len(found)} of 1,000:\n\n" + "\n\n".join(found)
