"""Every command adds the same special tokens to a text as transformers' `tokenizer(text)`."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sansgpu.cli import run as cli
from sansgpu.models.generation.generate import stream
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.huggingface.generation import pretrained_single
from tests.processes import Captured, json_of, options, settings
from tests.tasks.tokenizer_kinds import KINDS, TEXT, folder_of, tokenizer_of

pytestmark = pytest.mark.usefixtures("home")
# The other kinds are trained on and evaluated before a release.
OFTEN = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("gpt2", "llama", "wordpiece") else pytest.mark.long) for k in KINDS]
)


@cache
def folder(kind: str) -> Path:
    return folder_of(Path(mkdtemp(prefix=f"tiny-{kind}-")), kind)


def loaded(kind: str) -> tuple[Any, Any]:
    """Returns transformers' model and tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder(kind)).eval(), AutoTokenizer.from_pretrained(folder(kind))


def loss_of(model: Any, rows: list[tuple[list[int], int]]) -> float:
    """Returns the cross-entropy summed over all rows, each from its given position on."""
    total = 0.0
    for ids, first in rows:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, first - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[first:]), reduction="sum"))
    return total


@OFTEN
def test_eval_begins_and_ends_a_text_as_transformers_does(kind: str, tmp_path: Path, capsys: Captured) -> None:
    texts = [TEXT, "A second, shorter text."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model, tokenizer = loaded(kind)
    rows = [tokenizer(text).input_ids for text in texts]
    total, tokens = loss_of(model, [(ids, 1) for ids in rows]), sum(len(ids) - 1 for ids in rows)
    found = json_of(capsys, "eval", folder(kind), "--data", tmp_path / "texts.jsonl")
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-4)
    size = sum(len(text.encode()) for text in texts)
    if KINDS[kind] is None:  # no token precedes the first one, so it is not predicted
        size -= sum(tokenizer(text, return_offsets_mapping=True).offset_mapping[0][1] for text in texts)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-4)


def test_every_window_of_a_long_text_begins_as_a_text_does(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder("glm")).eval()
    ids = AutoTokenizer.from_pretrained(folder("glm"))(TEXT).input_ids
    before, rows, place = ids[:2], [(ids[:17], 1)], 16
    while place + 1 < len(ids):  # 16 inputs: two special tokens, the previous window's last token, 13 more
        rows.append(([*before, *ids[place : place + 15]], 3))
        place += 14
    found = json_of(capsys, "eval", folder("glm"), "--data", tmp_path / "text.txt", "--window", 16)
    assert found["loss"] == pytest.approx(loss_of(model, rows) / (len(ids) - 1), rel=1e-4)
    assert cli(["eval", str(folder("glm")), "--data", str(tmp_path / "text.txt"), "--window", "2"]) == 2
    assert "is filled by the 2 special tokens" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_continued_after_its_first_tokens_and_without_its_end_token(kind: str) -> None:
    model, tokenizer = loaded(kind)
    ids = tokenizer("The café").input_ids
    ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
    with torch.no_grad():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0]
    single = pretrained_single(model, tokenizer)
    written = "".join(stream(single, single.text_ids("The café"), 6, Sampling(temperature=0)))
    assert written == tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)


@OFTEN
def test_training_reads_a_text_as_transformers_begins_it(kind: str, tmp_path: Path, capsys: Captured) -> None:
    """The end-of-text token has a loss even if the tokenizer does not add it."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [TEXT, "one"] * 2)
    (tmp_path / "rows.jsonl").write_text(rows)
    run = tmp_path / "run"
    chosen = {
        "task": "sft", "model.name_or_path": folder(kind), "data.dataset_name": tmp_path / "rows.jsonl",
        "data.validation_name": tmp_path / "rows.jsonl", "data.max_length": 512, "training.max_steps": 1,
        "training.learning_rate": 1e-12, "training.warmup_steps": 0, "training.batch_size": 1, "training.threads": 1,
        "training.gradient_accumulation_steps": 1, "training.precision": "fp32", "training.compile": "off",
        "training.report_to": "none", "device": "cpu", "training.weight_decay": 0,
    }  # fmt: skip
    assert cli(["train", *options(chosen), "--output-dir", str(run)]) == 0
    model, tokenizer = loaded(kind)
    texts = [tokenizer(text).input_ids for text in (TEXT, "one")]
    ended = [ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id] for ids in texts]
    first = 2 if kind == "glm" else 1  # special tokens at the start are not targets
    total, tokens = loss_of(model, [(ids, first) for ids in ended]), sum(len(ids) - first for ids in ended)
    found = json_of(capsys, "eval", run)
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-4)
    size = len((TEXT + "one").encode())
    if KINDS[kind] is None:
        size -= sum(tokenizer(t, return_offsets_mapping=True).offset_mapping[0][1] for t in (TEXT, "one"))
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-4)


@pytest.mark.parametrize("kind", ["wordpiece", "llama", "added", "char"])
def test_bits_per_byte_of_training_count_the_bytes_of_the_text(kind: str, tmp_path: Path, capsys: Captured) -> None:
    """WordPiece drops spaces and accents and replaces unknown words; SentencePiece prepends a space."""
    text = "Zoë's naïve café ▁ déjà vu 世界, ÄÖÜß! "
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (text, "x" + text)))
    name = "char"
    if kind != "char":
        made = tokenizer_of("gpt2" if kind == "added" else kind)
        made.add_tokens(["ÄÖÜß", "世界"])
        made.save(str(tmp_path / "tokenizer.json"))
        name = str(tmp_path / "tokenizer.json")
    data = tmp_path / "text.jsonl"
    chosen = settings(
        data__dataset_name=data, data__validation_name=data, data__tokenizer=name, training__max_steps=1,
        model__vocab_size="null", data__max_length=16,
    )  # fmt: skip
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run")]) == 0
    found = json_of(capsys, "eval", tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/tokenizer")
    tokens = sum(len(tokenizer(t, add_special_tokens=False).input_ids) + 1 for t in (text, "x" + text))
    size = 2 * len(text.encode()) + 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * tokens / math.log(2) / size, rel=1e-6)
