"""Tokenizing a large corpus takes bounded memory."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

GIGABYTE = 1_000_000_000
PROGRAM = """
import re, sys, time
from pathlib import Path
from sansgpu.config import Config, DataConfig
from sansgpu.machine.probe import limit_tokenizer_threads
from sansgpu.tasks.pretrain.task import Pretrain
limit_tokenizer_threads(2)
corpus, cache = sys.argv[1:]
started = time.monotonic()
_, prepared = Pretrain.prepare(Config(data=DataConfig(dataset_name=corpus)), Path(cache), lambda *_: None)
seconds = time.monotonic() - started
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # getrusage counts the parent's, too
print(int(peak[1]) * 1024, prepared.train_tokens, seconds)
"""


def write_gigabyte(folder: Path) -> None:
    """Writes a gigabyte: copies of the standard library's source that differ in one line per file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    size = copy = 0
    while size < GIGABYTE:
        with (folder / f"part-{copy:04d}.txt").open("w", encoding="utf-8") as out:
            for path in files:
                size += out.write(f"# copy {copy} of {path.name}\n{path.read_text(encoding='utf-8')}\n")
        copy += 1


@pytest.mark.long
def test_a_gigabyte_of_text_is_tokenized_in_bounded_memory(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_gigabyte(corpus)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(corpus), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        env={**os.environ, "SANSGPU_CACHE": str(tmp_path / "cache")},
        check=True,
    )
    peak, tokens, seconds = done.stdout.split()
    print(f"{int(peak) / 1e9:.2f} GB resident, {int(tokens):,} tokens, {GIGABYTE / 1e6 / float(seconds):.1f} MB/s")
    assert int(peak) < 1_500_000_000
    assert int(tokens) > 100_000_000
