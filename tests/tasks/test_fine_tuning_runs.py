"""Fine-tuning runs are reproducible, resume, export and predict; errors are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForQuestionAnswering
from safetensors import safe_open
from tools.tiny_model import make_folder
from transformers import AutoModelForCausalLM

from sansgpu.cli import run as cli
from sansgpu.machine.probe import has_native_bf16
from sansgpu.train.loading import ModelRequest, open_model
from tests.processes import digests, events_of, finish, json_of, kill_when, record, start, write_rows
from tests.tasks.fine_tuned import Captured, made, sentence, settings
from tests.tasks.folders import chat_rows, model_folder, squad

pytestmark = pytest.mark.usefixtures("home")

ADAPTED = {"model__adapter": "lora", "model__lora_dropout": 0.1}
NARROW = {"training__master_weights": "bf16", "training__optimizer_state": "8bit", "training__precision": "bf16"}
NEEDS_BF16 = pytest.mark.skipif(not has_native_bf16(), reason="this CPU has no native bf16")
TEXT = "The red house is old. The green house is new and it stands on a cold hill."
TOO_LONG = "long.jsonl"
SOME_BAD = "some-bad.jsonl"


def fill(home: Path) -> None:
    """Writes rows of all kinds: valid ones, a question that is too long, and a file with three bad rows."""
    chat_rows(home / "chat.jsonl")
    squad(home / "squad.json", impossible=True)
    good = flat_questions()
    too_long = json.dumps({**json.loads(good[0]), "id": "long", "question": "which " * 200})
    write_rows(home / TOO_LONG, [too_long])
    write_rows(home / SOME_BAD, [*good[:5], too_long, *BAD_ROWS["qa"], *good[5:]])


def outputs(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 23 % 1000
    with torch.no_grad():
        out = model.eval()(tokens)
    return out.logits if "logits" in out else torch.stack((out.start_logits, out.end_logits))


def assert_equal_outputs(exported: Any, run: Path, task: str = "sft") -> None:
    ours = open_model(ModelRequest(str(run)), "evaluate", pytest.fail).objective.model
    torch.testing.assert_close(outputs(exported), outputs(ours), rtol=1e-4, atol=1e-4)


# Runs in separate processes


def outcome(run: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Returns the digests of the last snapshot and final/, and all events without times."""
    kept = {k: v for k, v in digests(run).items() if k.startswith(("snapshots/step-000010", "final"))}
    assert len(kept) == 3
    return kept, record(run)


def in_a_process(home: Path, run: str, *more: str, **changes: object) -> list[str]:
    long = {"training__max_steps": 10, "training__gradient_accumulation_steps": 8, **changes}
    return ["train", *settings(home, **long), "--output-dir", str(home / run), *more]


@pytest.mark.parametrize(
    "changes", [ADAPTED, pytest.param(NARROW, marks=[NEEDS_BF16, pytest.mark.long])], ids=["lora", "narrow"]
)
def test_a_run_that_was_killed_is_byte_identical_to_another(home: Path, changes: dict[str, object]) -> None:
    first, killed = (home / f"{name}-{len(changes)}" for name in ("first", "killed"))
    code, _, error = finish(in_a_process(home, first.name, **changes), home / "cache")
    assert code == 0, error
    process = start(in_a_process(home, killed.name, **changes), home / "cache")
    assert kill_when(process, (killed / "snapshots/step-000004/MANIFEST.json").exists) == -9
    assert not (killed / "final").exists()
    code, _, error = finish(in_a_process(home, killed.name, "--resume", **changes), home / "cache")
    assert code == 0, error
    assert outcome(killed) == outcome(first)


# Training, saving and exporting


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [("qwen2", "dora"), *(pytest.param(n, "lora", marks=pytest.mark.long) for n in ("qwen2", "mamba", "mixtral"))],
)
def test_an_adapter_is_exported_merged_or_alone(home: Path, tmp_path: Path, architecture: str, adapter: str) -> None:
    base = model_folder(architecture)
    changes = {"model__name_or_path": base, "model__adapter": adapter, "model__merge_adapter": "false"}
    run = made(home, f"{architecture}-{adapter}", **changes)
    assert not (run / "final/model.safetensors").exists()
    assert_equal_outputs(AutoPeftModelForCausalLM.from_pretrained(run / "final"), run)
    for choice in ("--merge", "--no-merge"):
        assert cli(["export", str(run), choice, "--output", str(tmp_path / choice)]) == 0
    assert_equal_outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "--merge"), run)
    assert not (tmp_path / "--merge/adapter_config.json").exists()
    assert_equal_outputs(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "--no-merge"), run)
    losses = [event["loss"] for event in events_of(run, "eval")]
    assert losses[-1] < losses[0]


