"""Tries all features with each family of models, and updates the tables of docs/reference/models.md.

python -m tools.supported_models [FAMILY ...] --write
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from sansgpu.models import families
from sansgpu.models.family import Family
from tools.family_trials import TRIALS, Support, try_family

PAGE = Path(__file__).parent.parent / "docs/reference/models.md"
FAMILIES = sorted(
    (family for family in families.every() if family.title),
    key=lambda family: (family.is_encoder, family.title.lower()),
)


def row_of(family: Family, support: Support) -> str:
    """Formats a row of the table of families."""
    answers = support.packed, support.batched, support.gguf_export, support.gguf_import, support.onnx
    packed, *others = ("yes" if answer else "no" for answer in answers)
    return _table_row(
        [family.title, f"`{family.model_type}`", ", ".join(support.tasks), packed, support.fused, *others]
    )


def refusals_of(support: Support) -> set[str]:
    """Formats the rows of the table of refusals, one per trial and sentence."""
    return {_table_row([trial, f"`{sentence}`"]) for trial, sentence in support.refusals.items()}


def _table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written_rows(heading: str) -> list[str]:
    """Returns the rows of the page's table whose first column has this heading."""
    found = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, heading
    return found[1].splitlines()


def with_rows(page: str, heading: str, rows: Iterable[str]) -> str:
    """Replaces the rows of the table whose first column has this heading."""
    text = "".join(f"{row}\n" for row in rows)
    return re.sub(
        rf"(^\| {heading} \|.*\n\|[-|]+\n)(?:\|.*\n)*", lambda found: found[1] + text, page, flags=re.MULTILINE
    )


def write(found: dict[str, Support]) -> None:
    """Updates the rows of these families, by title. Only trials of all families remove sentences that none caused."""
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in written_rows("family")}
    rows |= {family.title: row_of(family, found[family.title]) for family in FAMILIES if family.title in found}
    others = set[str]() if len(found) == len(FAMILIES) else set(written_rows("trial"))
    known = [rows[family.title] for family in FAMILIES if family.title in rows]
    page = with_rows(PAGE.read_text(encoding="utf-8"), "family", known)
    PAGE.write_text(with_rows(page, "trial", in_order(found.values(), others)), encoding="utf-8")


def in_order(supports: Iterable[Support], others: Iterable[str] = ()) -> list[str]:
    """Returns all rows of the table of refusals, in the order of the trials, among them `others`."""
    rows = {row for support in supports for row in refusals_of(support)} | set(others)
    return sorted(rows, key=lambda row: (TRIALS.index(row.split(" | ")[0].removeprefix("| ")), row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to try, e.g. Llama; default: all")
    parser.add_argument("--write", action="store_true", help="update the page: the rows of these families")
    arguments = parser.parse_args()
    chosen = [family for family in FAMILIES if family.title in (arguments.families or [family.title])]
    torch.set_num_threads(1)  # tiny models are slower with more
    found: dict[str, Support] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-families-") as home:
        for family in chosen:
            found[family.title] = try_family(family, Path(home) / family.title)
            print(row_of(family, found[family.title]), flush=True)
    print(*in_order(found.values()), sep="\n")
    if arguments.write:
        write(found)


if __name__ == "__main__":
    main()
