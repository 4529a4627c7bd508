"""`python -m tests.hostile.fuzz HOME [KIND [NUMBER]] [--seed N] [--scale X]`: runs fuzz cases and prints failures."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path

import tests.conftest  # noqa: F401  checks that the kernels are built
from tests.hostile.fuzz.bases import make_bases
from tests.hostile.fuzz.generators import cases
from tests.hostile.fuzz.harness import Runner


def main() -> None:
    """Prints every failed case and the number of failures of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz")
    parser.add_argument("home", type=Path, help="new folder for the valid inputs and the cases")
    parser.add_argument("kind", nargs="?", help="run only cases of this kind, e.g. `rows`")
    parser.add_argument("number", nargs="?", help="run only this case, and print its outcome even if it passes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="1 runs a thousand cases")
    asked = parser.parse_args()
    bases, wrong = make_bases(asked.home / "bases"), collections.Counter[str]()
    every: collections.Counter[str] = collections.Counter()
    run = Runner(asked.home / "cases")
    for name, case in cases(bases, asked.seed, asked.scale):
        kind, _, number = name.rpartition(" ")
        if asked.kind not in (None, kind) or asked.number not in (None, number):
            continue
        outcome = run(case)
        every[kind] += 1
        why = outcome.complaint(case)
        wrong[kind] += why is not None
        if why or asked.number:
            print(f"{name}: {why}; {case.arguments} {case.environment or ''}"[:1500], outcome.err[-1500:], sep="\n")
            print(
                f"  code {outcome.code}, {outcome.cpu_seconds:.1f} s, {outcome.peak_bytes / 1e9:.1f} GB\n", flush=True
            )
    for kind, many in every.items():
        print(f"{kind}: {wrong[kind]} of {many} failed")


if __name__ == "__main__":
    main()
