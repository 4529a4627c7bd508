"""Folders that try to run code when they are read. Each successful attempt creates the file `canary`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import yaml

MODULE = "evil_objective"
REMOTE = "evil_model"


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._canary),)


def bomb(path: Path, canary: Path) -> None:
    """Writes a pickle that creates the canary when it is loaded."""
    path.write_bytes(pickle.dumps(Bomb(canary)))


def write_module(folder: Path, canary: Path) -> Path:
    """Writes a task module to a folder that is not in sys.path; importing it creates the canary."""
    folder.mkdir(exist_ok=True)
    (folder / f"{MODULE}.py").write_text(
        f"open({str(canary)!r}, 'w').close()\nfrom sansgpu.tasks.pretrain.task import *\n"
    )
    return folder


def with_code(model: Path, canary: Path) -> None:
    """Adds code to a Hugging Face folder that replaces transformers' classes; running it creates the canary."""
    (model / f"{REMOTE}.py").write_text(
        f"open({str(canary)!r}, 'w').close()\nfrom transformers import Qwen2Config as C, Qwen2ForCausalLM as M\n"
        "class EvilConfig(C): pass\nclass EvilModel(M): config_class = EvilConfig\n"
    )
    (model / "custom_generate").mkdir()
    shutil.copy(model / f"{REMOTE}.py", model / "custom_generate/generate.py")
    file = model / "config.json"
    classes = {"AutoConfig": f"{REMOTE}.EvilConfig"}
    classes |= {f"AutoModelFor{head}": f"{REMOTE}.EvilModel" for head in ("CausalLM", "QuestionAnswering", "MaskedLM")}
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": classes}))
    bomb(model / "optimizer.pt", canary)


def copied(run: Path, to: Path, canary: Path, **settings: Any) -> Path:
    """Copies a run, changes settings (e.g. `data__cache_dir`) in its config.yaml, and adds malicious pickles."""
    shutil.copytree(run, to)
    values = yaml.safe_load((to / "config.yaml").read_text())
    for key, value in settings.items():
        section, _, name = key.rpartition("__")
        (values[section] if section else values)[name] = value
    (to / "config.yaml").write_text(yaml.safe_dump(values))
    for folder in (to, to / "final", *(to / "snapshots").iterdir()):
        for name in ("optimizer.pt", "pytorch_model.bin", "training_args.bin", "state.pkl"):
            bomb(folder / name, canary)
    return to
