"""Examples that begin with the same tokens share the computation of their beginning, in runs and in plans."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sansgpu.config.schema import Config
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.shared_prefixes import common_length
from sansgpu.planning.resolve import resolve_run
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.sft.task import SFT
from tests.processes import digests, events_of, finish, kill_when, start, use_cache, write_rows
from tests.tasks.fine_tuned import made, settings
from tests.tasks.folders import sentence as words

NAMES = ("system", "user", "assistant")


def conversations(path: Path, count: int = 24, systems: int = 1) -> Path:
    """Writes conversations, each with one of a few long system prompts."""
    draw = random.Random(0)
    prompts = [words(draw, 16) for _ in range(systems)]
    contents = [(prompts[number % systems], words(draw, 4), words(draw, 5)) for number in range(count)]
    return write_rows(
        path,
        [
            {"messages": [{"role": role, "content": text} for role, text in zip(NAMES, texts, strict=True)]}
            for texts in contents
        ],
    )


def config_of(home: Path, rows: Path, **changes: Any) -> Config:
    arguments = settings(home, data__dataset_name=rows, **changes)
    return load_config(None, [item for item in arguments if item != "--set"])[0]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path / "cache")


def test_a_run_shares_system_prompts_without_another_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, losses, evaluations = conversations(tmp_path / "rows.jsonl", systems=2), [], []
    for name, is_shared in (("shared", True), ("separate", False)):
        if not is_shared:
            monkeypatch.setattr(UnpaddedModel, "shares", property(lambda _: False, lambda *_: None), raising=False)
        run = made(tmp_path, name, data__dataset_name=rows, training__batch_size=4)
        steps = events_of(run, "step")
        shares = [step.get("shared_tokens", 0.0) for step in steps]
        assert all(share > 0.3 for share in shares) if is_shared else not any(shares)
        losses.append([step["loss"] for step in steps])
        evaluations.append([event["loss"] for event in events_of(run, "eval")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)


def test_sorting_by_beginnings_changes_only_the_order_of_a_batch(tmp_path: Path) -> None:
    rows = conversations(tmp_path / "rows.jsonl", systems=3)
    config, corpus = SFT.prepare(config_of(tmp_path, rows), tmp_path, lambda *_: None)
    task = SFT(config, corpus, 12)
    batch: Any = task.batch(3)
    shared = list(batch.tokens.split(batch.lengths.tolist()))
    task.objective.unpadded.shares = False
    plain: Any = task.batch(3)
    separate = list(plain.tokens.split(plain.lengths.tolist()))
    assert sorted(map(torch.Tensor.tolist, shared)) == sorted(map(torch.Tensor.tolist, separate))
    assert [ids.tolist() for ids in shared] == sorted(ids.tolist() for ids in shared)
    assert batch.target_count() == plain.target_count()
    assert sorted(np.asarray(batch.numbers).tolist()) == sorted(np.asarray(plain.numbers).tolist())


@pytest.mark.long
def test_a_killed_run_with_shared_beginnings_continues_byte_for_byte(tmp_path: Path) -> None:
    rows = conversations(tmp_path / "rows.jsonl")
    chosen = settings(tmp_path, data__dataset_name=rows, training__max_steps=8)
    first, killed = (["train", *chosen, "--output-dir", str(tmp_path / name)] for name in "ab")
    code, _, error = finish(first, tmp_path / "cache")
    assert code == 0, error
    snapshot = tmp_path / "b/snapshots/step-000004"
    assert kill_when(start(killed, tmp_path / "cache"), snapshot.exists) == -9
    code, _, error = finish([*killed, "--resume", "latest"], tmp_path / "cache")
    assert code == 0, error
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize("systems", [1, 64])
def test_a_plan_counts_what_is_computed(tmp_path: Path, systems: int) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 64, systems)
    config = config_of(tmp_path, rows, training__batch_size=16, training__gradient_accumulation_steps=1)
    run = resolve_run(config, lambda *_: None, lambda _: None)
    sequences = [run.corpus.train.sequence(number).tolist() for number in range(len(run.corpus.train))]
    common = min(common_length(sequences[0], other) for other in sequences[1:])
    assert run.shared_tokens == pytest.approx(common * 15 / 16, abs=3)
    assert (common > 40) == (systems == 1)
    assert run.computed_per_step == run.tokens_per_step - 16 * run.shared_tokens