def test_a_16_bit_base_keeps_its_type_under_an_adapter(home: Path) -> None:
    base = model_folder("qwen2", bf16=True)
    run = made(home, "narrow-base", model__name_or_path=base, model__adapter="lora")
    merged = AutoModelForCausalLM.from_pretrained(run / "final", dtype="auto")
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}
    ours = open_model(ModelRequest(str(run)), "evaluate", pytest.fail).objective.model
    before = AutoModelForCausalLM.from_pretrained(base)
    away = (outputs(ours) - outputs(before.float())).norm()
    assert (outputs(merged.float()) - outputs(ours)).norm() < 0.2 * away


def test_a_run_without_adapter_cannot_be_merged(home: Path, capsys: Captured) -> None:
    run = made(home, "whole")
    capsys.readouterr()
    assert cli(["export", str(run), "--merge"]) == 2
    assert "has no adapter" in sentence(capsys)


def names_in(run: Path) -> set[str]:
    with safe_open(run / "snapshots/step-000004/model.safetensors", "pt") as file:
        return set(file.keys())


def test_snapshots_hold_only_what_is_trained(home: Path) -> None:
    adapted = names_in(made(home, "lora", model__adapter="lora", model__merge_adapter="false"))
    assert adapted
    assert all("lora_" in name for name in adapted)
    asked = names_in(made(home, "asked-lora", "qa", model__adapter="lora"))
    heads = {name for name in asked if "lora_" not in name}
    assert heads == {f"qa_outputs.modules_to_save.default.{part}" for part in ("weight", "bias")}


def predicted(capsys: Captured, target: Path, *more: str) -> str:
    capsys.readouterr()
    asked = ["--question", "Which house is old?", "--context", TEXT]
    assert cli(["predict", str(target), *asked, *more]) == 0
    return capsys.readouterr().out


