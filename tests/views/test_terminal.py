"""The terminal shows the metrics of a task, whether or not the task declares them."""

import io
import time
from contextlib import closing

import pytest

from sansgpu.events.event import Event
from sansgpu.tasks.configuration import settings_of
from sansgpu.views import terminal
from sansgpu.views.tables import storage
from sansgpu.views.terminal import PreparationBar, RunConsole, Terminal


@pytest.mark.parametrize(
    ("kind", "metrics", "text"),
    [
        ("pretrain", {"perplexity": 3.0, "bits_per_byte": None}, "perplexity 3.00, bits per byte not finite"),
        ("qa", {"f1": 50.0, "exact_match": 25.0, "questions": 4.0}, "exact match 25.00%, F1 50.00%, 4 questions"),
        (
            "graph",
            {"entity_loss": 2.5, "entity_acc": 0.5, "entity_hits": 1.0, "entity_count": 2.0, "entity_interval": [0, 1]},
            "50.0% of 2 unfiltered entity queries correct (loss 2.5000, 95% interval 0.0% to 100.0%)",
        ),
        ("somewhere.tasks:Order", {"order_acc": 0.5, "named": "x", "found": [1]}, "order acc 0.5000"),
    ],
)
def test_an_evaluation_is_one_line(
    kind: str, metrics: dict[str, object], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    event: Event = {"event": "eval", "step": 8, "loss": 1.5, **metrics, "seconds": 0.1}
    Terminal(RunConsole(), settings_of(kind)).emit(event)
    assert capsys.readouterr().out == f"validation at step 8: loss 1.5000, {text}\n"


def test_an_evaluation_of_other_data_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(RunConsole(), settings_of("pretrain"), "notes.txt").emit({"event": "eval", "step": 8, "loss": 1.5})
    assert capsys.readouterr().out == "notes.txt at step 8: loss 1.5000\n"


def test_small_sizes_have_small_units() -> None:
    assert [storage(size) for size in (2_500, 1.5e6, 1e8, 3e9)] == ["2.5 kB", "1.5 MB", "0.10 GB", "3.00 GB"]


def test_a_stage_that_lasts_is_shown_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SHOWN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(terminal, "REPEATED_AFTER_SECONDS", 0.5)
    file = io.StringIO()
    with closing(PreparationBar(RunConsole(file=file))) as bar:
        bar("loading", 0, 0)
        bar("tokenizing", 0, 20_000_000)
        bar("evaluating", 1, 4, "batch")
        time.sleep(1.3)
        bar.emit({"event": "eval"})
        shown = file.getvalue().splitlines()
        time.sleep(0.6)
    assert shown[:2] == ["tokenizing (20.0 MB)", "evaluating ..."]
    assert shown[2].startswith("evaluating ... 1 of 4 batches, ")
    assert file.getvalue().splitlines() == shown


def test_a_long_stage_is_shown_at_bounded_intervals_with_its_newest_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SHOWN_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(terminal, "REPEATED_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(terminal, "REPEATED_AFTER_RATIO", 100.0)
    monkeypatch.setattr(terminal, "REPEATED_WITHIN_SECONDS", 0.3)
    file = io.StringIO()
    with closing(PreparationBar(RunConsole(file=file))) as bar:
        bar("evaluating", 0, 4, "batch")
        bar("evaluating", 3, 4, "batch")
        deadline = time.monotonic() + 30  # for a busy machine
        while len(shown := file.getvalue().splitlines()) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert len(shown) >= 4
    assert all(line.startswith("evaluating ... 3 of 4 batches, ") for line in shown[1:])


def test_a_stage_that_lasts_has_a_spinner_that_the_terminal_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SHOWN_AFTER_SECONDS", 0.2)
    file = io.StringIO()
    with closing(PreparationBar(RunConsole(file=file, force_terminal=True, width=60))) as bar:
        bar("compiling", 0, 0)
        time.sleep(1.0)
    assert "compiling" in file.getvalue()
    assert "0:00:0" in file.getvalue()
    assert file.getvalue().endswith("\x1b[1A\x1b[2K")


def test_where_another_display_takes_over_nothing_is_shown_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SHOWN_AFTER_SECONDS", 0.1)
    file = io.StringIO()
    with closing(PreparationBar(RunConsole(file=file))) as bar:
        bar.ends_at_start = True
        bar.emit({"event": "start"})
        bar("evaluating", 0, 0)
        time.sleep(0.6)
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("on_terminal", "shown"),
    [(False, ["sample: def f():\\n    return\\n"]), (True, ["sample: def f():", "    return", ""])],
)
def test_a_sample_is_one_line_of_a_log_and_as_generated_on_a_terminal(on_terminal: bool, shown: list[str]) -> None:
    file = io.StringIO()
    console = RunConsole(file=file, force_terminal=on_terminal, color_system=None)
    Terminal(console).emit(
        {"event": "eval", "step": 8, "loss": 1.5, "seconds": 0.1, "sample": "def f():\n    return\n"}
    )
    assert file.getvalue().splitlines()[1:] == shown
