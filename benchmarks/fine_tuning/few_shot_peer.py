"""Trains and tests SetFit with its default settings, in the Python environment that contains it.

    python -m benchmarks.fine_tuning.few_shot_peer JOB

Prints one JSON line with the accuracy. Does not import sansgpu, which that environment may lack.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    import torch
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments  # type: ignore[import-not-found]

    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    model = SetFitModel.from_pretrained(job["model"])
    train, test = (
        [json.loads(line) for line in Path(job[key]).read_text(encoding="utf-8").split("\n") if line]
        for key in ("train", "test")
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, seed=job["seed"], show_progress_bar=False, report_to="none")
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(train))
        trainer.train()
    found = model.predict([row["text"] for row in test], use_labels=True)
    right = sum(str(label) == row["label"] for label, row in zip(found, test, strict=True))
    print(json.dumps({"event": "result", "accuracy": right / len(test)}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