def test_a_new_head_is_exported_with_its_adapter(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run = made(home, "asked-lora", "qa", model__adapter="lora")
    assert cli(["export", str(run), "--no-merge", "--output", str(tmp_path / "adapter")]) == 0
    assert_equal_outputs(AutoPeftModelForQuestionAnswering.from_pretrained(tmp_path / "adapter"), run, "qa")
    ours, exported = (json.loads(predicted(capsys, path, "--json")) for path in (run, run / "final"))
    named = [answer for answer in ours["nbest"] if answer["text"]]
    others = [answer for answer in exported["nbest"] if answer["text"]]
    assert [a["text"] for a in named[:3]] == [a["text"] for a in others[:3]]


@pytest.mark.parametrize("changes", [{}, {"model__adapter": "lora"}])
def test_recomputed_activations_change_no_loss(
    home: Path, changes: dict[str, object], recwarn: pytest.WarningsRecorder
) -> None:
    """Recomputed activations have the same dropout, and warnings of libraries do not reach the user."""
    chosen = {"model__name_or_path": model_folder("gpt2"), "training__max_steps": 3, **changes}
    runs = [
        made(home, f"again-{again}-{len(changes)}", model__gradient_checkpointing=again, **chosen)
        for again in ("true", "false")
    ]
    first, second = ([event["loss"] for event in events_of(run, "step")] for run in runs)
    assert first == pytest.approx(second, rel=1e-6)
    assert not [str(w.message) for w in recwarn if issubclass(w.category, (UserWarning, FutureWarning))]


# Questions


def test_an_answer_is_part_of_the_context(home: Path, capsys: Captured) -> None:
    run = made(home, "sure", "qa", data__null_answers="false")
    printed = predicted(capsys, run).removesuffix("\n")
    assert printed
    result = json.loads(predicted(capsys, run, "--json"))
    assert result["answer"] == printed
    assert TEXT[result["start"] :].startswith(printed)
    assert 0 < result["probability"] <= 1
    assert result["nbest"][0]["text"] == printed


def test_predict_reports_the_probability_and_start_of_the_selected_answer(home: Path, capsys: Captured) -> None:
    """A threshold may select a candidate that is not the best: the best span or the null answer."""
    against_the_best = 0
    for threshold in (-1e6, 1e6):
        run = made(home, f"threshold{threshold}", "qa", data__null_score_diff_threshold=threshold)
        result = json.loads(predicted(capsys, run, "--json"))
        assert bool(result["answer"]) == (threshold > 0)
        (own,) = [
            candidate
            for candidate in result["nbest"]
            if (candidate["text"], candidate.get("start")) == (result["answer"], result.get("start"))
            and candidate["probability"] == result["probability"]
        ][:1]
        assert own["text"] == TEXT[own.get("start", 0) :][: len(own["text"])]
        against_the_best += own is not result["nbest"][0]
    assert against_the_best, "both thresholds selected the best candidate"


def test_runs_are_evaluated_on_their_own_and_on_other_data(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, other = made(home, "whole"), chat_rows(tmp_path / "other.jsonl", count=9, seed=5)
    last = events_of(run, "eval")[-1]
    assert json_of(capsys, "eval", run)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    elsewhere = json_of(capsys, "eval", run, "--data", str(other))
    assert elsewhere["loss"] != pytest.approx(last["loss"], rel=1e-5)
    assert elsewhere.keys() >= {"loss", "perplexity", "bits_per_byte"}


def test_questions_are_evaluated_and_their_answers_written(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, other = made(home, "asked", "qa"), squad(tmp_path / "other.json", paragraphs=3, seed=5)
    last = events_of(run, "eval")[-1]
    (run / "predictions.json").unlink()
    own = json_of(capsys, "eval", run)
    assert own["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert own["exact_match"] == pytest.approx(last["exact_match"])
    assert len(json.loads((run / "predictions.json").read_text())) == last["questions"]
    assert 0 <= json_of(capsys, "eval", run, "--data", str(other))["f1"] <= 100
    assert json.loads((run / "predictions.json").read_text()).keys() == {"q0", "q1", "q2"}


# Errors

BAD_ROWS = {
    "sft": ['{"messages": [{"role": "user", "content": "hello"}]}', '{"messages": ['],
    "qa": ['{"id": "x", "question": "Who?", "context": "", "answers": {"text": ["a"], "answer_start": [0]}}', "{"],
}


@pytest.mark.parametrize(("task", "bad"), [(task, bad) for task, rows in BAD_ROWS.items() for bad in rows])
def test_a_bad_row_is_named_or_skipped(home: Path, tmp_path: Path, task: str, bad: str, capsys: Captured) -> None:
    good = chat_rows(tmp_path / "rows.jsonl").read_text().splitlines() if task == "sft" else flat_questions()
    (tmp_path / "rows.jsonl").write_text("\n".join([*good[:2], bad, *good[2:]]) + "\n")
    chosen = settings(home, task, data__dataset_name=tmp_path / "rows.jsonl", training__max_steps=1)
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "failed")]) == 2
    said = sentence(capsys)
    assert "rows.jsonl, line 3" in said
    assert not (tmp_path / "failed/snapshots").exists()
    skipping = [*chosen, "--set", "data.on_bad_row=skip", "--headless"]
    assert cli(["train", *skipping, "--output-dir", str(tmp_path / "skipped")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (warning,) = [e["message"] for e in printed if e["event"] == "warning" and "bad rows skipped: 1 of" in e["message"]]
    assert "rows.jsonl, line 3" in warning


def test_rows_that_are_shortened_or_too_long_are_counted(home: Path, tmp_path: Path, capsys: Captured) -> None:
    long = [{"role": role, "content": "red house " * 20} for role in ("user", "assistant")]
    short = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "The red one."}]
    rows = [long + short, long, short, short + long, [{"role": "system", "content": "Be brief."}, *long, *short]]
    path = write_rows(tmp_path / "rows.jsonl", ({"messages": row} for row in rows))
    chosen = settings(home, data__dataset_name=path, data__max_length=64, training__max_steps=1)
    assert cli(["train", *chosen, "--headless", "--output-dir", str(tmp_path / "run")]) == 0
    said = " ".join(e["message"] for e in events_of(tmp_path / "run", "warning"))
    assert "2 rows are longer than 64 tokens, so their beginnings were removed" in said
    assert "2 rows were skipped" in said
    capsys.readouterr()
    assert cli(["train", *chosen, "--set", "data.max_length=8", "--output-dir", str(tmp_path / "none")]) == 2
    refused = sentence(capsys)
    assert "no usable rows" in refused
    assert "5 rows were skipped" in refused
    assert "raise data.max_length" in refused


def test_an_evaluation_skips_questions_that_cannot_be_used(home: Path, capsys: Captured) -> None:
    run = made(home, "asked", "qa")
    found = json_of(capsys, "eval", run, "--data", str(home / SOME_BAD))
    assert (found["questions"], found["skipped"]) == (12, 3)
    assert json_of(capsys, "eval", run)["skipped"] == 0
    assert cli(["eval", str(run), "--data", str(home / SOME_BAD)]) == 0
    captured = capsys.readouterr()
    assert "12 questions" in captured.out
    assert "3 skipped" in captured.out
    assert "bad rows skipped: 3 of " in captured.err
    assert "some-bad.jsonl, line 7: it has no context" in captured.err


def test_an_evaluation_without_any_usable_question_is_refused(home: Path, capsys: Captured) -> None:
    run = made(home, "asked", "qa")
    capsys.readouterr()
    assert cli(["eval", str(run), "--data", str(home / TOO_LONG)]) == 2
    assert "no examples to evaluate" in sentence(capsys)


def test_validation_skips_questions_that_cannot_be_used(home: Path, tmp_path: Path, capsys: Captured) -> None:
    trained = settings(home, "qa", data__validation_name=home / SOME_BAD, training__max_steps=1)
    assert cli(["train", *trained, "--output-dir", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert "validation questions: bad rows skipped: 3 of" in captured.err + captured.out
    assert events_of(tmp_path / "run", "eval")[-1]["questions"] == 12
    assert cli(["eval", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert "3 skipped" in captured.out
    assert "some-bad.jsonl, line 7: it has no context" in captured.err


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("data__validation_name", TOO_LONG, "long.jsonl has no usable questions (validation "),
        ("data__dataset_name", SOME_BAD, "some-bad.jsonl, line 7: it has no context"),
    ],
)
def test_training_refuses_questions_that_cannot_be_used(
    key: str, name: str, said: str, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert cli(["train", *settings(home, "qa", **{key: home / name}), "--output-dir", str(tmp_path / "refused")]) == 2
    assert said in sentence(capsys)


def flat_questions() -> list[str]:
    def row(number: int) -> dict[str, object]:
        context = f"The fox{number} is brown and fast."
        answer = {"text": ["brown"], "answer_start": [context.index("brown")]}
        return {"id": f"q{number}", "question": "Which colour?", "context": context, "answers": answer}

    return [json.dumps(row(number)) for number in range(12)]


@pytest.mark.long
def test_a_model_that_changed_before_a_resume_is_noticed(home: Path, tmp_path: Path, capsys: Captured) -> None:
    base = make_folder(tmp_path / "base")
    chosen = settings(home, model__name_or_path=base, model__adapter="lora")
    folder = ["--output-dir", str(tmp_path / "run")]
    assert cli(["train", *chosen, *folder]) == 0
    again = ["train", "--resume", *folder, "--headless"]
    assert cli([*again, "--strict"]) == 0
    assert "was written with" not in capsys.readouterr().out
    make_folder(base, seed=1)
    capsys.readouterr()
    assert cli([*again, "--strict"]) == 2
    assert "remove --strict" in sentence(capsys)
    assert cli(again) == 0
    assert "was written with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__name_or_path": ""}, "set model.name_or_path"),
        ({"model__name_or_path": "./nowhere"}, "./nowhere does not exist"),
        ({"data__dataset_name": ""}, "set data.dataset_name"),
        ({"data__dataset_name": "./nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"model__d_model": 32}, "model.d_model is for task pretrain"),
        ({"data__doc_stride": 16}, "data.doc_stride is for task graph, qa and tokens"),
        ({"model__lora_rank": 8}, "set adapter to lora or dora"),
        ({"model__adapter": "lora", "model__lora_targets": "nothing"}, "model.lora_targets"),
        ({"sampling__stream": "true"}, "sampling"),
        ({"task": "chatting"}, "task"),
    ],
)
def test_settings_without_effect_are_refused_before_any_work(
    home: Path, tmp_path: Path, changes: dict[str, object], words: str, capsys: Captured
) -> None:
    assert cli(["train", *settings(home, **changes), "--output-dir", str(tmp_path / "runs/run")]) == 2
    assert words in sentence(capsys)
    assert not list(tmp_path.iterdir()), "a refusal left a folder"


@pytest.mark.parametrize(
    ("architecture", "targets", "words"),
    [
        ("mamba", "[in_proj,out_proj]", "Module 'out_proj' is incompatible with Mamba-based models"),
        ("mamba", "[q_proj]", 'has no layer "q_proj"'),
        ("mamba", "[]", "no layers are named"),
        ("mixtral", ".*(q_proj|w1|w3)", "model.layers.0.mlp.experts contains the experts of a layer"),
        ("mixtral", "q_proj", 'has no layer "q_proj"'),
        ("mixtral", "(", "is not a regular expression"),
    ],
)
def test_targets_that_an_adapter_cannot_have_are_refused_with_those_that_it_can(
    home: Path, tmp_path: Path, capsys: Captured, architecture: str, targets: str, words: str
) -> None:
    chosen = {"model__adapter": "lora", "model__lora_targets": f"'{targets}'" if targets == "(" else targets}
    arguments = settings(home, model__name_or_path=model_folder(architecture), **chosen)
    capsys.readouterr()
    assert cli(["train", *arguments, "--output-dir", str(tmp_path / "run")]) == 2
    said = sentence(capsys)
    assert words in said
    assert "model.lora_targets" in said
    assert "target_modules" not in said
    possible = {
        "mamba": "all-linear, or to some of [in_proj,x_proj]",
        "mixtral": "some of [k_proj,o_proj,q_proj,v_proj]",
    }
    assert possible[architecture] in said or targets == "("
    assert not list(tmp_path.iterdir()), "a refusal left a folder"
