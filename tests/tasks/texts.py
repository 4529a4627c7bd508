"""Training rows and settings for the tests of embedding models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.processes import overrides, write_rows
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import sentence


def text_rows(path: Path, form: str, count: int = 60, seed: int = 0) -> Path:
    """Writes random rows of a form: "scores", "labels", "pairs", or "triplets" with one to three negatives."""
    draw = random.Random(seed)

    def row(number: int) -> dict[str, Any]:
        anchor = f"{sentence(draw, draw.randint(2, 9))} {number}"
        other = f"{number} {sentence(draw, draw.randint(2, 20))}"
        negatives = [sentence(draw, draw.randint(1, 12)) for _ in range(draw.randint(1, 3))]
        if form == "scores":
            return {"sentence1": anchor, "sentence2": other, "score": draw.randint(0, 50) / 10}
        if form == "labels":
            return {"text": anchor, "label": ("old", "new", "red")[number % 3]}
        more = {} if form == "pairs" else {"negative": negatives if number % 2 else negatives[0]}
        return {"anchor": anchor, "positive": other, **more}

    return write_rows(path, map(row, range(count)))


def embed_settings(model: Path, rows: Path, **changes: object) -> list[str]:
    """Returns the settings of a tiny run of task embed."""
    own = {"task": "embed", "model.name_or_path": model, "data.dataset_name": rows, "data.max_length": 24}
    return overrides(TINY, own, changes)
