"""Task preference: losses, shared prompts, the cached reference and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from sansgpu.cli import run as cli
from sansgpu.tasks.preference.batch import PreferenceExamples, with_other_answers
from sansgpu.tasks.preference.losses import Scores, kl_divergence, kto_losses, pair_losses
from sansgpu.tasks.preference.objective import PreferenceObjective
from sansgpu.tasks.preference.rows import Answers
from sansgpu.tasks.preference.settings import PreferenceConfig
from tests.processes import Captured, digests, events_of, finish, kill_when, options, start
from tests.tasks.fine_tuned import TINY, sentence, settings
from tests.tasks.folders import model_folder, preference_rows
from tests.tasks.preference.preference_rows import config


def formulas(policy: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Computes the papers' losses with TRL's formulas: beta 0.3, gamma 0.5 and, for DPO, label smoothing 0.1."""
    beta, (chosen, rejected) = 0.3, (policy - reference).unbind(1)
    mean, (mean_chosen, mean_rejected) = policy / counts, ((policy - reference) / counts).unbind(1)
    odds = mean[:, 0] - mean[:, 1] - (torch.log1p(-mean[:, 0].exp()) - torch.log1p(-mean[:, 1].exp()))
    logits = beta * (chosen - rejected)
    return {
        "dpo": -logsigmoid(logits) * 0.9 - logsigmoid(-logits) * 0.1,
        "dpo_norm": -logsigmoid(beta * (mean_chosen - mean_rejected)),
        "ipo": (mean_chosen - mean_rejected - 1 / (2 * beta)) ** 2,
        "simpo": -logsigmoid(beta * (mean[:, 0] - mean[:, 1] - 0.5 / beta)),
        "orpo": -mean[:, 0] - beta * logsigmoid(odds),
    }


def test_losses_match_the_papers() -> None:
    draw = torch.Generator().manual_seed(0)
    policy, reference = (-30 * torch.rand(8, 2, generator=draw, dtype=torch.float64) - 1 for _ in range(2))
    counts = torch.randint(1, 20, (8, 2), generator=draw)
    more: dict[str, dict[str, Any]] = {"dpo": {"label_smoothing": 0.1}, "simpo": {"gamma": 0.5}}
    scores = Scores(policy, reference, counts)
    for loss, expected in formulas(policy, reference, counts).items():
        settings = PreferenceConfig.model_validate({"loss": loss, "beta": 0.3, **more.get(loss, {})})
        torch.testing.assert_close(pair_losses(settings, scores)[0], expected, msg=loss)
    is_good, kl = torch.arange(8) % 3 > 0, (policy - reference)[:, 1].mean().clamp(min=0)
    settings = PreferenceConfig(loss="kto", beta=0.3, undesirable_weight=2.0)
    assert kl_divergence(scores) == kl
    ratio = (policy - reference)[:, 0]
    good, bad = 1 - torch.sigmoid(0.3 * (ratio - kl)), 2 * (1 - torch.sigmoid(0.3 * (kl - ratio)))
    torch.testing.assert_close(kto_losses(settings, scores, is_good, kl)[0], torch.where(is_good, good, bad))


def random_answers() -> PreferenceExamples:
    draw = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return draw.integers(0, 900, count).astype(np.int32)

    sizes = [(9, 4, 7), (1, 1, 3), (30, 2, 1), (17, 40, 5)]
    found = [Answers(ids(p), (ids(c), ids(r)), (np.ones(c, np.bool_), np.ones(r, np.bool_))) for p, c, r in sizes]
    found[3].learned[0][5:9] = False  # a user turn between two assistant turns
    return PreferenceExamples(found)


