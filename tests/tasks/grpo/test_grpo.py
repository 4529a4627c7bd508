"""Task grpo: the loss, completions, reward functions and runs."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sansgpu.cli import run as cli
from sansgpu.config import Config, ConfigError, DataConfig
from sansgpu.data.sources import open_sources
from sansgpu.machine.distributed.group import SINGLE_PROCESS
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.grpo.batch import Completions
from sansgpu.tasks.grpo.objective import GRPOObjective
from sansgpu.tasks.grpo.rewards import open_reward
from sansgpu.tasks.grpo.rows import read_prompts
from sansgpu.tasks.grpo.task import GRPO
from tests.processes import Captured, events_of, options
from tests.tasks.fine_tuned import TINY, made, sentence
from tests.tasks.folders import chat_rows, model_folder, prompt_rows

OWN = "tests.tasks.grpo.rewards:"
TRAINED = {
    **TINY, "task": "grpo", "training.batch_size": 8, "training.grpo.group_size": 4,
    "training.grpo.max_completion_length": 8, "training.grpo.reward": f"{OWN}low_ids",
}  # fmt: skip


def config(
    data: object = "rows", architecture: str = "qwen2", model: dict[str, Any] | None = None, **grpo: Any
) -> Config:
    grpo = {"max_completion_length": 8, "group_size": 2, "reward": f"{OWN}low_ids", **grpo}
    return Config.model_validate(
        {
            "task": "grpo",
            "model": {"name_or_path": str(model_folder(architecture)), **(model or {})},
            "data": {"dataset_name": str(data), "max_length": 96},
            "training": {"grpo": grpo, "gradient_accumulation_steps": 8},
        }
    )


def opened(tmp_path: Path, **grpo: Any) -> GRPO:
    chosen = config(prompt_rows(tmp_path / "prompts.jsonl"), **grpo)
    chosen, corpus = GRPO.prepare(chosen, tmp_path, lambda *_: None)
    return GRPO(chosen, corpus, 8)


def arguments(home: Path, run: Path, **changes: object) -> list[str]:
    data = home / "prompts.jsonl"
    if not data.exists():
        prompt_rows(data)
    own = {"data.dataset_name": data, "model.name_or_path": model_folder("qwen2")}
    return ["train", *options(TRAINED, own, changes), "--output-dir", str(run)]


def examples(vocabulary: int) -> tuple[list[np.ndarray], list[list[int]], torch.Tensor]:
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, vocabulary, size) for size in (5, 1, 9)]
    completions = [draws.integers(0, vocabulary, size).tolist() for size in (4, 7, 1)]
    return prompts, completions, torch.tensor([1.5, -0.5, 0.25])


@pytest.mark.parametrize(("temperature", "beta"), [(1.0, 0.0), (0.7, 0.0), (1.3, 0.4)])
def test_loss_and_gradient_are_those_of_the_formulas_in_float64(temperature: float, beta: float) -> None:
    adapter = {"adapter": "lora"} if beta else {}
    objective = GRPOObjective(config(model=adapter, temperature=temperature, beta=beta))
    model: Any = objective.model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # otherwise the model would equal its reference
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    prompts, completions, gains = examples(model.config.vocab_size)
    batch = Completions.with_advantages(prompts, completions, gains)
    loss = objective.loss(batch)
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {name: p.grad.double() for name, p in trained.items() if p.grad is not None}
    model.zero_grad()
    model.double()

    def log_probabilities(prompt: np.ndarray, ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt.tolist(), *ids]])
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1] / temperature
        return torch.log_softmax(logits, dim=1)[range(len(ids)), ids]

    expected, surrogate = 0.0, torch.zeros((), dtype=torch.float64)
    for prompt, ids, gain in zip(prompts, completions, gains.double(), strict=True):
        policy = log_probabilities(prompt, ids)
        expected -= float(gain) * len(ids)
        surrogate = surrogate - gain * policy.sum()  # its gradient is that of the ratio, which is 1
        if beta:
            with torch.no_grad(), objective._adapted.disable_adapter():
                reference = log_probabilities(prompt, ids)
            kl = torch.exp(reference - policy) - (reference - policy) - 1
            value = kl.detach()
            expected += beta * float(value.sum())
            surrogate = surrogate + beta * (kl + value * policy).sum()
    surrogate.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert len(found) > 5
    for name, gradient in found.items():
        wanted = trained[name].grad
        assert wanted is not None
        assert float((gradient - wanted).abs().max()) < 1e-4 * max(1.0, float(wanted.abs().max())), name


def test_completions_without_an_advantage_can_be_left_out() -> None:
    prompts, completions, _ = examples(100)
    gains = torch.tensor([0.0, 2.0, 0.0])
    whole = Completions.with_advantages(prompts, completions, gains)
    part = whole.with_advantage_only()
    assert (len(whole), len(part)) == (3, 1)
    assert (part.target_count(), part.token_count()) == (whole.target_count(), whole.token_count()) == (12, 24)
    objective = GRPOObjective(config())

    def gradient(batch: Completions) -> torch.Tensor:
        objective.model.zero_grad()
        (objective.loss(batch) / batch.target_count()).backward()
        grad = objective.model.get_input_embeddings().weight.grad
        assert isinstance(grad, torch.Tensor)
        return grad

    wanted, found = gradient(whole), gradient(part)  # rounded differently, since matmuls have other sizes
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    none = Completions.with_advantages(prompts, completions, torch.zeros(3)).with_advantage_only()
    assert (len(none), none.target_count()) == (1, 12)
    assert len(list(none.micro_batches(1, rank=1, world_size=2))) == 1


def test_completions_depend_only_on_the_seed_the_step_and_the_row(tmp_path: Path) -> None:
    task = opened(tmp_path)
    batch = task.batch(3)
    whole, again = task.complete(batch, SINGLE_PROCESS), task.complete(batch, SINGLE_PROCESS)
    assert torch.equal(whole.tokens, again.tokens)
    assert not torch.equal(task.complete(task.batch(4), SINGLE_PROCESS).tokens, whole.tokens)
    questions, seed = batch.questions, Sampling(1.0, seed=5)
    every = task.objective.rollout(questions, seed)
    assert [one.ids for one in task.objective.rollout(questions[2:], seed, first=2)] == [one.ids for one in every[2:]]
    assert len({tuple(one.ids) for one in task.objective.rollout([questions[0]] * 6, seed)}) > 1
    most_likely = Sampling(temperature=0.0)
    assert len({tuple(one.ids) for one in task.objective.rollout([questions[0]] * 6, most_likely)}) == 1


def test_a_completion_ends_with_the_token_that_ends_it(tmp_path: Path) -> None:
    task = opened(tmp_path)
    end = load_tokenizer_of(task.config.model).eos_token_id
    head: Any = task.objective.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.zero_()
        head.weight[end] = 1.0
        norm: Any = task.objective.model.base_model.norm
        norm.weight.fill_(0.0)  # all logits are 0
    found = task.objective.rollout(task.corpus.train.questions, Sampling(1.0, seed=1))
    ended = [one for one in found if not one.is_truncated]
    assert all(one.ids[-1] == end and end not in one.ids[:-1] and one.ids for one in ended)
    assert all(len(one.ids) == 8 and end not in one.ids for one in found if one.is_truncated)


def test_a_reward_function_gets_the_arguments_that_it_names(tmp_path: Path) -> None:
    task = opened(tmp_path, reward=f"{OWN}columns")
    rows = task.corpus.train.questions
    rewards = [one.reward for one in task.objective.rollout(rows, Sampling(1.0))]
    assert rewards == [row.columns["number"] for row in rows]


def test_a_reward_function_cannot_change_the_data(tmp_path: Path) -> None:
    task = opened(tmp_path, reward=f"{OWN}changing")
    rows = list(task.corpus.train.questions)
    before = copy.deepcopy([(row.prompt, row.columns) for row in rows])
    rewards = [one.reward for one in task.objective.rollout(rows, Sampling(1.0))]
    assert rewards == [columns["number"] for _, columns in before]
    assert [(row.prompt, row.columns) for row in rows] == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raising", "failed with KeyError: 'color'; correct the function"),
        ("needing", "failed with TypeError: needing() missing 1 required positional argument: 'solution'"),
        ("exiting", "failed with SystemExit: 0"),
        ("single", "returned 0.5 instead of a list of numbers"),
        ("digits", 'returned "1111111111111111" instead of a list of numbers'),
        ("words", 'returned "1.0", which is not a finite number'),
        ("keyed", "instead of a list of numbers"),
        ("short", "returned 1 reward for 16 completions"),
        ("missing", "returned null, which is not a finite number"),
        ("infinite", "returned Infinity, which is not a finite number"),
        ("huge", "returned 1e+300, which is not a finite number of usual size"),
    ],
)
def test_a_reward_function_that_fails_ends_the_run_with_a_sentence(
    name: str, words: str, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert cli(arguments(home, tmp_path / "run", **{"training.grpo.reward": OWN + name})) == 1
    assert words in sentence(capsys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.grpo.group_size": 3}, "a step has 16 completions"),
        ({"training.grpo.max_completion_length": 96}, "leaves no room for a prompt within data.max_length 96"),
        ({"training.grpo.beta": 0.1}, "training.grpo.beta needs an adapter"),
        ({"training.sharding": "full"}, "training.sharding full splits the weights"),
        ({"training.grpo.reward": "good"}, "training.grpo.reward"),
        ({"training.grpo.reward": "tests.nowhere:low"}, "tests.nowhere:low cannot be imported (No module named"),
        ({"training.grpo.reward": f"{OWN}nothing"}, "has no attribute 'nothing'); correct the name after the colon."),
        ({"training.grpo.reward": f"{OWN}number"}, "rewards:number is a int, not a function"),
        ({"training.grpo.max_completion_length": 90}, "has no usable prompts (prompts.jsonl: 24 rows were skipped"),
        ({"data.max_length": 400, "training.grpo.temperature": 0}, "training.grpo.temperature"),
        ({"data.max_length": 4000}, "data.max_length 4000 is longer than the model's context of"),
        ({"training.label_smoothing": 0.1}, "training.label_smoothing is for task"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(
    changes: dict[str, object], words: str, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert cli(arguments(home, tmp_path / "run", **changes)) == 2
    assert words in sentence(capsys).replace(str(home) + "/", "")
    assert not (tmp_path / "run").exists()


def test_a_module_that_fails_at_import_is_named(
    home: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli(arguments(home, tmp_path / "run", **{"training.grpo.reward": "broken_rewards:good"})) == 2
    assert "broken_rewards:good cannot be imported (ZeroDivisionError: division by zero)" in sentence(capsys)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "line 1 has no answer, which training.grpo.reward answer compares"),
        ({"prompt": "a", "answer": [1]}, "has the answer [1] instead of a text or a number"),
        ({"prompt": "a", "answer": " "}, "line 1 has no answer"),
        ({"answer": "a"}, "has answer, but needs prompt, messages or text"),
        ({"prompt": " ", "answer": "a"}, "has an empty prompt"),
        (
            {"prompt": [{"role": "assistant", "content": "a"}], "answer": "a"},
            "has no user message to answer at the end of its prompt",
        ),
        ([1], "is of type list instead of an object"),
    ],
)
def test_a_bad_row_is_named(row: object, words: str, home: Path, tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps(row) + "\n")
    changes = {"data.dataset_name": data, "training.grpo.reward": "answer"}
    assert cli(arguments(home, tmp_path / "run", **changes)) == 2
    assert words in sentence(capsys)


def test_a_model_learns_what_is_rewarded(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, name = tmp_path / "run", f"{OWN}share_of_low_ids"
    more = {
        "training.grpo.reward": name, "training.grpo.group_size": 8, "training.gradient_accumulation_steps": 4,
        "training.learning_rate": 0.02, "training.lr_scheduler": "constant", "training.max_steps": 16,
        "training.eval_steps": 8, "training.save_steps": 0, "training.eval_on_start": "true",
    }  # fmt: skip
    assert cli(arguments(home, run, **more)) == 0
    shown = capsys.readouterr().out
    steps, evaluations = events_of(run, "step"), events_of(run, "eval")
    assert {"reward", "equal_rewards", "completion_length", "truncated"} <= steps[-1].keys()
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.1
    assert evaluations[-1]["reward"] > evaluations[0]["reward"]
    assert evaluations[-1]["loss"] == -evaluations[-1]["reward"]
    assert {"generate", "forward", "backward"} <= steps[-1]["phase_seconds"].keys()
    assert f"reward {steps[-1]['reward']:.4f}" in shown
    assert not re.search("validation.* prompts.*epoch", shown)  # it is shown before the metrics
    assert not [event for event in events_of(run, "warning") if event.get("cause") in ("rising", "flat", "overfitting")]
    low, high = evaluations[-1]["reward_interval"]
    assert low <= evaluations[-1]["reward"] <= high
    assert high > low

    assert "\nReward: training, validation\n" in shown
    assert f"\n  sansgpu eval {run} --reward {name}\n" in shown
    assert not re.search(r"\bloss\b|-0\.0+\b", shown)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "validation reward, best" in page
    assert "validation loss" not in page
    assert cli(["snapshots", "list", str(run)]) == 0
    assert f"validation reward {evaluations[-1]['reward']:.4f}" in capsys.readouterr().out
    assert cli(["runs", str(run)]) == 0
    assert f"reward {evaluations[-1]['reward']:.3f}" in capsys.readouterr().out

    refused = f"was trained with the reward {name}, which is Python code: add --reward {name}"
    assert cli(["eval", str(run)]) == 2
    assert refused in sentence(capsys)
    assert cli(["eval", str(run), "--reward", name, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["reward"] == pytest.approx(evaluations[-1]["reward"], abs=1e-6)
    assert cli(["eval", str(run), "--reward", "answer", "--data", str(home / "prompts.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 24
    assert cli(["train", "--resume", "--output-dir", str(run), "--max-steps", "17"]) == 2
    assert f"add --set training.grpo.reward={name} to run it" in sentence(capsys)
    assert cli(["generate", str(run), "--prompt", "red", "--max-new-tokens", "4"]) == 0
    assert cli(["export", str(run), "--format", "gguf", "--output", str(tmp_path / "model.gguf")]) == 0


def test_reward_is_only_for_this_task(home: Path, tmp_path: Path, capsys: Captured) -> None:
    chat_rows(home / "chat.jsonl")
    run = made(home, "chat-run")
    capsys.readouterr()
    assert cli(["eval", str(run), "--reward", "answer"]) == 2
    assert "--reward is only for runs of task grpo" in sentence(capsys)


@pytest.mark.long
def test_the_plan_includes_the_time_and_memory_of_generation(home: Path, capsys: Captured) -> None:
    def planned(**changes: object) -> dict[str, Any]:
        own = {"data.dataset_name": home / "prompts.jsonl", "model.name_or_path": model_folder("qwen2")}
        assert cli(["plan", *options(TRAINED, own, {"training.max_steps": 2}, changes), "--json"]) == 0
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)
        return plan

    prompt_rows(home / "prompts.jsonl")
    short, long = planned(), planned(**{"training.grpo.max_completion_length": 256, "data.max_length": 352})
    assert long["step_seconds"] > short["step_seconds"]
    assert long["memory_bytes"]["activations"] > short["memory_bytes"]["activations"]
    assert math.isfinite(long["total_seconds"])


def test_the_built_in_sums_are_right_and_their_parts_differ(tmp_path: Path) -> None:
    _, corpus = GRPO.prepare(config("arithmetic", reward="answer"), tmp_path, lambda *_: None)
    parts = [[row.prompt[0]["content"] for row in part.questions] for part in (corpus.train, corpus.validation)]
    assert [len(part) for part in parts] == [2000, 100]
    assert len({*parts[0], *parts[1]}) == 2100
    for row in corpus.train.questions[:20]:
        one, _, other = row.prompt[0]["content"].removeprefix("What is ").partition("?")[0].split()
        assert int(row.columns["answer"]) == int(one) + int(other)
    source = open_sources(DataConfig(dataset_name="arithmetic")).train
    with pytest.raises(ConfigError, match="has prompts with answers, not documents"):
        source.read()


def test_rows_of_public_data_sets_are_read_and_what_is_not_used_is_named(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "How many red doors?"}]
    rows = [
        {"question": "How many red doors?", "answer": "2 * 36 = <<2*36=72>>72\n#### 72"},  # GSM8K
        {"prompt": turns, "ground_truth": "72", "difficulty": 3},
        {"prompt": turns, "solution": r"There are $\boxed{72}$."},
        {"problem": "How many red doors?", "solution": "A long way.", "answer": "72"},  # MATH, NuminaMath
        {"prompt": turns, "reward_model": {"style": "rule", "ground_truth": "72"}, "data_source": "x"},  # verl
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    chosen = config(data, reward="answer")
    notes: list[str] = []
    source = open_sources(DataConfig(dataset_name=str(data))).train
    tokenizer = load_tokenizer_of(chosen.model)
    found = read_prompts(source, chosen, tokenizer, lambda *_: None, notes)
    assert len({tuple(question.ids.tolist()) for question in found.questions}) == 1
    reward = open_reward("answer")
    assert reward(found.questions, ["It is 72."] * 5, [[0]] * 5) == [1.0] * 5
    assert reward(found.questions, ["It is 71."] * 5, [[0]] * 5) == [0.0] * 5
    assert any("columns not used: 'difficulty' (1 row), 'solution' (1), 'data_source' (1)" in note for note in notes)
    data.write_text(json.dumps({"question": "How many?", "answer": ""}))
    with pytest.raises(ConfigError, match="line 1 has no answer, which training"):
        read_prompts(open_sources(DataConfig(dataset_name=str(data))).train, chosen, tokenizer, lambda *_: None, notes)
