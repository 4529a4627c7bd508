"""Writes the table of docs/data.md with all forms of rows, from the forms that the tasks read.

    python -m tools.forms_page docs/data.md

The rest of the page stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from sansgpu.data.forms.registry import FORMS
from sansgpu.tasks.configuration import SCHEMA

FIRST_LINE = "| task | columns | also used | example |"


def table() -> Iterator[str]:
    """Yields the lines of the table, by kind of rows in the order of the tasks."""
    yield from (FIRST_LINE, "|---|---|---|---|")
    kinds = dict.fromkeys(settings.rows for settings in SCHEMA.tasks.tasks.values())
    for kind in kinds:
        tasks = [f"`{task}`" for task, settings in SCHEMA.tasks.tasks.items() if settings.rows == kind]
        for number, form in enumerate(FORMS[kind].forms):
            example = json.dumps(form.example, ensure_ascii=False).replace("|", "\\|")
            name = ", ".join(tasks) if not number else ""
            yield f"| {name} | {_names(form.keys)} | {_names(form.optional)} | `{example}` |"


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(f"`{column}`" for column in columns)


def write(page: Path) -> None:
    before, after = page.read_text(encoding="utf-8").split(FIRST_LINE)
    rest = after.split("\n\n", 1)[1]
    page.write_text(before + "\n".join(table()) + "\n\n" + rest, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="docs/data.md")
    write(parser.parse_args().page)


if __name__ == "__main__":
    main()