@pytest.mark.parametrize(
    ("architecture", "shares"),
    [("llama", True), *(pytest.param(name, True, marks=pytest.mark.long) for name in ("qwen3", "gpt2", "mistral"))],
)
def test_shared_prompts_change_neither_log_probabilities_nor_gradients(architecture: str, shares: bool) -> None:
    objective, examples = PreferenceObjective(config(architecture)), random_answers()
    batch = examples.batch(np.arange(4))
    assert objective.unpadded.shares == shares
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder(architecture), dtype=torch.float32)
    expected = torch.empty(4, 2, dtype=torch.float64)
    with torch.no_grad():
        for number, example in enumerate(examples.examples):
            for answer, (ids, learned) in enumerate(zip(example.ids, example.learned, strict=True)):
                whole = torch.from_numpy(np.concatenate([example.prompt, ids]).astype(np.int64))
                found = torch.log_softmax(plain(whole[None]).logits[0, :-1].double(), 1).gather(1, whole[1:, None])[
                    :, 0
                ]
                expected[number, answer] = found[len(example.prompt) - 1 :][torch.from_numpy(learned)].sum()
    results = []
    for is_shared in dict.fromkeys((shares, False)):
        objective.unpadded.shares = is_shared
        objective.model.zero_grad()
        found = objective.log_probabilities(batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        (found * torch.tensor([[1.0, -2.0]])).sum().backward()
        gradients = {name: p.grad for name, p in objective.model.named_parameters() if p.grad is not None}
        results.append({name: grad.to_dense() if grad.is_sparse else grad for name, grad in gradients.items()})
    for name, gradient in results[0].items():
        error = (gradient - results[-1][name]).abs().max() / (gradient.abs().max() + 1e-6)
        assert error < 1e-4, name


def test_batches_are_cut_between_examples() -> None:
    part = random_answers()
    whole = part.batch(np.arange(4))
    pieces = [whole.rows(0, 1), whole.rows(1, 3), whole.rows(3, 4)]
    joined = type(whole).joined(pieces)
    assert all(torch.equal(getattr(joined, name), getattr(whole, name)) for name in whole.__dict__)
    assert whole.target_tokens().tolist() == [[4, 7], [1, 3], [2, 1], [36, 5]]
    empty = whole.without_targets(2)
    assert (len(empty), empty.target_count(), whole.target_count()) == (1, 0, 4)
    rated = [Answers(e.prompt, e.ids[:1], e.learned[:1], number != 2) for number, e in enumerate(part.examples)]
    mixed = with_other_answers(rated, max_length=20)
    assert [len(one.ids[1]) for one in mixed] == [1, 19, 1, 2]  # those of the next example, truncated to max_length


def arguments(home: Path, run: Path, rows: Path, **changes: object) -> list[str]:
    own = {
        **TINY, "task": "preference", "model.name_or_path": model_folder("qwen2"), "data.dataset_name": rows,
        "data.validation_split": 0.25, "training.gradient_accumulation_steps": 4, "training.max_steps": 12,
        "data.cache_dir": home / "cache", "training.save_steps": 0, "training.eval_steps": 0,
    }  # fmt: skip
    return ["train", *options(own, changes), "--output-dir", str(run)]


@pytest.mark.parametrize(
    ("loss", "rated", "more"),
    [
        ("dpo", False, {"model__adapter": "lora"}),
        ("kto", True, {}),
        pytest.param("orpo", False, {}, marks=pytest.mark.long),
        pytest.param("kto", False, {}, marks=pytest.mark.long),
    ],
)
def test_a_run_learns_to_prefer_and_is_evaluated_as_in_training(
    loss: str, rated: bool, more: dict[str, object], tmp_path: Path, capsys: Captured
) -> None:
    rows, run = preference_rows(tmp_path / "rows.jsonl", rated=rated), tmp_path / "run"
    chosen = arguments(tmp_path, run, rows, training__preference__loss=loss, training__learning_rate=0.02, **more)
    assert cli(chosen) == 0
    steps, last = events_of(run, "step"), events_of(run, "eval")[-1]
    assert steps[0]["margin"] == pytest.approx(0, abs=1e-4) if loss != "orpo" else "nll" in steps[0]
    assert last["margin"] > 0
    assert last["accuracy"] > 0.5
    assert ("kl" in last) == (loss == "kto")
    capsys.readouterr()
    assert cli(["eval", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for key in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward"):
        assert again[key] == pytest.approx(last[key], rel=1e-4, abs=1e-4), key
    assert cli(["eval", str(run), "--data", str(rows), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == (48 if loss == "kto" and not rated else 24)
    assert cli(["chat", str(run), "--prompt", "warm", "--max-new-tokens", "2"]) == 0


def test_the_reference_is_computed_once_and_a_damaged_one_is_reported(tmp_path: Path, capsys: Captured) -> None:
    rows = preference_rows(tmp_path / "rows.jsonl", 80)
    chosen: dict[str, object] = {"training__max_steps": 1, "training__precision": "bf16"}
    assert cli(arguments(tmp_path, tmp_path / "one", rows, **chosen)) == 0
    # Policy and reference use the same rounded weights, so their margin is 0 before the first update.
    assert events_of(tmp_path / "one", "step")[0]["margin"] == pytest.approx(0, abs=1e-6)
    files = sorted((tmp_path / "cache/reference").glob("*/log_probabilities.npy"))
    times = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 2  # training and validation rows
    files[0].parent.rename(tmp_path / "lost")
    assert cli(arguments(tmp_path, tmp_path / "two", rows, **chosen, model__adapter="lora")) == 0
    assert files[1].stat().st_mtime_ns == times[1]  # only what is missing is computed again
    assert files[0].read_bytes() == (tmp_path / "lost" / files[0].name).read_bytes()
    files[0].write_bytes(files[0].read_bytes()[:-8])
    capsys.readouterr()
    assert cli(arguments(tmp_path, tmp_path / "three", rows, **chosen)) == 2
    assert f"the cached log-probabilities in {files[0].parent} are damaged; delete that folder" in sentence(capsys)


@pytest.mark.long
def test_a_run_killed_while_it_computes_the_reference_is_repeated_byte_for_byte(tmp_path: Path) -> None:
    rows = preference_rows(tmp_path / "pairs.jsonl", 400)
    chosen = settings(tmp_path, task="preference", data__dataset_name=rows, model__name_or_path=model_folder("qwen2"))
    first, killed = (["train", *chosen, "--output-dir", str(tmp_path / name)] for name in "ab")
    code, _, error = finish(first, tmp_path / "cache-a")
    assert code == 0, error
    reference = tmp_path / "cache-b/reference"
    assert kill_when(start(killed, tmp_path / "cache-b"), lambda: any(reference.glob("*/*.npy"))) == -9
    assert not (tmp_path / "b/snapshots/step-000002").exists()
    code, _, error = finish(killed, tmp_path / "cache-b")
    assert code == 0, error
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    card = (tmp_path / "a/final/README.md").read_text()
    assert "a decoder tuned on preferences between answers" in card
    assert "name: pairs.jsonl (validation split)" in card


@pytest.mark.long
def test_a_plan_includes_the_time_of_the_reference(tmp_path: Path, capsys: Captured) -> None:
    rows, hours = preference_rows(tmp_path / "rows.jsonl", 200), []
    for loss in ("dpo", "simpo"):
        own = arguments(tmp_path, tmp_path / loss, rows, training__preference__loss=loss, training__max_steps=2)
        capsys.readouterr()
        assert cli(["plan", *own[1:-2], "--json"]) == 0
        hours.append(json.loads(capsys.readouterr().out)["total_seconds"])
    assert hours[0] > hours[1]  # the plans share measured step times, and only dpo needs a reference
