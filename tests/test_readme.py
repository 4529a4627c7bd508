"""The program accepts the commands of the README, and its figures are in the pages of benchmarks and estimates."""

import re
import shlex
from typing import Any

import pytest
from typer.main import get_command

from sansgpu.cli.app import app
from tests.project import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Returns the lines that call sansgpu, without the prompt and the launcher before them."""
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    return [line[line.index("sansgpu ") :] for line in lines if re.match(r"(torchrun .*-m )?sansgpu ", line)]


def table(text: str, first_cell: str) -> list[str]:
    """Returns the rows of the first table that has a row which begins with the cell, without links."""
    tables = re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE)
    found = next(one for one in tables if f"| {first_cell}" in one)
    return [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", line).strip() for line in found.splitlines()]


@pytest.mark.parametrize("line", commands())
def test_every_command_has_the_options_of_the_program(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    group: Any = get_command(app)
    parent = group.make_context("sansgpu", [name], resilient_parsing=True)
    group.commands[name].make_context(name, arguments, parent=parent)


def test_there_are_commands_to_check() -> None:
    assert {shlex.split(line)[1] for line in commands()} >= {
        "train",
        "chat",
        "export",
        "predict",
        "search",
        "k8s",
        "slurm",
    }


def test_the_table_of_speed_is_that_of_the_benchmarks() -> None:
    assert table(README, "pretraining, 92M") == table(BENCHMARKS, "pretraining, 92M")


def test_figures_of_the_text_are_in_the_benchmarks() -> None:
    found = re.search(r"takes (\d+) seconds and labels (\d+)%", README)
    assert found is not None
    seconds, percent = found.groups()
    assert re.search(rf"\| \*\*0\.{percent}\d\*\* ± \S+ \| {seconds} \|", BENCHMARKS)


def test_what_fits_is_what_the_estimates_say() -> None:
    estimates = (ROOT / "docs/laptops.md").read_text(encoding="utf-8")
    for memory, all_weights, lora in re.findall(r"^\| (\d+) GB \| ([\d.]+[MB])[^|]*\| (\d+B)", README, re.MULTILINE):
        row = next(line for line in estimates.splitlines() if f"│ {memory}GB " in line)
        assert re.search(rf"│ +{re.escape(all_weights)}\*? ", row)
        assert row.split("│")[-2].split()[0].rstrip("*") == lora
