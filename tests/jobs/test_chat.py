"""`chat` repeats answers that a model has learned, and refuses models that cannot chat."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sansgpu.cli import run as cli
from sansgpu.jobs.generate import ChatSession
from sansgpu.models.generation.sampling import Sampling
from sansgpu.train.loading import ModelRequest
from tests import processes
from tests.processes import events_of, write_corpus, write_rows
from tests.tasks.fine_tuned import Captured, made, sentence
from tests.tasks.folders import NAMES, model_folder, squad

pytestmark = pytest.mark.usefixtures("home")


def answers() -> dict[str, str]:
    words = NAMES.split()
    return {
        f"What follows {word}?": f"{words[(n * 7 + 3) % 16]} {words[(n * 5 + 1) % 16]}" for n, word in enumerate(words)
    }


@pytest.fixture(scope="module")
def learned(home: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in answers().items()
    ]
    write_rows(home / "short.jsonl", rows)
    return made(
        home, "learned", data__dataset_name=home / "short.jsonl", data__validation_name=home / "short.jsonl",
        training__batch_size=16, training__gradient_accumulation_steps=1, training__max_steps=120,
        training__learning_rate=0.005, training__eval_steps=60, training__save_steps=0,
        training__sample_tokens=20, training__sample_prompt="What follows red?",
    )  # fmt: skip


def test_a_model_learns_and_repeats_what_it_learned(learned: Path, capsys: Captured) -> None:
    assert events_of(learned, "step")[-1]["loss"] < 0.1
    assert events_of(learned, "eval")[-1]["loss"] < 0.1
    for question, answer in list(answers().items())[:2]:
        for target in (learned, learned, learned / "final"):
            capsys.readouterr()
            assert cli(["chat", str(target), "--prompt", question, "--temperature", "0"]) == 0
            assert capsys.readouterr().out == answer + "\n"


def test_a_conversation_comes_from_a_pipe(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    first, second = list(answers().items())[:2]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{first[0]}\n/new\n\n{second[0]}\n"))
    assert cli(["chat", str(learned), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{first[1]}\n{second[1]}\n"
    for message, code in (
        ("Grüße aus 日本".encode(), 0),
        (b"Gr\xfc\xdfe", 2),
    ):  # UTF-8, whatever the locale, and Latin-1
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(message), encoding="ascii"))
        assert cli(["chat", str(learned), "--max-new-tokens", "1"]) == code
    assert "standard input is not UTF-8 text (byte 0xfc)" in capsys.readouterr().err


def test_a_conversation_is_remembered_until_it_is_reset(learned: Path) -> None:
    conversation = ChatSession(ModelRequest(str(learned)), "Be short.", pytest.fail)
    question, said = "What follows red?", []
    for _ in range(2):
        said.append("".join(conversation.say(question, 8, Sampling(temperature=0))))
    assert [turn["content"] for turn in conversation.messages] == ["Be short.", question, said[0], question, said[1]]
    conversation.reset()
    assert [turn["role"] for turn in conversation.messages] == ["system"]
    assert "".join(conversation.say(question, 8, Sampling(temperature=0))) == said[0]


STRICT = """{% if style != 'brief' %}{{ raise_exception('style is ' ~ style) }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_template_variables_of_training_are_those_of_every_command(home: Path, capsys: Captured) -> None:
    rows = [{"messages": [{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant")]} for n in range(8)]
    data, template = write_rows(home / "brief.jsonl", rows), home / "strict.jinja"
    template.write_text(STRICT, encoding="utf-8")
    run = made(
        home, "brief", data__dataset_name=data, data__chat_template=template, training__max_steps=1,
        data__template_variables="{style: brief}", training__sample_prompt="red", training__sample_tokens=1,
    )  # fmt: skip
    assert cli(["eval", str(run)]) == 0
    prompts = write_rows(home / "asked.jsonl", [{"messages": row["messages"][:1]} for row in rows[:2]])
    for target in (run, run / "final"):
        for style, code in ((None, 0), ("brief", 0), ("long", 2), ("[brief]", 2)):
            chosen = [] if style is None else ["--template-variable", f"style={style}"]
            capsys.readouterr()
            assert cli(["chat", str(target), "--prompt", "red", "--max-new-tokens", "1", *chosen]) == code
            assert ("rejects this conversation (style is " in capsys.readouterr().err) == bool(code)
    exported = AutoTokenizer.from_pretrained(run / "final")
    assert exported.apply_chat_template(rows[0]["messages"], tokenize=False).startswith("<|im_start|>user\nuser 0")
    named = ["--data", str(prompts), "--output", str(home / "answered.jsonl"), "--max-new-tokens", "1"]
    for options, code, words in (
        (["chat", str(run), "--prompt", "red", "--template-variable", "styl=brief"], 2, "did you mean style?"),
        (["chat", str(run), "--prompt", "red", "--template-variable", "brief"], 2, "a name and a value"),
        (["generate", str(run), "--prompt", "red", "--template-variable", "style=brief"], 2, "require --data"),
        (["generate", str(run), *named, "--template-variable", "style=long"], 2, "style is long"),
        (["generate", str(run), *named, "--template-variable", "style=brief"], 0, ""),
    ):
        capsys.readouterr()
        assert cli(options) == code
        assert words in capsys.readouterr().err


def test_models_that_cannot_chat_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl")
    small = processes.settings(data__dataset_name=data, training__max_steps=1)
    assert cli(["train", *small, "--output-dir", str(tmp_path / "pretrained")]) == 0
    silent = shutil.copytree(model_folder("qwen2"), tmp_path / "silent")
    (silent / "chat_template.jinja").unlink()
    squad(home / "squad.json")
    asked = made(home, "asked", "qa")
    capsys.readouterr()
    for target, words in (
        (tmp_path / "pretrained", "sansgpu generate"),
        (silent, "has no chat template"),
        (asked, "task qa"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        assert cli(["chat", str(target), "--prompt", "hello"]) == 2
        assert words in sentence(capsys)
