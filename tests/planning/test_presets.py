"""`plan --presets` shows the memory of the presets and their training time on several kinds of processors."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sansgpu.cli import run as cli
from sansgpu.planning.presets import PROCESSORS, Processor, compare_presets
from sansgpu.views.tables import memory_cells, speed_cells
from tests.processes import Captured, environment

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def presets(capsys: Captured, *arguments: str) -> list[dict[str, Any]]:
    assert cli(["plan", "--presets", "--json", *arguments]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["presets"]
    return rows


def test_the_presets_are_shown_by_memory_and_processor(capsys: Captured) -> None:
    rows = presets(capsys)
    assert [row["preset"] for row in rows] == ["small", "medium", "large"]
    for row in rows:
        assert row["least_memory_bytes"] < row["memory_bytes"]["total"] < row["recommended_memory_bytes"]
        assert [speed["processor"] for speed in row["speeds"]][:-1] == [kind.name for kind in PROCESSORS]
        for speed in row["speeds"]:
            needed = speed["optimal_seconds"] * speed["tokens_per_second"]
            assert needed == pytest.approx(20 * row["parameters"]) == row["optimal_tokens"]
    assert cli(["plan", "--presets"]) == 0
    printed = capsys.readouterr().out
    assert "AVX512_BF16, 8 cores" in printed
    assert "recommended" in printed


def test_overrides_change_the_table_of_presets(capsys: Captured) -> None:
    whole, half = presets(capsys), presets(capsys, "--set", "model.n_layers=5")
    assert all(a["parameters"] > b["parameters"] for a, b in zip(whole, half, strict=True))
    assert all(a["least_memory_bytes"] > b["least_memory_bytes"] for a, b in zip(whole, half, strict=True))
    assert cli(["plan", "--presets", "--set", "model.n_heads=5"]) == 2


@pytest.mark.long
def test_the_presets_are_compared_without_compiling_or_timing_steps(tmp_path: Path) -> None:
    cache = tmp_path / "empty"
    surroundings = {**environment(tmp_path), "SANSGPU_CACHE": str(cache)}
    program = "from sansgpu.cli import run; raise SystemExit(run(['plan', '--presets']))"
    done = subprocess.run([sys.executable, "-c", program], env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "timing matrix products" in done.stderr
    questions = [json.loads(file.read_text())["question"] for file in cache.rglob("*.json")]
    assert questions
    assert all("gemm" in question for question in questions), "only matrix products may be measured"


def test_memory_and_time_without_a_model_show_what_can_be_trained_here(capsys: Captured) -> None:
    assert cli(["plan", "--memory", "2GB", "--hours", "8", "--context", "1024", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["memory_bytes"], shown["seconds"]) == (2_000_000_000, 28_800)
    small, _, large = shown["presets"]
    assert small["fits"]
    assert small["needed_bytes"] < 2e9 < large["needed_bytes"]
    assert (large["fits"], large["batch_size"], large["gradient_checkpointing"]) == (False, 1, True)
    for row in shown["presets"]:
        assert row["context"] == 1024
        assert row["tokens"] == pytest.approx(28_800 * row["tokens_per_second"], rel=1e-6)
        assert row["optimal_tokens"] == pytest.approx(row["optimal_seconds"] * row["tokens_per_second"])
    assert cli(["plan", "--until", "07:00"]) == 0
    printed = capsys.readouterr().out
    for words in ("small", "346.6M", "of memory on this machine", "sansgpu plan --memory SIZE MODEL"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "much"], "--memory is 'much'; write a size such as 8GB"),
        (["--until", "25:00"], "--until: 25:00 is not a time; write 18:00, 6PM or"),
        (["--until", "2020-01-31T07:00"], "in the past; set a later time with --until"),
        (["--memory", "4GB", "--hours", "-1"], "--hours is -1, but must be positive"),
        (["--memory", "4GB", "--hours", "2", "--until", "07:00"], "--hours and --until both limit the time"),
        (["--context", "1"], "--context"),
        (["--memory", "4GB", "--set", "model.n_layers=3"], "remove the rest"),
        (["--memory", "4GB", "--presets"], "remove the rest"),
        (["tiny", "--until", "07:00"], "--set training.until=HH:MM"),
        (["tiny", "--memory", "4GB", "--hours", "3"], "only with --context and --json"),
    ],
)
def test_what_plan_cannot_answer_is_refused_in_a_sentence(arguments: list[str], words: str, capsys: Captured) -> None:
    assert cli(["plan", *arguments]) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sansgpu: ")]
    assert words in said


FLOPS_PER_TOKEN = {"m80": 575e6, "cpu_small": 71.5e6}
BENCHMARKS = (PAGE.parent / "benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", FLOPS_PER_TOKEN)
def test_estimates_agree_with_the_speeds_that_were_measured_with_amx(size: str) -> None:
    table = BENCHMARKS.split(f"`python -m benchmarks.speed.peers --size {size}` on the Xeon:")[1]
    measured = re.search(r"^\| \*\*sansgpu\*\*.*? \| ([\d,]+) \|", table, re.MULTILINE)
    assert measured is not None
    processor = Processor("2 cores with AMX", 2, "bf16", 2.35e12)
    speed = processor.tokens_per_second(FLOPS_PER_TOKEN[size])
    assert speed == pytest.approx(float(measured[1].replace(",", "")), rel=0.34)


@pytest.mark.parametrize("size", FLOPS_PER_TOKEN)
def test_estimates_agree_with_the_speeds_that_were_measured_on_16_cores(size: str) -> None:
    measured = re.search(rf"^\| `?{size}`? \|.*\| ([\d,]+) \|", BENCHMARKS.split("## Sixteen cores")[1], re.MULTILINE)
    assert measured is not None
    processor = next(kind for kind in PROCESSORS if kind.name == "AMX, 16 cores")
    speed = processor.tokens_per_second(FLOPS_PER_TOKEN[size])
    assert speed == pytest.approx(float(measured[1].replace(",", "")), rel=0.2)


@pytest.mark.parametrize(
    ("size", "tokens", "words"),
    [("m80", 2048, r"step of m80 takes ([\d.]+) s,"), ("cpu_small", 8192, r"one of `cpu_small` ([\d.]+) s")],
)
def test_estimates_agree_with_the_speeds_that_were_measured_without_amx(size: str, tokens: int, words: str) -> None:
    measured = re.search(words, BENCHMARKS.split("On the idle EPYC:")[1])
    assert measured is not None
    speed = Processor("2 cores", 2, "bf16", 2 * 215e9).tokens_per_second(FLOPS_PER_TOKEN[size])
    assert speed == pytest.approx(tokens / float(measured[1]), rel=0.1)


@pytest.mark.parametrize(("size", "column"), [("m80", 3), ("cpu_small", 7)])
def test_estimates_agree_with_the_speeds_that_were_measured_with_avx2(size: str, column: int) -> None:
    row = next(line for line in BENCHMARKS.splitlines() if line.startswith("| **sansgpu**, int16 |"))
    kind = next(processor for processor in PROCESSORS if processor.name.startswith("AVX2"))
    rate = kind.gemm_flops_per_second * 2 / kind.cores
    speed = Processor("2 cores", 2, kind.precision, rate).tokens_per_second(FLOPS_PER_TOKEN[size])
    assert speed == pytest.approx(float(row.split("|")[column + 1].replace(",", "")), rel=0.15)


def test_the_documentation_shows_the_tables() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = compare_presets(())
    for row in rows:
        assert f"| {' | '.join(f'`{c}`' if c == row['preset'] else c for c in memory_cells(row))} |" in lines
    for cells in list(zip(*map(speed_cells, rows), strict=True))[:-1]:
        assert f"| {cells[0][0]} | {' | '.join(cell for _, cell in cells)} |" in lines
