"""Invalid configuration files are refused within seconds, in one short sentence and without a traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.tasks.configuration import load_config

MULTIPLYING_MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{k{i}: 1, <<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)
MULTIPLYING_ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MOST_SECONDS, MOST_BYTES = 10, 200 << 20  # for a test (1 s on an idle machine), and for reading one file


@pytest.fixture(autouse=True)
def _within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that hangs: opening a pipe without a writer blocks forever."""
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("the test took longer than MOST_SECONDS"))
    signal.alarm(MOST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli(["train", *arguments, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("sansgpu: ")
    return captured.err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "model: " + "[" * 500 + "]" * 500, "nested more than 32 levels deep"),
        ("a.toml", "model = " + "[" * 500 + "]" * 500, "nested more than 32 levels deep"),
        ("a.toml", ".".join(["a"] * 5000) + " = 1", "nested more than 32 levels deep"),
        ("a.json", '{"a":' * 500 + "1" + "}" * 500, "nested more than 32 levels deep"),
        ("a.json", "[" * 20000 + "]" * 20000, "nested more than 32 levels deep"),
        ("a.yaml", "model: {d_model: !!int abc}", '"abc" is not a valid int in line 1'),
        ("a.yaml", "task: sft\nmodel: {d_model: !!bool perhaps}", '"perhaps" is not a valid bool in line 2'),
        ("a.yaml", "training: {until: !!timestamp x}", '"x" is not a valid timestamp in line 1'),
        ("a.yaml", "training: {until: 2025-02-30}", '"2025-02-30" is not a valid timestamp in line 1'),
        ("a.toml", "training.until = 2025-02-30", "Invalid date"),
        ("a.yaml", "model: !!set {a, b}", "model is a set"),
        ("a.yaml", "model: &a {d_model: *a}", "the alias *a refers to a value that contains it"),
        ("a.yaml", "model: &a\n  <<: *a", "the alias *a refers to a value that contains it"),
        ("a.yaml", MULTIPLYING_MERGES, "more than 10,000 values"),
        ("a.yaml", MULTIPLYING_ALIASES, "more than 10,000 values"),
        ("a.yaml", "model: {d_model: " + "9" * 5000 + "}", "is not a valid int"),
        ("a.yaml", "model: {d_model: " + "9" * 400 + "}", "model.d_model is an integer of more than 64 bits"),
        ("a.toml", "model.d_model = " + "9" * 5000, "an integer of more than 64 bits"),
        ("a.json", '{"model": {"d_model": ' + "9" * 5000 + "}}", "an integer of more than 64 bits"),
        ("a.json", '{"training": {"learning_rate": 1e400}}', "not a finite number"),
        ("a.json", '{"data": {"dataset_name": "\\ud800"}}', "an unpaired surrogate"),
        ("a.yaml", 'data: {dataset_name: "a\\0b"}', "the character NUL"),
        ("a.yaml", "on: 1", "the key true in line 1 is not a string"),
        ("a.yaml", "# " + "x" * 70_000, "larger than 65,536 bytes"),
        ("a.yaml", "task: graph\nmodel: 5", "model is 5, but a section must contain keys and values"),
        ("a.yaml", "task: graph\nmodel: [1]", "model is [1], but a section must contain keys and values"),
        ("a.yaml", "task: graph\ndata: text", 'data is "text", but a section must contain keys and values'),
        ("a.yaml", "task: sft\ntraining: text", 'training is "text", but a section must contain keys and values'),
    ],
)
def test_invalid_values_are_refused(name: str, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(text, encoding="utf-8")
    assert words in refusal([name], capsys)


def test_pipes_and_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe.yaml")
    os.symlink("/dev/zero", "zero.toml")
    for name in ("pipe.yaml", "zero.toml"):
        assert "pass a regular file" in refusal([name], capsys)


def test_a_name_that_no_file_can_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "File name too long" in refusal(["x" * 300 + ".yaml"], capsys)


def test_expanding_aliases_takes_little_memory(tmp_path: Path) -> None:
    """Measures a new process, because the peak memory of this one includes earlier tests."""
    (tmp_path / "a.yaml").write_text(MULTIPLYING_MERGES)
    code = (
        "import resource, pathlib\nfrom sansgpu.config import load_config, ConfigError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load_config(pathlib.Path('a.yaml'))\n"
        "except ConfigError: print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < MOST_BYTES


@pytest.mark.parametrize("setting", ["model.d_model=" + "9" * 400, "training.max_steps=" + "9" * 30])
def test_an_override_has_the_same_limits_as_a_file(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "integer of more than 64 bits" in refusal(["--set", setting], capsys)
    assert len(refusal(["--set", "data.dataset_name=" + "[" * 500, "--set", "model.d_model=x"], capsys)) < 600
    assert "at most 32 parts" in refusal(["--set", ".".join(["a"] * 5000) + "=1"], capsys)


def test_a_message_stays_short_whatever_the_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    Path("keys.yaml").write_text("".join(f"k{number}: 1\n" for number in range(2000)))
    words = refusal(["keys.yaml"], capsys)
    assert "unknown keys: k0, k1, " in words
    assert "k39 (known keys: " in words
    assert "; and 1,960 more" in words
    Path("long.yaml").write_text("model: {d_model: '" + "x" * 30_000 + "'}")
    assert "x" * 199 in (words := refusal(["long.yaml"], capsys))
    assert "x" * 201 not in words
    Path("names.yaml").write_text("? " + "y" * 1000 + "\n: 1")
    assert "y" * 201 not in refusal(["names.yaml"], capsys)


def test_a_section_without_keys_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """YAML reads a section whose keys are all commented out as null; the top-level device still applies."""
    Path("corpus.txt").write_text("one two three four five six seven eight nine ten " * 2000)
    Path("a.yaml").write_text("device: cpu\nmodel:\ntraining:\n  # seed: 3\ndata: {dataset_name: corpus.txt}\n")
    assert cli(["train", "a.yaml", "--dry-run", "--set", "training.max_steps=2", "--set", "data.vocab_size=300"]) == 0
    assert "device: cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "model:\n  d_model: 64\n  d_model: 32\n", "is duplicated"),
        ("a.yaml", "model: [", "cannot be parsed"),
        ("a.yaml", "- a\n- b\n", "contains a value of type list"),
        ("a.yaml", "1: 2\n", "is not a string"),
        ("a.toml", "x = ", "cannot be parsed"),
        ("a.toml", "[model]\nd_model = 64\nd_model = 32\n", "cannot be parsed"),
        ("a.json", "{", "cannot be parsed"),
        ("a.json", '{"model": {"d_model": 64, "d_model": 32}}', "is duplicated"),
        ("a.txt", "", "an unknown file type"),
        (
            "a.yaml",
            "device: cpu\ntraining:\n  device: cuda\n",
            "device has different values at the top level and in training",
        ),
        ("a.yaml", "model: !!python/object/apply:os.system ['true']\n", "cannot be parsed"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        load_config(tmp_path / name)
    assert name in str(error.value)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


def test_bytes_that_are_no_text_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"a\.yaml cannot be read"):
        load_config(tmp_path / "a.yaml")
