"""Gradients reduced over ranks equal a plain float64 sum, at random shapes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.scale.launch import finish_forks


def drawn(seed: int) -> dict[str, Any]:
    """Draws a case whose parameters have from one element to more than a bucket. Some are unused by all ranks, by one
    rank, or in all micro-batches but the first.
    """
    draw = random.Random(seed)
    shapes = [[draw.randint(1, 40) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(2, 9))]
    if seed % 12 == 0:
        shapes.append([3, 2_500_000])  # larger than a bucket
    return {
        "seed": seed,
        "shapes": shapes,
        "unused": draw.sample(range(len(shapes)), draw.randint(0, len(shapes) // 2)),
        "skipped": draw.choice([None, *range(len(shapes))]),
        "early": draw.sample(range(len(shapes)), draw.randint(0, len(shapes) // 2)),
        "pieces": draw.randint(1, 3),
        "wire": draw.choice(["fp32", "bf16"]),
        "sharding": ("none", "optimizer", "full")[seed % 3],
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_and_sums_of_ranks(ranks: int, tmp_path: Path) -> None:
    cases = [drawn(seed) for seed in range(12)]
    code, out = finish_forks(ranks, [json.dumps(cases)], tmp_path, module="tests.scale.sums")
    assert code == 0, out
