"""Task preference: rows, losses, shared prompts, the cached reference and runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from sansgpu.cli import run as cli
from sansgpu.config import Config, ConfigError
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.preference.batch import PreferenceExamples, with_other_answers
from sansgpu.tasks.preference.losses import Scores, kl_divergence, kto_losses, pair_losses
from sansgpu.tasks.preference.objective import PreferenceObjective
from sansgpu.tasks.preference.rows import Answers, ReadingNotes, tokenize_preferences
from sansgpu.tasks.preference.settings import PreferenceConfig
from tests.processes import Captured, digests, events_of, finish, kill_when, options, start
from tests.tasks.fine_tuned import TINY, sentence, settings
from tests.tasks.folders import model_folder, preference_rows

PROMPT = [{"role": "user", "content": "Name a color."}]
GOOD, BAD = "Red, as a fox.", "No."


def config(architecture: str = "qwen2", **preference: object) -> Config:
    model = {"name_or_path": str(model_folder(architecture))}
    values = {"task": "preference", "model": model, "data": {"dataset_name": "rows"}}
    return Config.model_validate({**values, "training": {"preference": preference}})


def read(*rows: object, rated: bool = False, max_length: int = 200, long_rows: str = "truncate") -> list[Answers]:
    tokenizer = load_tokenizer_of(config().model)
    found = [SourceRow(f"row {number}", row) for number, row in enumerate(rows, 1)]
    return tokenize_preferences(found, tokenizer, max_length, long_rows, rated, ReadingNotes())  # type: ignore[arg-type]


def tokens(answers: Answers) -> list[list[int]]:
    return [answers.prompt.tolist(), *(ids.tolist() for ids in answers.ids)]


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SCORED: list[tuple[dict[str, Any], str | None]] = [
    ({"chosen_score": 8.5, "rejected_score": 3}, None),
    ({"score_chosen": 8.5, "score_rejected": "8.5"}, "equal"),
    (
        {"chosen-rating": 4, "rejected-rating": 5},
        "has chosen-rating 4 and rejected-rating 5, so its rejected answer is",
    ),
    ({"score_chosen": 3.0, "score_rejected": 7.5}, "has score_chosen 3 and score_rejected 7.5"),
    ({"margin": 0.5}, None),
    ({"margin": -0.5}, "has margin -0.5, so its rejected answer is the better one"),
    ({"chosen_score": None, "rejected_score": 5}, None),
    ({"chosen_score": "high", "rejected_score": 5}, None),
]


@pytest.mark.parametrize(("scores", "said"), SCORED, ids=range(len(SCORED)))
def test_scores_must_agree_with_the_choice(scores: dict[str, Any], said: str | None) -> None:
    for row in (
        {"prompt": "Name a color.", "chosen": GOOD, "rejected": BAD},
        {"chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
    ):
        report = RowReport("fail")
        notes = ReadingNotes(report)
        rows = [SourceRow("row 1", row | scores)]
        if said is None or said == "equal":
            found = tokenize_preferences(rows, load_tokenizer_of(config().model), 200, "truncate", False, notes)
            assert [tokens(answers) for answers in found] == [tokens(answers) for answers in read(row)]
            named = [key for key, value in scores.items() if value is not None]
            assert [*report.unused] == named
            assert any("are equal" in note for note in report.notes()) == (said == "equal")
        else:
            with pytest.raises(BadRowError, match=re.escape(said)):
                tokenize_preferences(rows, load_tokenizer_of(config().model), 200, "truncate", False, notes)


def test_an_answer_may_be_the_beginning_of_the_other() -> None:
    long, short = f"{GOOD} It is red.", GOOD
    for chosen, rejected in ((long, short), (short, long)):
        whole = [{"chosen": [*PROMPT, assistant(chosen)], "rejected": [*PROMPT, assistant(rejected)]}]
        found = read({"prompt": "Name a color.", "chosen": chosen, "rejected": rejected}, *whole)
        decode = load_tokenizer_of(config().model).decode
        for answers in found:
            prompt = decode(answers.prompt)
            assert [prompt + decode(ids) for ids in answers.ids] == [
                f"<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
                for answer in (chosen, rejected)
            ]
        with pytest.raises(BadRowError, match="unclear where the prompt ends; put it into a column prompt"):
            read({"chosen": f"Name a color. {chosen}", "rejected": f"Name a color. {rejected}"})
    with pytest.raises(BadRowError, match="rejected begins with all of chosen"):
        read({"chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(GOOD), *PROMPT, assistant(BAD)]})


def test_every_form_of_a_row_gives_the_same_tokens() -> None:
    shared = {"from": "human", "value": "Name a color."}
    forms = [
        {"prompt": "Name a color.", "chosen": GOOD, "rejected": BAD},
        {"prompt": PROMPT, "chosen": [assistant(GOOD)], "rejected": assistant(BAD)},
        {
            "conversations": [shared],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        {"chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
        {"prompt": "Name a color.", "chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
    ]
    pairs = [tokens(answers) for answers in read(*forms)]
    assert pairs == [pairs[0]] * len(forms)
    decode = load_tokenizer_of(config().model).decode
    assert [decode(part) for part in pairs[0]] == [
        "<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n", f"{GOOD}<|im_end|>", f"{BAD}<|im_end|>",
    ]  # fmt: skip
    rated = read(
        {"messages": [*PROMPT, assistant(GOOD)], "label": True},
        {"prompt": PROMPT, "completion": [assistant(GOOD)], "label": "1"},
        {"conversations": [shared, {"from": "gpt", "value": GOOD}], "label": 1},
        rated=True,
    )
    assert [(tokens(one), one.label) for one in rated] == [(pairs[0][:2], True)] * 3
    halves = read(forms[0], rated=True)
    assert [(one.prompt.tolist(), one.ids[0].tolist(), one.label) for one in halves] == [
        (pairs[0][0], pairs[0][1], True), (pairs[0][0], pairs[0][2], False),
    ]  # fmt: skip


def test_a_long_prompt_loses_its_oldest_turns_in_both_conversations() -> None:
    turns = [*PROMPT, assistant("blue " * 20), {"role": "user", "content": "Why?"}]
    row = {"prompt": turns, "chosen": GOOD, "rejected": BAD}
    (long,), (short,), (alone,) = read(row), read(row, max_length=60), read({**row, "prompt": turns[2:]})
    assert len(long.prompt) > 60
    assert tokens(short) == tokens(alone)
    assert read(row, max_length=60, long_rows="drop") == []
    assert read(row, max_length=12) == []


def read_pair(row: dict[str, Any]) -> tuple[list[str], str, str]:
    """Returns the turns of the prompt as one text each, and the chosen and the rejected answer."""
    chosen, rejected = PREFERENCES.read(SourceRow("row 1", row)).conversations
    assert chosen.turns[: chosen.first] == rejected.turns[: rejected.first]
    prompt = [f"{turn['role']} {turn['content']}" for turn in chosen.turns[: chosen.first]]
    return prompt, chosen.turns[-1]["content"], rejected.turns[-1]["content"]


HH = "\n\nHuman: hi\n\nAssistant:"
TWO = f"{HH} ho\n\nOh: ho\n\nHuman: a\n\nb\n\nAssistant:"
MARKED: list[tuple[dict[str, Any], list[str], str, str]] = [
    ({"chosen": f"{HH} yesterday", "rejected": f"{HH} yes."}, ["user hi"], "yesterday", "yes."),
    ({"chosen": f"{HH} yes", "rejected": f"{HH} yes, yes"}, ["user hi"], "yes", "yes, yes"),
    ({"chosen": f"{HH} yes\n\n- c", "rejected": f"{HH} yes\n\n- b"}, ["user hi"], "yes\n\n- c", "yes\n\n- b"),
    ({"chosen": f"{TWO} c", "rejected": f"{TWO} d"}, ["user hi", "assistant ho\n\nOh: ho", "user a\n\nb"], "c", "d"),
    ({"chosen": f"{HH[2:]} c", "rejected": f"{HH[2:]} d"}, ["user hi"], "c", "d"),
    ({"chosen": f"Be brief.{HH} c", "rejected": f"Be brief.{HH} d"}, ["system Be brief.", "user hi"], "c", "d"),
    ({"prompt": HH, "chosen": " c", "rejected": " d"}, ["user hi"], "c", "d"),  # Dahoas
    ({"prompt": "hi", "chosen": f"{HH} c", "rejected": f"{HH} d"}, ["user hi"], "c", "d"),
    ({"prompt": "hi", "chosen": "Say Human: c", "rejected": "d"}, ["user hi"], "Say Human: c", "d"),
    ({"chosen": "Q: a\nA: b", "rejected": "Q: a\nA: c"}, ["user Q: a\nA:"], " b", " c"),
    ({"chosen": "a?\nbe", "rejected": "a?\nc"}, ["user a?\n"], "be", "c"),
    ({"chosen": "a? [/INST] b", "rejected": "a? [/INST] c"}, ["user a? [/INST]"], " b", " c"),
    ({"chosen": "### Response: b", "rejected": "### Response: c"}, ["user ### Response:"], " b", " c"),
    *(({column: "p", "prompt": None, "chosen": "The sky is blue", "rejected": "The sky is green"},
       ["user p"], "The sky is blue", "The sky is green")
      for column in ("input", "question", "instruction", "query", "user_prompt")),
    ({"question": "Name a color.", "chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
     ["user Name a color."], GOOD, BAD),
]  # fmt: skip


@pytest.mark.parametrize(("row", "prompt", "chosen", "rejected"), MARKED, ids=range(len(MARKED)))
def test_a_row_is_never_divided_within_an_answer(row: Any, prompt: list[str], chosen: str, rejected: str) -> None:
    assert read_pair(row) == (prompt, chosen, rejected)


def test_a_common_beginning_ends_with_a_word() -> None:
    assert read_pair({"chosen": "The sky is blue", "rejected": "The sky is black"}) == (
        ["user The sky is"], " blue", " black",
    )  # fmt: skip


def test_marked_texts_stay_the_same_rows_without_a_chat_template() -> None:
    (one, other) = PREFERENCES.read(SourceRow("row 1", {"chosen": f"{HH} c", "rejected": f"{HH} d"})).conversations
    assert (one.plain, other.plain) == ((HH, " c"), (HH, " d"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "yes", "rejected": "yesterday"}, "rejected begins with all of chosen"),
        ({"chosen": "blue", "rejected": "black"}, "has no prompt, because chosen and rejected have no common begin"),
        ({"prompt": None, "topic": "p", "chosen": "It is blue", "rejected": "The sky is green"},
         "no common beginning; add a column prompt, or rename the one that has it (topic)"),
        ({"chosen": f"{HH} a\n\nHuman: b", "rejected": f"{HH} c"}, "ends chosen with a turn of Human"),
        ({"chosen": f"{HH} a", "rejected": f"{HH} "}, "has an empty rejected"),
        ({"chosen": f"{HH} a", "rejected": f"\n\nHuman: x{HH} b"}, "has different turns before the last answers"),
        ({"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "begin with the answer"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "has 3 as its prompt instead of a text or a list of turns"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "has an empty prompt"),
        ({"prompt": True, "chosen": "a", "rejected": "b"}, "has true as its prompt"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_show_its_prompt_is_bad(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRowError, match=re.escape(words)):
        read_pair(row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1], "is of type list instead of an object with prompt, chosen and rejected"),
        ({"prompt": "a", "chosen": GOOD}, "has prompt, chosen, but needs"),
        ({"prompt": "a", "chosen": GOOD, "rejected": GOOD}, "has identical chosen and rejected answers"),
        ({"prompt": "a", "chosen": GOOD, "rejected": " "}, "has an empty rejected"),
        ({"prompt": "", "chosen": GOOD, "rejected": BAD}, "has an empty prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": BAD}, "has a value of type int in chosen instead of a list"),
        ({"chosen": "Yes", "rejected": "No"}, "has no prompt, because chosen and rejected have no common beginning"),
        ({"chosen": [], "rejected": "No"}, "has no prompt; without one"),
        ({"prompt": "a\ud800", "chosen": GOOD, "rejected": BAD}, "unpaired surrogate"),
        ({"messages": PROMPT, "label": True}, "ends without an answer to rate"),
        ({"messages": [*PROMPT, assistant(GOOD)], "label": "maybe"}, "has the label 'maybe' instead of true or"),
        ({"messages": [*PROMPT, assistant(GOOD)], "label": [1]}, "has the label [1]"),
        ({"conversations": [{"from": "alien", "value": "x"}], "chosen": GOOD, "rejected": BAD}, "unknown role 'alien'"),
    ],
)
def test_a_bad_row_is_named(row: object, words: str) -> None:
    with pytest.raises(BadRowError) as error:
        read(row, rated=isinstance(row, dict) and "label" in row)
    assert str(error.value).startswith(("row 1 ", "row 1: it "))
    assert words in str(error.value)


def test_rows_that_do_not_match_the_loss_or_earlier_rows_are_refused() -> None:
    rated = {"messages": [*PROMPT, assistant(GOOD)], "label": True}
    pair = {"prompt": "a", "chosen": GOOD, "rejected": BAD}
    with pytest.raises(ConfigError, match=r"row 1 has a rated answer.*set training.preference.loss to kto"):
        read(rated)
    with pytest.raises(ConfigError, match="row 2 has a chosen and a rejected answer, but the rows before it"):
        read(rated, pair, rated=True)


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
    ("architecture", "shares"), [("llama", True), ("qwen3", True), ("gpt2", True), ("mistral", False)]
)
def test_shared_prompts_change_neither_log_probabilities_nor_gradients(architecture: str, shares: bool) -> None:
    objective, examples = PreferenceObjective(config(architecture)), random_answers()
    answers, batch = objective._answers, examples.batch(np.arange(4))
    assert answers.shares_prompts == shares
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
        answers.__dict__["shares_prompts"] = is_shared
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


def test_a_plan_includes_the_time_of_the_reference(tmp_path: Path, capsys: Captured) -> None:
    rows, hours = preference_rows(tmp_path / "rows.jsonl", 200), []
    for loss in ("dpo", "simpo"):
        own = arguments(tmp_path, tmp_path / loss, rows, training__preference__loss=loss, training__max_steps=2)
        capsys.readouterr()
        assert cli(["plan", *own[1:-2], "--json"]) == 0
        hours.append(json.loads(capsys.readouterr().out)["total_seconds"])
    assert hours[0] > hours[1]  # the plans share measured step times, and only dpo needs a reference
