"""Reports and lists of runs work for tiny real runs, old, killed and broken runs, and very long runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from plotly import graph_objects

from sansgpu.cli import run as cli
from sansgpu.files.ownership import lock_run
from sansgpu.tasks.configuration import load_config
from sansgpu.views.page import figure
from sansgpu.views.plots import MAX_POINTS, Plot, downsample, write_plots
from sansgpu.views.record import RunRecord
from sansgpu.views.run_plots import time_parts
from sansgpu.views.run_report import run_plots
from tests.processes import Captured, events_of, json_of
from tests.views.runs import Event, changed, train, written


def fill(home: Path) -> None:
    train(home, "a/tiny")
    train(home, "b/tiny", training__learning_rate=0.001, training__max_steps=6)


def figures(page: str) -> dict[str, Any]:
    """Returns the plots of a page by name, and checks that plotly accepts each of them."""
    found = re.findall(r'data-name="(\w+)">.*?application/json">(.*?)</script>', page, re.DOTALL)
    made = {name: json.loads(text) for name, text in found}
    for value in made.values():
        graph_objects.Figure(value)  # raises if the figure is not valid
    return made


def text_of(page: str) -> str:
    """Returns the visible text of a page, without scripts."""
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


def drawn(*runs: Path) -> dict[str, Plot]:
    return {plot.name: plot for _, plots in run_plots([RunRecord.open(run) for run in runs]) for plot in plots}


def test_a_run_leaves_a_report_of_all_that_its_record_says(home: Path) -> None:
    run = home / "a/tiny"
    page, events = (run / "report.html").read_text(), events_of(run)
    made, text = figures(page), text_of(page)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert made["loss"]["data"][0]["y"] == pytest.approx(losses, rel=1e-5)
    evaluations = [event for event in events if event["event"] == "eval"]
    assert made["loss"]["data"][1]["x"] == [event["step"] for event in evaluations]
    assert {"learning_rate", "gradient_norm", "bits_per_byte", "speed", "mfu", "time", "processor"} <= made.keys()
    for event in evaluations:
        assert f"{event['loss']:.4f}" in text
    assert "<mark>  d_model: 32</mark>" in text
    assert "  rope_theta: 10000.0\n" in text  # a default is not marked
    assert "step-000008" in text
    assert re.search(r"sansgpu train config.yaml --output-dir \S+", text)
    assert "://" not in text
    assert not re.search(r'(src|href)="(?!#)', text)


def test_the_configuration_in_a_report_is_the_run_s(home: Path, tmp_path: Path) -> None:
    text = text_of((home / "a/tiny/report.html").read_text())
    lines = re.search(r'<pre class="yaml">(.*?)</pre>', text, re.DOTALL)
    assert lines is not None
    (tmp_path / "config.yaml").write_text(re.sub(r"</?mark>", "", lines[1]).replace("&#39;", "'"))
    assert load_config(tmp_path / "config.yaml") == load_config(home / "a/tiny/config.yaml")


def test_several_runs_are_compared_and_have_different_colors(home: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    assert cli(["report", str(home / "a/tiny"), str(home / "b/tiny"), "--output", str(page)]) == 0
    text, made = text_of(page.read_text()), figures(page.read_text())
    assert "a/tiny" in text
    assert "b/tiny" in text
    row = re.search(r"<tr><th>training.learning_rate</th>(.*?)</tr>", text, re.DOTALL)
    assert row is not None
    assert re.findall(r"<td>(.*?)</td>", row[1]) == ["0.004", "0.001"]
    traces = made["loss"]["data"]
    assert [(trace["meta"]["run"], trace["name"]) for trace in traces] == [
        (0, "training"), (0, "validation"), (1, "training"), (1, "validation"),
    ]  # fmt: skip
    colors = [trace["line"]["color"] for trace in traces]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    assert {trace["meta"]["run"] for plot in made.values() for trace in plot["data"]} == {0, 1}


def test_pictures_are_of_the_same_plots(home: Path, tmp_path: Path) -> None:
    run = home / "a/tiny"
    assert cli(["report", str(run), "--format", "svg", "--output", str(tmp_path / "plots")]) == 0
    assert {path.stem for path in (tmp_path / "plots").glob("*.svg")} == drawn(run).keys()
    loss = (tmp_path / "plots/loss.svg").read_text()
    for words in ("loss (nats per token)", "step", "training", "validation"):
        assert f">{words}<" in loss


def test_png_has_the_dots_of_print(home: Path, tmp_path: Path) -> None:
    (written_file,) = write_plots([drawn(home / "a/tiny")["loss"]], tmp_path, "png")
    header = written_file.read_bytes()
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") == 1050  # 3.5 inches at 300 dpi


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "missing is not a run: it has no config.yaml;"),
        (["a/tiny", "--format", "pdf"], "--format is pdf, but must be one of html, png, svg."),
        (["empty", "--format", "svg"], "has no steps to plot yet"),
        (["list"], "keys and values"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(
    arguments: list[str], words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").symlink_to(home / "a")
    written(tmp_path / "empty", [], home / "a/tiny")
    written(tmp_path / "list", [], home / "a/tiny").joinpath("config.yaml").write_text("[1, 2]")
    assert cli(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def _old(event: Event) -> Event | None:
    """Removes the keys that runs of older versions did not write."""
    for key in ("phase_seconds", "system", "time", "seconds"):
        if event["event"] != "end":
            event.pop(key, None)
    if event["event"] in ("snapshot", "end"):
        event.pop("elapsed_seconds", None)
    return event


CASES = {
    "old": lambda run: changed(run, _old),
    "killed": lambda run: [event for event in events_of(run) if event["event"] != "end"],
    "only begun": lambda run: events_of(run)[:1],
    "empty": lambda run: [],
    "no validation": lambda run: [event for event in events_of(run) if event["event"] != "eval"],
    "nothing told": lambda run: changed(run, lambda e: {**e, "system": dict.fromkeys(e.get("system") or {"watts": 1})}),
    "a silent end": lambda run: [*events_of(run), {"event": "warning", "message": "disk full"}],
}


@pytest.mark.parametrize("case", CASES)
def test_a_record_that_lacks_something_is_still_reported(case: str, home: Path, tmp_path: Path) -> None:
    run = written(tmp_path / "run", CASES[case](home / "a/tiny"), home / "a/tiny")
    assert cli(["report", str(run)]) == 0
    assert cli(["report", str(run), str(home / "b/tiny"), "--output", str(tmp_path / "both.html")]) == 0
    page = (run / "report.html").read_text()
    state = "killed" if case in ("killed", "only begun", "empty") else "done"
    assert f"<b>{state}</b><span>state</span>" in text_of(page)
    made = figures(page)
    assert ("loss" in made) == (case not in ("only begun", "empty"))
    assert all(plot["data"] for plot in made.values())


def test_what_a_model_says_cannot_become_part_of_the_page(home: Path, tmp_path: Path) -> None:
    said = "</pre></script><script>alert(1)</script>  two  spaces\n\ttab"

    def say(event: Event) -> Event:
        return {**event, "sample": said} if event["event"] == "eval" else event

    events = [*changed(home / "a/tiny", say), {"event": "warning", "message": "<img src=x>"}]
    run = written(tmp_path / "</script><b>", events, home / "a/tiny")
    assert cli(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "alert(1)</script>" not in page
    assert "<img src" not in page
    assert "<b></" not in page
    assert "two  spaces\n\ttab" in page


def test_long_curves_keep_their_extremes() -> None:
    values: list[float | None] = [math.sin(i / 50) for i in range(100_000)]
    values[70_001], values[3] = 40.0, None
    kept = downsample(values)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(set(kept))
    assert 70_001 in kept
    assert min(v for v in values if v is not None) == min(values[place] for place in kept)  # type: ignore[type-var]


def test_a_long_run_is_a_page_of_a_few_megabytes(home: Path, tmp_path: Path) -> None:
    begin, step = (events_of(home / "a/tiny", kind)[0] for kind in ("start", "step"))
    steps = [{**step, "step": i, "tokens": i, "elapsed_seconds": i, "loss": 1 / i} for i in range(1, 20_001)]
    steps[12_344]["loss"] = 9.0
    run = written(tmp_path / "long", [begin, *steps], home / "a/tiny")
    assert cli(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    made = figures(page)
    assert len(page) < 8e6
    loss = made["loss"]["data"][0]
    assert len(loss["x"]) <= MAX_POINTS
    assert (12_345, 9.0) in zip(loss["x"], loss["y"], strict=True)
    assert loss["meta"]["along"]["tokens"] == loss["x"]
    assert "Downsampled" in page


def test_the_parts_of_the_time_are_all_of_it(home: Path) -> None:
    record = RunRecord.open(home / "a/tiny")
    parts = time_parts(record)
    assert sum(parts.values()) == pytest.approx(record.seconds)
    assert {"start-up", "steps: forward", "steps: backward", "evaluation", "snapshots"} <= parts.keys()
    assert min(parts.values()) > 0


def test_a_report_that_cannot_be_written_ends_no_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "corpus.jsonl").symlink_to(home / "corpus.jsonl")
    run = train(tmp_path, "run", training__max_steps=2)
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    capsys.readouterr()
    assert cli(["train", "--resume", "--output-dir", str(run), "--max-steps", "4"]) == 0
    assert "could not be written" in capsys.readouterr().out
    assert RunRecord.open(run).end_reason == "done"
    assert (run / "final/config.json").is_file()
    warnings = events_of(run, "warning")
    assert warnings[-1]["cause"] == "report"
    (run / "report.html").rmdir()
    assert cli(["train", "--resume", "--output-dir", str(run)]) == 0
    assert (run / "report.html").is_file()


def listed(capsys: Captured, *arguments: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json_of(capsys, "runs", *arguments)["runs"]}


def test_runs_are_listed_with_their_states(home: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(home / "a", tmp_path / "deep/a")
    written(tmp_path / "killed", CASES["killed"](home / "a/tiny"), home / "a/tiny")
    stopped = changed(home / "a/tiny", lambda e: {**e, "reason": "interrupted"} if e["event"] == "end" else e)
    written(tmp_path / "stopped", stopped, home / "a/tiny")
    written(tmp_path / "going", CASES["killed"](home / "a/tiny"), home / "a/tiny")
    written(tmp_path / "broken", [], home / "a/tiny").joinpath("config.yaml").write_text("a: [")
    written(tmp_path / "headless", [], home / "a/tiny").joinpath("config.yaml").unlink()
    (tmp_path / "no run").mkdir()
    with FileLock(tmp_path / "going/.lock"):
        rows = listed(capsys, str(tmp_path))
        assert cli(["runs", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert {name: row["state"] for name, row in rows.items()} == {
        "deep/a/tiny": "done", "killed": "killed", "stopped": "interrupted", "going": "training", "broken": "broken",
        "headless": "broken",
    }  # fmt: skip
    assert len({tuple(row) for row in rows.values()}) == 1  # the same keys in every row
    row, record = rows["deep/a/tiny"], RunRecord.open(home / "a/tiny")
    assert (row["task"], row["step"], row["total_steps"]) == ("pretrain", 8, 8)
    assert record.best is not None
    assert row["best_loss"] == record.best["loss"]
    assert row["size_bytes"] > 10_000
    times = [row["changed"] or "" for row in rows.values()]
    assert times == sorted(times, reverse=True)
    assert max(map(len, lines[:7])) <= 80
    assert any("broken: " in line or "broken" in line.split(":")[0] for line in lines[7:])


def test_listing_a_run_does_not_lock_it(home: Path, capsys: Captured) -> None:
    (home / "a/tiny/.lock").touch()
    assert listed(capsys, str(home / "a"))["tiny"]["state"] == "done"
    with lock_run(home / "a/tiny"):
        assert listed(capsys, str(home / "a"))["tiny"]["state"] == "done"  # a finished run is resumed


def test_no_runs_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(["runs"]) == 0
    assert capsys.readouterr().out == "No runs found in runs.\n"
    assert cli(["runs", "elsewhere"]) == 2
    assert "elsewhere is not a folder" in capsys.readouterr().err


def test_figures_say_what_plots_say(home: Path) -> None:
    for plot in drawn(home / "a/tiny", home / "b/tiny").values():
        made = figure(plot)
        assert [trace["y"] for trace in made["data"]] == [list(series.y) for series in plot.series]
        assert made["layout"]["xaxis"]["title"]["text"] == plot.x


def test_the_rows_of_a_plot_are_in_the_order_of_the_runs(home: Path, tmp_path: Path) -> None:
    """The order holds even if a phase occurs only in a later run."""
    unstarted = changed(home / "a/tiny", lambda e: {**e, "elapsed_seconds": 0.0} if e["event"] == "step" else e)
    run = written(tmp_path / "at once", unstarted, home / "a/tiny")
    plot = drawn(run, home / "b/tiny")["time"]
    assert plot.series[0].run == 1  # start-up
    assert plot.rows == ["at once", "tiny"]
    assert figure(plot)["layout"]["yaxis"]["categoryarray"] == plot.rows
