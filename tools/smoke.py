"""A smoke test that fine-tunes, saves, resumes and chats within a minute: `python -m tools.smoke [--keep FOLDER]`.

Uses a random model of Qwen2's architecture, or the model in SANSGPU_LIVE_MODEL, e.g. Qwen/Qwen2.5-0.5B-Instruct.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = [
    ("What colour is the sky?", "Blue."),
    ("Name a prime number.", "Seven."),
    ("Say hello.", "Hello!"),
    ("What does a baker bake?", "Bread."),
]
STEPS = 10


def sansgpu(*arguments: str) -> str:
    """Prints and runs a command and returns its stdout. Raises SystemExit if it fails."""
    print("$ sansgpu", *arguments, flush=True)
    process = subprocess.run([sys.executable, "-m", "sansgpu", *arguments], stdout=subprocess.PIPE, text=True)
    print(process.stdout.strip() or "(no text)", flush=True)  # a random model may answer with line breaks only
    if process.returncode:
        raise SystemExit(f"smoke: exit code {process.returncode}")
    return process.stdout


def smoke(folder: Path, model: str) -> None:
    """Trains ten steps in one run and in a resumed run, compares their final states, and chats with the model."""
    rows, config = folder / "rows.jsonl", folder / "smoke.yaml"
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS * 6), encoding="utf-8")
    config.write_text(
        json.dumps(
            {
                "task": "sft",
                "model": {"name_or_path": model, "adapter": "lora", "lora_rank": 8, "lora_dropout": 0.05},
                "training": {
                    "batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": STEPS, "save_steps": 5,
                    "eval_steps": 5, "logging_steps": 1, "report_to": "none", "warmup_steps": 2,
                },
                "data": {"dataset_name": str(rows), "validation_split": 0.2, "max_length": 256},
            },
            indent=2,
        ),
        encoding="utf-8",
    )  # fmt: skip
    straight, resumed = folder / "straight", folder / "resumed"
    sansgpu("train", str(config), "--output-dir", str(straight), "--dry-run")
    sansgpu("train", str(config), "--output-dir", str(straight))
    sansgpu("snapshots", "fork", str(straight), "--snapshot", "5", "--output-dir", str(resumed))
    sansgpu("train", "--resume", "--output-dir", str(resumed))
    ids = [json.loads(sansgpu("snapshots", "show", str(run), "--json"))["content_id"] for run in (straight, resumed)]
    if ids[0] != ids[1]:
        raise SystemExit(f"smoke: the resumed run ended in a different state: {ids[1]} instead of {ids[0]}")
    print("The resumed run ended in the same state:", ids[0])
    sansgpu("eval", str(straight), "--json")
    for question, _ in ROWS[:2]:
        sansgpu("chat", str(straight), "--prompt", question, "--max-new-tokens", "16", "--temperature", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="work in this folder and do not delete it")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="sansgpu-smoke-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = os.environ.get("SANSGPU_LIVE_MODEL")
        if not model:
            from tools.tiny_model import make_folder

            model = str(make_folder(folder / "model").absolute())
        smoke(folder, model)


if __name__ == "__main__":
    main()
