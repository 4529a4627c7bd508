"""Every command works where no home folder can be written, as in containers and batch jobs, and says so once."""

import os
from pathlib import Path

import pytest

from tests.processes import Fork, ended, settings, start

NOWHERE = "/proc/none"  # nobody can create it, not even root
WARNING = f"warning: the cache {NOWHERE}/.cache/sansgpu cannot be written (No such file or directory), so "


def started(home: Path, *arguments: object, **variables: str) -> Fork:
    (home / "temporary").mkdir(exist_ok=True)
    homeless = {"SANSGPU_CACHE": "", "HOME": NOWHERE, "XDG_CACHE_HOME": "", "HF_HOME": NOWHERE}
    chosen = homeless | {"TMPDIR": str(home / "temporary")} | variables
    return start([*map(str, arguments)], home / "unused", **chosen)


def training(home: Path, run: str, *more: str) -> list[str]:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=4)
    return ["train", *chosen, "--output-dir", str(home / run), *more]


@pytest.mark.long
def test_commands_fall_back_to_one_folder_with_one_warning(home: Path) -> None:
    cache = home / f"temporary/sansgpu-{os.getuid()}"
    _, _, err = ended(started(home, *training(home, "run")))
    assert err.count(WARNING) == err.count(str(cache)) == 1, err
    assert oct(cache.stat().st_mode & 0o777) == "0o700"
    tokens = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    assert tokens
    commands = {
        "resumed": ["train", "--resume", "--output-dir", home / "run", "--set", "training.max_steps=5"],
        "evaluated": ["eval", home / "run"],
        "planned": ["plan", *training(home, "run")[1:-2]],
        "tokenized": ["tokenizer", "train", home / "corpus.jsonl", "--vocab-size", 280, "--output", home / "tokens"],
    }
    processes = {name: started(home, *command) for name, command in commands.items()}
    for name, process in processes.items():
        code, _, err = ended(process)
        assert (code, err.count(WARNING)) == (0, 1), (name, err)
    assert tokens == {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin") if path in tokens}  # used again
    code, _, err = ended(started(home, "generate", home / "run", "--prompt", "the", "--max-new-tokens", 2))
    assert (code, "warning" in err) == (0, False)  # needs no cache


def test_other_folders_are_not_replaced(home: Path) -> None:
    """A chosen cache is used or refused, and a folder that others may have prepared is left alone."""
    code, _, err = ended(started(home, *training(home, "chosen"), SANSGPU_CACHE=f"{NOWHERE}/cache"))
    assert code == 2
    assert f"the cache {NOWHERE}/cache/" in err
    (home / "open").mkdir()
    (home / f"open/sansgpu-{os.getuid()}").symlink_to(home / "temporary")
    code, _, err = ended(started(home, *training(home, "open-run"), TMPDIR=str(home / "open")))
    assert code == 0, err
    assert f"so {home}/open/sansgpu-compiled-" in err
    code, _, err = ended(started(home, *training(home, "xdg"), XDG_CACHE_HOME=f"{NOWHERE}/xdg", HOME=str(home)))
    assert (code, err.count(f"the cache {NOWHERE}/xdg/sansgpu cannot be written")) == (0, 1)
