"""Measures how long training waits for a snapshot, and how long it takes until the snapshot is complete on disk.

    python -m benchmarks.speed.snapshot_delay --parameters 100e6 --json delay.json

`blocked` is the time that the training loop waits, `written` is the time from then until the snapshot is complete, and
`work` is the slowdown of matrix products while it is written (1.0: none).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sansgpu.config import ModelConfig
from sansgpu.machine.allocator import keep_freed_memory
from sansgpu.models import TransformerLM
from sansgpu.train.writer import SnapshotWriter

VOCABULARY, LAYERS, SAVES = 32_000, 12, 4
Tensors = dict[str, torch.Tensor]
Row = dict[str, str | float]


def state_of(parameters: float) -> tuple[Tensors, Tensors]:
    """Returns the weights and AdamW moments of a decoder with about `parameters` parameters."""
    shapes = [
        ModelConfig(d_model=width, n_heads=width // 32, n_layers=LAYERS, d_ff=4 * width, vocab_size=VOCABULARY)
        for width in range(32, 2049, 32)
    ]
    weights = TransformerLM(min(shapes, key=lambda shape: abs(size_of(shape) - parameters))).state_dict()
    moments = {f"{kind}.{k}": torch.rand_like(w) for kind in ("exp_avg", "exp_avg_sq") for k, w in weights.items()}
    return weights, moments


def size_of(shape: ModelConfig) -> int:
    """Returns the number of parameters of a decoder."""
    return sum(p.numel() for p in TransformerLM(shape, seed=None).parameters())


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def matmuls() -> None:
    """Computes matrix products, the main work of a step, for about half a second."""
    left = torch.ones(2048, 2048)
    for _ in range(6):
        left @ left


def measure(weights: Tensors, moments: Tensors, folder: Path, room: int | None) -> list[Row]:
    """Returns a row per save. `room` is the available memory in bytes; if it is 0, no copy is made."""
    more: dict[str, Callable[[], int]] = {} if room is None else {"room": lambda: room}
    writer = SnapshotWriter(folder / "snapshots", 1, folder / "metrics.jsonl", lambda message: None, **more)
    way = "from a copy, in the background" if room is None else "while training waits"
    prepare = seconds_of(lambda: writer.reserve_copies(weights, moments))
    writer.wait()  # until the copy's memory is allocated, as a run does in the background before its first save
    alone = [seconds_of(matmuls) for _ in range(9)][1:]
    rows: list[Row] = []
    for save in range(1, SAVES + 1):
        blocked = seconds_of(partial(writer.submit, save, weights, moments, {}, None))
        start, concurrent = time.perf_counter(), []
        while writer.busy:
            concurrent.append(seconds_of(matmuls))
        writer.wait()
        written = time.perf_counter() - start if room is None else 0.0
        slower = (sum(concurrent) / len(concurrent)) / sorted(alone)[len(alone) // 2] if concurrent else 1.0
        rows.append({"way": way, "save": save, "blocked": blocked, "written": written, "work": slower})
    rows[0]["blocked"] = float(rows[0]["blocked"]) + prepare
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    weights, moments = state_of(arguments.parameters)
    parameters = sum(w.numel() for w in weights.values())
    size = sum(t.nbytes for t in (*weights.values(), *moments.values()))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        rows = [r for room in (None, 0) for r in measure(weights, moments, Path(scratch) / str(room), room)]
    print(f"{parameters / 1e6:.1f}M parameters, {size / 1e9:.2f} GB per snapshot, {torch.get_num_threads()} threads")
    print(f"{'way':30}{'save':>5}{'blocked s':>11}{'written s':>11}{'work':>7}")
    for row in rows:
        print(f"{row['way']:30}{row['save']:>5}{row['blocked']:>11.3f}{row['written']:>11.2f}{row['work']:>7.2f}")
    if arguments.json:
        facts = {"parameters": parameters, "bytes": size, "threads": torch.get_num_threads(), "saves": rows}
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
