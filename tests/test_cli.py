"""Errors are reported in one sentence before any work is done, never as a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sansgpu.cli import run as cli
from sansgpu.cli.app import app
from sansgpu.config import ConfigError, TrainingConfig
from tests.processes import environment, finish_apart, messages, record, sentence, settings, use_cache, write_corpus


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    write_corpus(tmp_path / "corpus.jsonl")


def train(*more: str, corpus: str = "corpus.jsonl", **changes: object) -> int:
    chosen = settings(**{"data__dataset_name": corpus, "training__max_steps": 3, **changes})
    return cli(["train", *chosen, "--output-dir", "out", *more])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__d_modle": 3}, "did you mean model.d_model?"),
        ({"model__n_layers": "four"}, "model.n_layers"),
        ({"model__d_model": 33}, "not divisible"),
        ({"corpus": "missing.txt"}, "does not exist"),
        ({"corpus": "empty.txt"}, "contains no text"),
        ({"corpus": "binary.txt"}, "is not text (it contains a NUL byte)"),
        ({"corpus": "short.txt"}, "less than one window"),
        (
            {"model__vocab_size": 50},
            "smaller than the tokenizer's vocabulary of 300 tokens; set data.vocab_size to 50 too, or remove",
        ),
        ({"data__tokenizer": "none.json"}, "none.json does not exist"),
        ({"training__distributed_backend": "ccl"}, "set it to gloo"),
        ({"training__report_to": "wandb"}, 'pip install "sansgpu[wandb]"'),
        ({"training__batch_size": 10_000_000}, "memory"),
        ({"training__keep_last": 10**12}, "free"),
        ({"model__d_model": 2_000_000, "model__n_heads": 2}, "memory"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(
    changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").write_text("")
    Path("binary.txt").write_bytes(bytes(range(256)))
    Path("short.txt").write_text("short")
    assert train(**changes) == 2  # type: ignore[arg-type]
    assert words in sentence(capsys)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "missing.yaml"], "missing.yaml does not exist"),
        (["train", "--frobnicate"], "sansgpu: there is no option --frobnicate; see sansgpu train --help."),
        (["train", "--zip", "3"], "sansgpu: there is no option --zip; see sansgpu train --help."),
        (["train", "--max-step", "3"], "there is no option --max-step (did you mean --max-steps?)"),
        (["train", "--out", "x"], "(did you mean --output-dir?)"),
        (["generate", "--temprature", "1"], "(did you mean --temperature?)"),
        (["tran"], "No such command 'tran', did you mean 'train'; see sansgpu --help."),
        (["train", "--set", "training.until=25:00"], "training.until: 25:00 is not a time; write 18:00, 6PM or"),
        (["train", "--until", "18"], "training.until: 18 is not a time; write 18:00, 6PM or"),
        (["train", "--set", "model.d_model"], "write --set key.path=value"),
        (["train", "--target-device", "tpu"], "must be cpu, gpu or auto"),
        (["train", "a.yaml", "-f", "b.yaml"], "given twice"),
        (["train", "--max-steps", "many"], "--max-steps"),
        (["dance"], "dance"),
        (["eval", "./nowhere"], "does not exist"),
        (["generate", "cache-less"], "neither a run"),
        (
            ["export", "cache-less", "--format", "tflite"],
            "--format is tflite, but must be hf, gguf, ollama, onnx or static",
        ),
        (["snapshots", "list", "cache-less"], "is not a run"),
        (["tokenizer", "train", "corpus.jsonl", "--output", "t", "--vocab-size", "9"], "too small"),
    ],
)
def test_usage_errors_are_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cache-less").mkdir()
    assert cli(arguments) == 2
    assert words in sentence(capsys)


@pytest.mark.parametrize("group", [[], ["snapshots"]])
def test_a_command_that_lacks_a_subcommand_prints_its_help(
    group: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(group) == 2
    said = capsys.readouterr()
    assert "Usage: " + " ".join(["sansgpu", *group]) in said.out
    assert said.err == ""


def test_a_message_with_a_very_long_name_keeps_its_beginning_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["generate", "/missing" + "/a" * 1500]) == 2
    said = sentence(capsys)
    assert said.startswith("sansgpu: /missing/a/a")
    assert "a..." in said
    assert said.endswith(" does not exist; pass a run folder or a Hugging Face model.")
    assert len(said) < 600


def test_a_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert train("--target-device", "gpu") == 2
    said = sentence(capsys)
    assert "device is cuda, but" in said
    assert said.endswith("; set device to auto or cpu.")
    with pytest.raises(ConfigError) as error:
        TrainingConfig(device="cuda").get_effective_device()
    assert said == f"sansgpu: {error.value}"


def test_settings_for_several_gpus_are_explained_on_one_cpu() -> None:
    assert train("--max-steps", "1", training__distributed_backend="nccl", training__sharding="full") == 0
    said = [event["message"] for event in record(Path("out")) if event["event"] == "warning"]
    assert [message for message in said if "nccl" in message or "sharding" in message] == [
        "training.distributed_backend nccl works only on GPUs, so this run uses gloo; set it to gloo.",
        "training.sharding full has no effect in a single process; start several, e.g. with --processes 2.",
    ]


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_launcher_that_says_half_is_refused(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "2")
    assert train() == 2
    assert f"{variable} is 2, but " in sentence(capsys)


def test_a_folder_that_cannot_be_written_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").write_text("a file where the folder should be")
    assert train() == 2
    assert "is a file, not a folder" in sentence(capsys)


def test_a_refused_command_leaves_no_folder_and_keeps_one_that_was_there() -> None:
    elsewhere = {"training__checkpoint_dir": "far/snapshots", "training__logging_dir": "far/logs"}
    too_large = {"training__batch_size": 10_000_000, **elsewhere}
    before = set(Path().iterdir())
    assert train("--output-dir", "deep/er/out", **too_large) == 2  # type: ignore[arg-type]
    space = ["--set", "training.eval_batches=null", "--output-dir", "deep/search", "--trials", "1"]
    assert cli(["tune", *settings(data__dataset_name="corpus.jsonl", **too_large), *space]) == 2
    assert set(Path().iterdir()) - before <= {Path("cache")}
    Path("out").mkdir()
    assert train(**too_large) == 2  # type: ignore[arg-type]
    assert list(Path("out").iterdir()) == []
    assert train(**elsewhere) == 0  # type: ignore[arg-type]
    files = sorted(Path("far").rglob("*"))
    assert train("--resume", **too_large) == 2  # type: ignore[arg-type]
    assert sorted(Path("far").rglob("*")) == files
    assert Path("out/.lock").exists()


def test_an_old_run_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    before = Path("out/metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train() == 2
    assert "--resume" in sentence(capsys)
    assert Path("out/metrics.jsonl").read_bytes() == before


def test_a_resume_needs_a_run_or_the_configuration_of_a_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--resume") == 2
    assert sentence(capsys).startswith("sansgpu: out contains no run to resume; set --output-dir to a run folder")
    assert not Path("out").exists()
    Path("mine.yaml").write_text("task: pretrain\n")
    assert train("mine.yaml", "--resume") == 0
    capsys.readouterr()
    assert cli(["train", "--resume", "--output-dir", "oat", "--max-steps", "4"]) == 2
    assert "(did you mean out?)" in sentence(capsys)
    assert cli(["train", "--resume", "--output-dir", "out", "--max-steps", "4"]) == 0


def test_snapshots_elsewhere_are_not_mixed_with_another_runs(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = {"training__checkpoint_dir": "elsewhere"}
    assert train(**elsewhere) == 0  # type: ignore[arg-type]
    assert list(Path("elsewhere").glob("step-*"))
    capsys.readouterr()
    assert train("--output-dir", "other", **elsewhere) == 2  # type: ignore[arg-type]
    assert "another run's snapshots" in sentence(capsys)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"training__max_steps": 200, "training__max_grad_norm": 0, "training__save_steps": 1}
    assert train(**changes, training__learning_rate=1e18, training__warmup_steps=3) == 1  # type: ignore[arg-type]
    line = sentence(capsys)
    assert "step " in line
    assert "the loss is" in line
    assert cli(["snapshots", "verify", "out"]) == 0
    assert list(Path("out/snapshots").glob("step-*"))


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--debug", model__d_model=33) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_exit_code_is_the_processs(tmp_path: Path) -> None:
    code, out, error = finish_apart(["train", "missing.yaml"], tmp_path / "cache")
    assert (code, out) == (2, "")
    (message,) = messages(error)
    assert message.startswith("sansgpu: missing.yaml does not exist; pass a file, or one of small, ")
    assert finish_apart(["--version"], tmp_path / "cache")[0] == 0


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_an_error_in_a_librarys_thread_is_one_line_unless_debugging(debug: list[str]) -> None:
    script = f"""
