"""Runs are processes of their own: they outlive the studio, and any studio of the folder finds them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.processes import TINY, environment, options, train, write_corpus
from tests.studio.visiting import Page, studio

pytest.importorskip("starlette")
pytest.importorskip("plotly")
HOSTILE = "<script>document.title = 1</script>"
# Steps that take long enough to stop the run in the middle.
ENDLESS = {"training.max_steps": 100_000, "training.save_steps": 50, "training.eval_steps": 0}


def write_way(folder: Path, name: str, **changes: object) -> None:
    """Writes a configuration, and the answers that say that the studio has made it."""
    write_corpus(folder / "corpus.jsonl")
    chosen = options(TINY, {"data.dataset_name": "corpus.jsonl", **changes})[1::2]
    values: dict[str, dict[str, object]] = {}
    for setting in chosen:
        key, _, value = setting.partition("=")
        section, _, rest = key.rpartition(".")
        values.setdefault(section or "training", {})[rest] = yaml.safe_load(value)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": "pretrain", **values}), encoding="utf-8")
    (folder / ".studio").mkdir(exist_ok=True)
    (folder / ".studio" / f"{name}.json").write_text(json.dumps({"task": "pretrain", "data": "corpus.jsonl"}))


@pytest.fixture
def folder(home: Path, request: pytest.FixtureRequest) -> Path:
    made = home / request.node.name.replace("[", "-").rstrip("]")
    made.mkdir()
    return made


def steps(page: Page) -> int:
    words = page.text.partition("training , step ")[2]
    return int(words.split()[0].replace(",", "")) if words else 0


def test_a_run_goes_on_when_the_studio_is_killed_and_another_one_stops_it(folder: Path) -> None:
    write_way(folder, "long", **ENDLESS)
    with studio(folder) as first:
        first.enter()
        first.submit("/way/long/start")
        before = steps(first.until("/run?run=runs/long", lambda page: steps(page) > 0))
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with studio(folder) as second, studio(folder) as third:
            for visitor in (second, third):
                visitor.enter()
            later = steps(second.until("/run?run=runs/long", lambda page: steps(page) > before))
            assert steps(third.until("/run?run=runs/long", lambda page: steps(page) >= later))
            assert "is being trained already" in third.submit("/run/resume", run="runs/long").text
            second.submit("/run/stop", run="runs/long")
            third.until("/run?run=runs/long", lambda page: 'id="resume"' in page.body)
            third.submit("/run/resume", run="runs/long", changes="training.max_steps=nothing")
            page = third.until("/run?run=runs/long", lambda page: 'role="alert"' in page.body)
            assert "training.max_steps" in page.text
            reached = json.loads((folder / "runs/long/metrics.jsonl").read_text().splitlines()[-1])["step"]
            third.submit("/run/resume", run="runs/long", changes=f"training.max_steps={reached + 4}")
            assert f"step {reached + 4:,} of" in third.shows("/run?run=runs/long", "Next: try it").text


def test_a_run_of_the_command_line_is_shown_and_stopped(folder: Path) -> None:
    write_way(folder, "mine", **ENDLESS)
    command = [sys.executable, "-m", "sansgpu", "train", "mine.yaml", "--plain", "--output-dir", "runs/by-hand"]
    run = subprocess.Popen(command, cwd=folder, env=environment(folder / "cache"), stdout=subprocess.DEVNULL)
    try:
        with studio(folder) as visitor:
            visitor.enter()
            visitor.until("/run?run=runs/by-hand", lambda page: page.status == 200 and steps(page) > 0)
            assert "runs/by-hand training" in visitor.open("/runs/table").text
            visitor.submit("/run/stop", run="runs/by-hand")
            assert run.wait(timeout=60) == 128 + signal.SIGTERM
            visitor.until("/run?run=runs/by-hand", lambda page: 'id="resume"' in page.body)
            assert "no process works on this any more" in visitor.submit("/run/stop", run="runs/by-hand").text
    finally:
        run.kill()


def test_two_hundred_runs_are_listed_and_compared(home: Path, folder: Path) -> None:
    assert train(home, folder / "runs" / "one", "--max-steps", "4") == 0
    for number in range(199):
        shutil.copytree(folder / "runs" / "one", folder / "runs" / f"copy-{number}")
    with studio(folder) as visitor:
        visitor.enter()
        started = time.monotonic()
        page = visitor.open("/runs/table")
        assert time.monotonic() - started < 20
        assert page.text.count("runs/copy-") == 199
        (folder / "runs/copy-7/metrics.jsonl").write_text("damaged\n", encoding="utf-8")
        shutil.move(folder / "runs/copy-8", home / "copy-8")
        started = time.monotonic()
        again = visitor.open("/runs/table")
        assert time.monotonic() - started < 5
        assert again.body.count('value="runs/copy-') == 198
        assert "runs/copy-7/metrics.jsonl" in again.text, "a changed run is read again, and its problem said"
        shutil.rmtree(folder / "runs/copy-7")
        shutil.copytree(folder / "runs/one", folder / "runs/copy-7")
        shutil.move(home / "copy-8", folder / "runs/copy-8")
        assert "200 runs in this folder" in visitor.open("/").text
        page = visitor.open("/compare?run=runs/one&run=runs/copy-7")
        assert "2 runs compared" in page.text
        assert "validation loss, best" in page.text
        plots = json.loads(visitor.open("/plots?run=runs/one&run=runs/copy-7").body)
        assert len({trace["meta"]["run"] for plot in plots for trace in plot["data"]}) == 2


def test_a_snapshot_is_copied_into_a_new_run(home: Path, folder: Path) -> None:
    assert train(home, folder / "runs" / "one", "--max-steps", "8") == 0
    with studio(folder) as visitor:
        visitor.enter()
        page = visitor.submit("/run/fork", run="runs/one", snapshot="step-000004")
        assert visitor.last == "/run?run=runs%2Fone-from-4"
        assert (folder / "runs/one-from-4/snapshots/step-000004").is_dir()
        assert "Go on" in page.text
        assert "step-9" in visitor.submit("/run/fork", run="runs/one", snapshot="step-9").text


def test_a_run_that_cannot_begin_says_why(folder: Path) -> None:
    write_way(folder, "wrong", **{"data.dataset_name": "missing.jsonl"})
    with studio(folder) as visitor:
        visitor.enter()
        visitor.submit("/way/wrong/start")
        page = visitor.until("/run?run=runs/wrong", lambda page: 'role="alert"' in page.body)
        assert "missing.jsonl" in page.text
        visitor.submit("/way/wrong/start")
        assert visitor.last == "/run?run=runs/wrong-2", "a new folder"


def test_files_of_a_stranger_are_shown_as_text(home: Path, folder: Path) -> None:
    run = folder / "runs" / "gift"
    assert train(home, run, "--max-steps", "2") == 0
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evil = {"event": "warning", "step": 2, "message": HOSTILE}
    sample = {"event": "eval", "step": 2, "loss": 1.0, "sample": HOSTILE, "seconds": 1.0}
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(evil), json.dumps(sample)]) + "\n")
    shutil.move(run, folder / "runs" / HOSTILE.replace("/", "_"))
    (folder / "runs" / "linked").symlink_to("/etc")
    (folder / "runs" / "broken").mkdir()
    (folder / "runs" / "broken" / "metrics.jsonl").write_text("[[[")
    shutil.copytree(folder / "runs" / HOSTILE.replace("/", "_"), folder / "runs" / "damaged")
    (folder / "runs" / "damaged" / "config.yaml").write_text("task: [")
    (folder / ".studio").mkdir()
    (folder / ".studio" / "torn.json").write_text('{"task": ["')
    with studio(folder) as visitor:
        assert "What should the model do?" in visitor.enter().text
        assert "torn.json is damaged" in visitor.open("/way/torn/data").text
        for path in ("/runs/table", f"/run?run=runs/{HOSTILE.replace('/', '_')}", "/run?run=runs/broken"):
            page = visitor.open(path.replace("<", "%3C").replace(">", "%3E").replace(" ", "%20"))
            assert "<script>document" not in page.body
            assert "Traceback" not in page.body
        assert visitor.open("/run?run=runs/linked").status == 400


def test_links_of_a_stranger_lead_nowhere(home: Path, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("my secret", encoding="utf-8")
    assert train(home, folder / "runs" / "one", "--max-steps", "4") == 0
    processes = folder / ".studio" / "processes"
    processes.mkdir(parents=True)
    (processes / "runs__one.log").symlink_to(secret)
    (processes / "serve-x.json").write_text('{"command": ["serve"], "pid": "1"}', encoding="utf-8")
    (folder / "data").mkdir()
    (folder / "data" / "linked").symlink_to(tmp_path)
    (folder / ".studio" / "linked.json").write_text('{"task": "sft"}', encoding="utf-8")
    (folder / ".studio" / "dangling.json").symlink_to(tmp_path / "nothing")
    (folder / "yaml.py").write_text("open('ran', 'w')", encoding="utf-8")
    with studio(folder) as visitor:
        assert "dangling" in visitor.enter().text
        assert "my secret" not in visitor.open("/run?run=runs/one").body
        assert visitor.upload("linked", "a.csv", b"text\na\n").status == 400
        visitor.submit("/run/resume", run="runs/one", changes="training.max_steps=6")
        visitor.until("/run?run=runs/one", lambda page: "step 6 of 6" in page.text and "try it" in page.text)
        for snapshot in ("../../one/snapshots/step-000004", "step-000004/../step-000004", ""):
            assert "has no snapshot" in visitor.submit("/run/fork", run="runs/one", snapshot=snapshot).text
        for run in ("--help", "%00", "../x", "x" * 5000):
            assert visitor.open(f"/run?run={run}").status == 400
    assert secret.read_text(encoding="utf-8") == "my secret"
    assert [path.name for path in (folder / "runs").iterdir()] == ["one"]
    assert not (folder / "ran").exists()


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        with studio(folder) as visitor:
            visitor.enter()
            visitor.submit("/ways", task="sft", name="big")
            page = visitor.upload("big", "big.jsonl", b"x" * (4 << 20))
            assert page.status == 400
            assert "No space left on device" in page.text
            assert not any((folder / "data" / "big").iterdir())
            assert visitor.upload("big", "small.jsonl", b"{}\n").status == 204
            with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 512)
            assert "No space left on device" in visitor.submit("/ways", task="sft", name="more").text
            assert "big" in visitor.open("/").text
    finally:
        subprocess.run(["umount", folder], check=True)
