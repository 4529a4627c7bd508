"""Basic commands run without optional packages; other commands name the package that they need."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.config.errors import EXTRAS
from tests.processes import environment, settings, write_corpus
from tests.project import PROJECT

# Extras that no command needs, or that only combine other extras.
NO_JOB = {"all", "bench", "browser", "dev", "docs", "llama", "release"}
IMPORTED_AS = {
    "python-calamine": "python_calamine",
    "pyyaml": "yaml",
    "markdown-it-py": "markdown_it",
    "mlflow-skinny": "mlflow",
    "lm-eval": "lm_eval",
}
# Runs commands in one process and prints their exit codes and the modules that were imported in the end. An entry of
# None in sys.modules makes Python treat a package as not installed.
PROGRAM = """
import json, sys
missing, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
from sansgpu.cli import run
codes = [run(command) for command in commands]
import sansgpu.api, sansgpu.views.live  # for notebooks and terminals
print(json.dumps([codes, sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})]))
"""


def packages(requirements: list[str]) -> set[str]:
    """Returns the import names of requirements, except for those that only some versions of Python need."""
    names = [re.match(r"[\w.-]+", line) for line in requirements if "python_version" not in line]
    return {IMPORTED_AS.get(name[0], name[0]) for name in names if name} - {"sansgpu"}


def train(*more: str) -> list[str]:
    return ["train", *settings(data__dataset_name="notes.txt", training__max_steps=3), "--output-dir", "run", *more]


def run_apart(folder: Path, missing: list[str], commands: list[list[str]]) -> tuple[list[int], set[str], str]:
    """Runs commands in a new process; returns their exit codes, the imported packages and all output."""
    write_corpus(folder / "notes.txt")
    program = [sys.executable, "-c", PROGRAM, json.dumps([missing, commands])]
    ended = subprocess.run(
        program, cwd=folder, env=environment(folder / "cache"), capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    codes, imported = json.loads(ended.stdout.splitlines()[-1])
    return codes, set(imported), ended.stdout + ended.stderr


def test_every_package_of_an_extra_is_known() -> None:
    found = {
        package: extra
        for extra, requirements in PROJECT["optional-dependencies"].items()
        if extra not in NO_JOB
        for package in packages(requirements)
    }
    assert found == EXTRAS


def test_a_decoder_is_trained_and_used_without_optional_packages(tmp_path: Path) -> None:
    logged = ("--set", "training.report_to=tensorboard")
    commands = [
        train(*logged),
        train(*logged, "--resume", "--set", "training.max_steps=5"),
        ["generate", "run", "--prompt", "the model", "--max-new-tokens", "3"],
        ["generate", "run/final", "--prompt", "the model", "--max-new-tokens", "3"],
        ["eval", "run"],
        ["eval", "run/final", "--data", "notes.txt"],
        ["plan", *train()[1:-2]],
        ["tokenizer", "train", "notes.txt", "--vocab-size", "300", "--output", "tokens"],
        ["snapshots", "list", "run"],
        ["export", "run"],
        ["runs", "."],
    ]
    codes, _, printed = run_apart(tmp_path, [name for name in EXTRAS if name != "markdown_it"], commands)
    assert codes == [0] * len(commands), printed
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    named = [found for line in warnings if (found := re.findall(r"sansgpu\[\w+\]", line))]
    assert named == 2 * [
        ["sansgpu[tensorboard]"],
        ["sansgpu[report]"],
    ]
    written = {path.name for path in (tmp_path / "run/final").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= written


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Returns a folder with a run and files of formats that need a package, and the packages that training imported."""
    folder = tmp_path_factory.mktemp("home")
    codes, imported, printed = run_apart(folder, [], [train()])
    assert codes == [0], printed
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "table.parquet").write_bytes(b"PAR1")
    return folder, imported


@pytest.mark.long
def test_training_imports_all_core_packages_and_of_optional_ones_only_that_of_the_report(
    trained: tuple[Path, set[str]],
) -> None:
    assert packages(PROJECT["dependencies"]) <= trained[1]
    assert trained[1] & {*EXTRAS} <= {"plotly"}


def outputs(home: Path) -> set[Path]:
    """Returns the files of a folder, without locks and caches."""
    return {path for path in home.rglob("*") if path.is_file() and path.name != ".lock" and "cache" not in path.parts}


TUNED = ("--set", "model.name_or_path=run/final", "--set", "data.dataset_name=notes.txt")


@pytest.mark.parametrize(
    ("missing", "arguments", "sentence"),
    [
        ("transformers", ["chat", "run/final"], "this command needs transformers"),
        ("transformers", ["generate", "someone/model"], "this command needs transformers"),
        ("peft", ["train", "--set", "task=sft", *TUNED], "task sft needs peft"),
        ("torchmetrics", ["plan", "--set", "task=classify", *TUNED], "task classify needs torchmetrics"),
        (
            "datasets",
            ["train", "--set", "data.dataset_name=wikitext"],
            'dataset "wikitext" is not a file or folder here, and reading it from the Hugging Face Hub needs datasets',
        ),
        (
            "pyarrow",
            ["train", "--set", "data.dataset_name=table.parquet"],
            "table.parquet: reading Parquet needs pyarrow",
        ),
        ("gguf", ["generate", "model.gguf"], "model.gguf: reading a GGUF file needs gguf"),
        ("gguf", ["export", "run", "--format", "gguf"], "--format gguf needs gguf"),
        ("onnxruntime", ["export", "run", "--format", "onnx"], "--format onnx needs onnxruntime"),
        ("lm_eval", ["eval", "run", "--harness", "arc_easy"], "--harness needs lm_eval"),
        ("uvicorn", ["serve", "run"], "sansgpu serve needs uvicorn"),
        ("mteb", ["eval", "run", "--mteb", "STSBenchmark"], "--mteb needs mteb"),
        ("usearch", ["search", "model", ".", "words"], "sansgpu search needs usearch"),
        ("plotly", ["report", "run"], "an HTML report needs plotly"),
        ("matplotlib", ["report", "run", "--format", "png"], "--format png needs matplotlib"),
        ("optuna", ["tune", "--set", "data.dataset_name=notes.txt"], "sansgpu tune needs optuna"),
        ("wandb", train("--set", "training.report_to=wandb", "--resume"), "training.report_to wandb needs wandb"),
        (
            "trackio",
            train("--set", "training.report_to=trackio", "--resume"),
            "training.report_to trackio needs trackio",
        ),
        ("mlflow", train("--set", "training.report_to=mlflow", "--resume"), "training.report_to mlflow needs mlflow"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    missing: str,
    arguments: list[str],
    sentence: str,
    trained: tuple[Path, set[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, _ = trained
    monkeypatch.chdir(home)
    monkeypatch.setenv("SANSGPU_CACHE", str(home / "cache"))
    monkeypatch.setitem(sys.modules, missing, None)
    before = outputs(home)
    code, error = cli(arguments), capsys.readouterr().err
    assert code == 2, error
    last = error.splitlines()[-1]
    command = f'`pip install "sansgpu[{EXTRAS[missing]}]"`'
    assert last == f"sansgpu: {sentence}, which is not installed; run {command}."
    assert outputs(home) == before


def test_several_missing_packages_are_one_sentence(
    trained: tuple[Path, set[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained[0])
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli(["export", "run", "--format", "onnx"]) == 2
    words = 'needs onnx, onnxscript and onnxruntime, which are not installed; run `pip install "sansgpu[onnx]"`.'
    assert capsys.readouterr().err.strip().endswith(words)