import sys, threading
from sansgpu.cli import main

sys.argv = ["sansgpu", "--version", *{debug}]
try:
    main()
except SystemExit:
    thread = threading.Thread(target=lambda: open("/nowhere/at all"))
    thread.start()
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ("Traceback" in done.stderr) == bool(debug)
    assert "FileNotFoundError" in done.stderr
    assert debug or done.stderr.count("\n") == 1


def commands(command: Any = None, name: str = "sansgpu") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    yield name, command
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {inner_name}")


def test_help_lists_the_commands_of_a_day_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["--help"]) == 0
    shown = capsys.readouterr().out
    order = (
        "─ Start ─", "init ", "doctor ", "plan ", "bench ", "─ Train ─", "train ", "tune ", "─ Look ─", "runs ",
        "report ", "snapshots ", "─ Use ─", "eval ", "predict ", "generate ", "chat ", "extract ", "export ",
        "tokenizer ", "─ Scale ─", "k8s ", "slurm ",
    )  # fmt: skip
    places = [shown.index(f"{'' if word.startswith('─') else '│ '}{word}") for word in order]
    assert places == sorted(places)


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_each_command_says_in_one_line_what_it_does_and_groups_many_options(name: str, command: Any) -> None:
    summary = (command.help or "").split("\n\n")[0].strip()
    assert 0 < len(summary) < 60
    assert "\n" not in summary
    options = [option for option in command.params if option.param_type_name == "option"]
    assert all(option.help for option in command.params)
    assert len(options) <= 8 or len({option.rich_help_panel for option in options}) > 1, name


