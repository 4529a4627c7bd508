"""Reward functions are code of the user, which may do anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import digests, ended, events_of, finish, messages, options, start_apart
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import model_folder, prompt_rows

OWN = "tests.tasks.grpo.rewards:"
SMALL = {
    **TINY, "task": "grpo", "training.batch_size": 8, "training.grpo.group_size": 4, "training.eval_steps": 0,
    "training.grpo.max_completion_length": 8, "training.max_steps": 2,
}  # fmt: skip


def fill(home: Path) -> None:
    prompt_rows(home / "prompts.jsonl")


def arguments(home: Path, run: Path, reward: str, **changes: object) -> list[str]:
    own = {"data.dataset_name": home / "prompts.jsonl", "model.name_or_path": model_folder("qwen2")}
    return ["train", *options(SMALL, own, {"training.grpo.reward": OWN + reward, **changes}), "--output-dir", str(run)]


@pytest.mark.long
def test_a_reward_may_be_a_coroutine_and_cannot_change_the_state_of_training(home: Path) -> None:
    weights = []
    for reward in ("low_ids", "waiting", "meddling"):
        code, _, error = finish(arguments(home, home / reward, reward), home / "cache")
        assert code == 0, error
        weights.append(digests(home / reward / "final"))
    assert weights[1:] == weights[:1] * 2


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("leaving", "rewards:leaving failed with SystemExit: os._exit(0) was called in"),
        ("leaving_in_a_thread", "os._exit(0) was called in"),
        ("exiting_later", "rewards:exiting_later failed with SystemExit: 0"),
    ],
)
def test_a_reward_cannot_end_the_command_as_if_it_were_done(home: Path, reward: str, words: str) -> None:
    code, _, error = finish(arguments(home, home / reward, reward), home / "cache")
    assert code == 1, error
    assert words in messages(error)[-1]
    assert not (home / reward / "final").exists()


@pytest.mark.long
def test_equal_rewards_are_reported_and_an_endless_thread_does_not_keep_the_process(home: Path) -> None:
    """One run shows both, because it needs a process of its own."""
    run = home / "constant"
    changes = {"training.max_steps": 12, "training.save_steps": 0, "training.grpo.max_completion_length": 2}
    process = start_apart(arguments(home, run, "constant", **changes), home / "cache")
    code, _, error = ended(process)
    assert code == 0, error
    assert (run / "final").is_dir()
    assert "thread endless did not end" in error
    (warning,) = [event for event in events_of(run, "warning") if event.get("cause") == "task"]
    assert warning["step"] == 10
    (first, *_) = events_of(run, "step")
    assert first["equal_rewards"] == 1.0
    if first["truncated"] == 1.0:
        assert "all were cut off after 2 tokens, before they ended. Raise" in warning["message"]
    else:
        assert "their mean reward is 0.25. Check what the reward function returns" in warning["message"]
