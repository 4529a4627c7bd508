"""Preferences tokenized as task preference does."""

from __future__ import annotations

from sansgpu.config import Config
from tests.tasks.folders import model_folder

PROMPT = [{"role": "user", "content": "Name a color."}]
GOOD, BAD = "Red, as a fox.", "No."


def config(architecture: str = "qwen2", **preference: object) -> Config:
    model = {"name_or_path": str(model_folder(architecture))}
    values = {"task": "preference", "model": model, "data": {"dataset_name": "rows"}}
    return Config.model_validate({**values, "training": {"preference": preference}})