def test_the_help_of_every_command_has_an_example() -> None:
    for name, command in commands():
        assert getattr(command, "commands", None) or f"Example: {name} " in f"{command.help} "


def test_options_may_be_written_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["train", "--output_dir", " ", "--dry_run"]) == 2
    assert "the name is empty" in sentence(capsys)


COMPLETED = {
    "t": ["train", "tune", "tokenizer"],
    "train --max-s": ["--max-steps", "--max-seq-length"],
    "snapshots p": ["prune"],
    "train ti": ["tiny"],
    "plan ": ["large", "medium", "small", "tiny"],
    "report ru": ["runs/new", "runs/old"],
    "eval runs/new --snapshot ": ["latest", "best", "step-000020", "step-000010"],
    "train --output-dir runs/new --resume step": ["step-000020", "step-000010"],
}
COMPLETE = """
import json, os, sys
from sansgpu.cli import run
for words in json.loads(sys.argv[1]):
    os.environ |= {"COMP_WORDS": f"sansgpu {words}", "COMP_CWORD": str(words.count(" ") + 1)}
    run([])
    print("and torch:", "torch" in sys.modules)
"""


def test_a_shell_completes_names_without_loading_torch() -> None:
    for age, name in enumerate(("new", "old")):
        for step in ("step-000010", "step-000020"):
            Path(f"runs/{name}/snapshots/{step}").mkdir(parents=True)
        Path(f"runs/{name}/metrics.jsonl").touch()
        os.utime(f"runs/{name}/metrics.jsonl", (1e9 - age, 1e9 - age))
    Path("configs").mkdir()
    Path("configs/tiny.yaml").touch()
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE, json.dumps([*COMPLETED])],
        capture_output=True,
        text=True,
        env={**environment(Path("cache")), "_SANSGPU_COMPLETE": "complete_bash"},
    )
    found = [part.split() for part in done.stdout.split("and torch: False\n")]
    assert dict(zip(COMPLETED, found, strict=False)) == COMPLETED, done.stderr


def test_the_list_of_runs_needs_no_torch() -> None:
    program = "import sys; from sansgpu.cli import run; run(['runs']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "No runs found in runs.\nFalse\n"


def test_a_reader_that_leaves_early_is_not_blamed_on_other_code() -> None:
    """`sansgpu --help | head` closes the pipe before everything is printed."""
    code = "import sys; from sansgpu.cli import run; sys.exit(run(['generate', '--help']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) in (0, 1)
