"""Evaluates a trained model on the held-out data of a configuration, with sansgpu's metrics and in its precision.

    python -m benchmarks.fine_tuning.score FOLDER KEY=VALUE ...

Pass the settings of the training run; FOLDER replaces `model.name_or_path`. Prints the eval event as a JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import load_config
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks.registry import task_of
from sansgpu.train.evaluate import evaluate


def main() -> None:
    folder, *overrides = sys.argv[1:]
    config, _ = load_config(None, [*overrides, f"model.name_or_path={folder}"])
    task_class: Any = task_of(config)
    torch.set_num_threads(int(config.training.threads))
    with tempfile.TemporaryDirectory() as cache:
        config, corpus = task_class.prepare(config, Path(cache), lambda *_: None)
        task = task_class(config, corpus, effective_batch(config.training))
        execution = Execution(task_class.evaluation_batch(config), precision=str(config.training.precision))
        metrics = evaluate(task.evaluator, execution)
    print(json.dumps({"event": "eval", **(metrics or {})}), flush=True)


if __name__ == "__main__":
    main()
