"""Records what short runs of every kind produce, to show that a refactoring changed nothing.

    python -m tools.reference_runs record FILE.json
    python -m tools.reference_runs compare FILE.json

Each run trains for 16 steps on the CPU with two snapshots and then resumes from the first one. The record holds the
SHA-256 of every safetensors file and of metrics.jsonl without measured times, and what `plan`, `eval`, `generate`,
`extract` and `predict` print. `compare` records again, lists what differs, and exits with 1 if anything does. Both must
run on the same kind of machine, because results depend on the instruction set. If a key of a result was renamed, add it
to `RENAMED_KEYS`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import say

from tools.chaos_kinds import Kind, make_kinds
from tools.outcome import file_digests, record

RENAMED_KEYS: dict[str, str] = {}  # old key of a JSON result -> its current name
SAVE_STEPS = 8
# Keys of `plan --json` that do not depend on the machine's state. `memory_bytes` does, but only in MEASURED_MEMORY.
PLANNED = (
    "parameters", "parameters_by_part", "batch_size", "gradient_accumulation_steps", "window", "precision", "optimizer",
    "tokens_per_step", "train_tokens", "total_steps", "total_tokens", "epochs",
)  # fmt: skip
MEASURED_MEMORY = ("overhead", "total")
QUESTION = ("--question", "Which colour has fox3?", "--context", "red blue. The fox3 is brown. old new")

Results = dict[str, Any]


def results_of(kind: Kind, run: Path) -> Results:
    """Trains a run, resumes it from its first snapshot and returns everything that must not change."""
    train = [*kind.command(run, resume=False), "--set", f"training.save_steps={SAVE_STEPS}"]
    _sansgpu(*train)
    results: Results = {"trained": _digests(run)}
    _sansgpu(*train, "--resume", str(SAVE_STEPS))
    results |= {"resumed": _digests(run), "eval": _measured_out(_json("eval", str(run), "--json"))}
    plan = _json("plan", str(run / "config.yaml"), "--json")
    memory = {key: value for key, value in plan["memory_bytes"].items() if key not in MEASURED_MEMORY}
    results["plan"] = {"memory_bytes": memory, **{key: plan[key] for key in PLANNED}}
    match kind.settings.get("task", "pretrain"):
        case "pretrain" | "sft":
            asked = ("--prompt", "red blue", "--max-new-tokens", "12", "--seed", "3")
            results["generate"] = _sansgpu("generate", str(run), *asked)
        case "qa":
            results["predict"] = _json("predict", str(run), *QUESTION, "--json")
        case "classify" | "tokens":
            results["predict"] = _json("predict", str(run), "--text", "a red fox", "--json")
        case "graph" if kind.settings.get("model.leaves") != 0:
            results["extract"] = _sansgpu("extract", str(run), "--text", "the red one", "--head", "red", "--top", "2")
    return results


def _digests(run: Path) -> dict[str, str]:
    events = [{k: v for k, v in event.items() if k != "message"} for event in record(run)]  # messages may be reworded
    canonical = json.dumps(events, sort_keys=True).encode()
    found = {
        f"{part}/{name}": digest for part in ("snapshots", "final") for name, digest in _weights(run / part).items()
    }
    return {"metrics.jsonl": hashlib.sha256(canonical).hexdigest(), **found}


def _weights(folder: Path) -> dict[str, str]:
    digests = file_digests(folder, "*.safetensors")
    return {name: digest for name, digest in digests.items() if not name.startswith("abandoned-")}


def _measured_out(value: Results) -> Results:
    return {key: item for key, item in value.items() if key not in ("seconds", "time")}


def _json(*arguments: str) -> Results:
    value: Results = json.loads(_sansgpu(*arguments))
    return value


def _sansgpu(*arguments: str) -> str:
    """Returns the standard output of the command. If it fails, exits with its message."""
    command = [sys.executable, "-m", "sansgpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"reference_runs: sansgpu {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def record_all(kinds: Sequence[str]) -> dict[str, Results]:
    """Returns the results of every kind whose name contains one of `kinds`, or of all kinds if it is empty."""
    found: dict[str, Results] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-reference-") as folder:
        for number, kind in enumerate(make_kinds(Path(folder))):
            if not kinds or any(part in kind.name for part in kinds):
                found[kind.name] = results_of(kind, Path(folder) / f"run-{number}")
                say(kind.name)
    return found


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Returns the key paths at which two recorded values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        before = {RENAMED_KEYS.get(key, key): value for key, value in before.items()}
        keys = dict.fromkeys((*before, *after))
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{place}/{key}")]
    return [] if before == after else [f"{place}: {before!r} is now {after!r}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Records to the file, or compares with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", default="", help="only kinds whose name contains one of these, separated by commas")
    asked = parser.parse_args(arguments)
    found = record_all([part for part in asked.kinds.split(",") if part])
    if asked.action == "record":
        asked.file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return
    recorded = json.loads(asked.file.read_text(encoding="utf-8"))
    lines = differences({name: recorded.get(name) for name in found}, json.loads(json.dumps(found)))
    print("\n".join(lines) or f"{len(found)} kinds of runs are unchanged")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
