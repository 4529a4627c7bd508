"""`sansgpu data` shows what a dataset contains, guesses its task, and never changes it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.preview.canonical import same_content
from sansgpu.data.sources import open_sources
from sansgpu.jobs.data import DataRequest, guess_tasks, look
from tests.processes import Captured, options, write_rows
from tests.tasks.folders import labeled_rows, model_folder, squad

ASKED, GIVEN = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}


def ignore(*_: object) -> None:
    """Shows no progress."""


def looked(path: Path, **options: Any) -> Any:
    return look(DataRequest(str(path), **options), ignore)


def shown(capsys: Captured, *arguments: object) -> str:
    assert cli(["data", *map(str, arguments)]) == 0
    return capsys.readouterr().out


GUESSES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"messages": [ASKED, GIVEN]}),
    ("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": "x"}),
    ("sft", {"instruction": "a", "input": "", "output": "b", "category": "open"}),
    ("sft", {"prompt": "a", "completion": "b"}),
    ("grpo", {"messages": [ASKED], "answer": "4"}),
    ("sft", {"prompt": "a", "answer": "b"}),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}),
    ("preference", {"messages": [ASKED, GIVEN], "label": True}),
    ("classify", {"text": "a b", "label": 3}),
    ("classify", {"id": 7, "content": "a b", "labels": ["x", "y"]}),
    ("classify", {"text": "a", "text_pair": "b", "label": "entailment"}),
    ("embed", {"anchor": "a", "positive": "b", "negative": "c"}),
    ("embed", {"sentence1": "a", "sentence2": "b", "score": 0.5}),
    ("tokens", {"tokens": ["a", "b"], "ner_tags": ["O", "B-X"]}),
    ("tokens", {"text": "a b", "spans": []}),
    ("qa", {"id": "1", "question": "q", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}}),
    ("pretrain", {"text": "a b", "id": "<urn:1>", "url": "http://a", "token_count": 2}),
    ("pretrain", {"title": "t", "text": "a b"}),
    ("graph", {"head": "a", "relation": "b", "tail": "c"}),
    ("graph", {"text": "a b", "triples": [{"head": "a", "relation": "is", "tail": "b"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("task", "row"), GUESSES, ids=range(len(GUESSES)))
def test_the_task_is_guessed_from_the_rows(task: str, row: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row])
    found = looked(path)
    assert (found.task, found.task_is_guessed, found.splits[0].usable) == (task, True, 1)
    assert guess_tasks(str(path))[0].task == task
    assert len(found.examples) == 1, "one row is enough for a look"
    assert [one.text for part in found.examples[0].parts for one in part.segments]


FILES: list[tuple[str, str, str]] = [
    ("pretrain", "a.txt", "a text\nof two lines"),
    ("pretrain", "a.py", "print()\n"),
    ("classify", "a.tsv", "text\tlabel\na b\tx\nc d\ty\n"),
    ("classify", "a.csv", "1,a good film\n0,a bad film\n1,another good film\n"),
    ("tokens", "a.txt", "Ada B-PER\nlived O\n\nTom B-PER\nsaw O\n\n"),
    ("graph", "a.tsv", "Ada Byron\tlived in\tLondon\nTom\tlived in\tRome\nTom\tsaw\tAda Byron\n"),
    ("classify", "train/pos/a.txt", "good"),
]


@pytest.mark.parametrize(("task", "name", "text"), FILES, ids=[f"{task}-{name}" for task, name, _ in FILES])
def test_the_task_is_guessed_from_files_without_columns(task: str, name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    given = tmp_path / "data" if "/" in name else path
    assert looked(given).task == task


def test_pairs_of_inference_are_shown_as_the_triplets_that_are_learned(tmp_path: Path) -> None:
    rows = [{"premise": "p", "hypothesis": f"h{n}", "label": n} for n in (0, 1, 2)]
    found = looked(write_rows(tmp_path / "rows.jsonl", rows), task="embed")
    assert [part.text for part in found.examples[0].parts] == ["p", "h0", "h2"]
    assert (found.splits[0].usable, found.splits[0].bad_rows, found.scores) == (1, 0, None)
    assert "1 triplet of a premise" in found.notes[0]


def test_the_form_names_the_columns_of_text_and_label(tmp_path: Path) -> None:
    rows = [{"sentence": "a film", "label": 1, "idx": 0}]
    found = looked(write_rows(tmp_path / "rows.jsonl", rows), task="classify")
    assert [*found.splits[0].forms] == ["sentence + label"]


@pytest.mark.parametrize("row", [{"Text": "Ada left", "Spans": [{"start": 0, "end": 3, "label": "PER"}]},
                                 {"Tokens": ["Ada"], "NER": [[0, 0, "PER"]]}])  # fmt: skip
def test_the_task_of_rows_with_capitals_is_guessed(tmp_path: Path, row: dict[str, Any]) -> None:
    found = looked(write_rows(tmp_path / "rows.jsonl", [row]))
    assert (found.task, found.splits[0].usable) == ("tokens", 1)


def test_rows_that_no_task_reads_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"foo": "a", "bar": "b"}])
    with pytest.raises(ConfigError, match="no task reads rows with foo, bar; choose one with --task"):
        looked(path)
    with pytest.raises(ConfigError, match=r"no row is usable for task classify: .*line 1 has no column label"):
        looked(path, task="classify")
    assert looked(path, overrides=("data.text_column=foo", "data.label_column=bar")).task == "classify"
    with pytest.raises(ConfigError, match="--task is 'poetry', but must be one of pretrain"):
        looked(path, task="poetry")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="has no rows"):
        looked(tmp_path / "empty.jsonl", task="sft")
    with pytest.raises(ConfigError, match="does not exist"):
        looked(tmp_path / "none.jsonl")


def test_what_is_read_is_shown_and_the_data_stay(tmp_path: Path, capsys: Captured) -> None:
    rows = [{"messages": [ASKED, GIVEN], "note": "x"}, {"prompt": "a", "completion": "b"}, {"prompt": "a"}, "{"]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    before = path.read_bytes()
    out = shown(capsys, path)
    flat = " ".join(out.split())
    assert "form messages (1 row), prompt + completion (1) used" in flat
    assert "unused columns 'note' (1 row)" in flat
    assert "left out 2 of 4 rows" in flat
    assert "line 4 is not valid JSON" in flat
    assert "assistant: ⟦4⟧" in out
    assert path.read_bytes() == before
    assert "left out:" in shown(capsys, path, "--row", 3).split("--- row 3")[1]
    everything = shown(capsys, path, "--all")
    assert re.findall(r"^--- row (\d)", everything, re.MULTILINE) == ["1", "2", "3", "4"]
    assert cli(["data", str(path), "--row", "5"]) == 2
    assert capsys.readouterr().err == f"sansgpu: --row is 5, but {path} has only 4 rows; lower it.\n"
    assert cli(["data", str(path), "--row", "1", "--all"]) == 2


def test_json_has_all_facts(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "data"
    path.mkdir()
    write_rows(path / "train.jsonl", [{"text": f"some text {n % 5}", "label": "yx"[n % 2]} for n in range(20)])
    write_rows(path / "valid.jsonl", [{"text": "some text 1", "label": "x"}, {"text": "new words here", "label": "y"}])
    found = json.loads(shown(capsys, path, "--json"))
    assert [split["part"] for split in found["splits"]] == ["training", "validation"]
    assert found["labels"]["mapping"] == [["x", 10], ["y", 10]]
    assert found["labels"]["different"] == 5
    assert found["repetition"] == {"equal": 15, "nearly": 0, "validation_equal": 1, "validation_nearly": 0}
    assert (found["held_out"], found["lengths"]["unit"], found["scripts"]) == (None, "words", {"Latin": 1.0})


def test_a_page_is_written_and_never_over_another_file(tmp_path: Path, capsys: Captured) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "<b>bold</b>", "label": "x"}, {"text": "b", "label": "y"}])
    page = tmp_path / "page.html"
    for _ in range(2):
        shown(capsys, path, "--report", page)
    text = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert "<b>bold" not in text
    assert all(part in text for part in ("<mark>x</mark>", "Texts by length in words", "0 = x (1)"))
    assert len(text) < 50_000, "no library for plots"
    assert cli(["data", str(path), "--report", str(path)]) == 2
    assert "was not written by this command" in capsys.readouterr().err


def test_rows_are_written_in_one_form_that_reads_the_same(tmp_path: Path, capsys: Captured) -> None:
    given = write_rows(tmp_path / "chats.jsonl", [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 1},
        {"prompt": "broken"},
        {"instruction": "a", "output": "b"},
    ])  # fmt: skip
    for kind, path in (("conversations", given), ("questions", squad(tmp_path / "squad.json", impossible=True))):
        out = tmp_path / f"{kind}.jsonl"
        shown(capsys, path, "--write", out)
        before, after = (
            FORMS[kind].single_rows(open_sources(DataConfig(dataset_name=str(one))).train.rows()) for one in (path, out)
        )
        old = [FORMS[kind].read(row) for row in before if row.value != {"prompt": "broken"}]
        new = [FORMS[kind].read(row) for row in after]
        assert len(old) == len(new) > 1
        assert all(same_content(one, other) for one, other in zip(old, new, strict=True))
    assert json.loads((tmp_path / "conversations.jsonl").read_text().splitlines()[0]) == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }
    assert cli(["data", str(given), "--write", str(given)]) == 2
    assert capsys.readouterr().err == f"sansgpu: --write {given} exists; choose another name.\n"


def test_a_damaged_row_is_left_out_and_a_damaged_file_is_read_as_far_as_possible(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text,label\ngood one,x\nbad one,y\n"open,z\n')
    found = looked(path).splits[0]
    assert (found.usable, "is not valid CSV" in found.left_out[0].first) == (2, True)
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "a.jsonl", [{"text": "good one", "label": "x"}, {"text": "bad one", "label": "y"}])
    (folder / "b.json").write_text("[{")
    found = looked(folder).splits[0]
    assert (found.usable, "b.json is not valid JSON" in str(found.problem)) == (2, True)


def test_a_model_shows_its_tokens(tmp_path: Path) -> None:
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": [ASKED, GIVEN]}])
    (part,) = looked(chats, model=str(model_folder("qwen2"))).examples[0].parts
    assert [one.text for one in part.segments if one.special and one.learned] == ["<|im_end|>"]
    learned = [one.text for one in part.segments if one.learned]
    assert "".join(learned) == "4<|im_end|>"
    assert part.learned_tokens == 2 < part.tokens
    found = looked(labeled_rows(tmp_path / "rows.jsonl"), model=str(model_folder("bert")))
    assert (found.lengths.unit, found.lengths.max_length) == ("tokens", 256)
    text, label = found.examples[0].parts
    assert (text.segments[0].text, text.segments[-1].text, label.name) == ("[CLS]", "[SEP]", "label")
    spans = write_rows(tmp_path / "s.jsonl", [{"text": "a red fox", "spans": [{"start": 2, "end": 5, "label": "C"}]}])
    (part,) = looked(spans, model=str(model_folder("bert"))).examples[0].parts
    assert [(one.text.strip(), one.label) for one in part.segments if one.label] == [("red", "C")]
    assert "".join(one.text for one in part.segments if not one.special) == "a red fox"


def test_a_dry_run_shows_the_columns_and_the_rows_that_are_left_out(tmp_path: Path, capsys: Captured) -> None:
    rows: list[Any] = [json.loads(line) for line in labeled_rows(tmp_path / "a.jsonl").read_text().splitlines()]
    path = write_rows(
        tmp_path / "rows.jsonl", [*({**row, "source": "x"} for row in rows), {"text": "", "label": "warm"}]
    )
    chosen = {"task": "classify", "data.dataset_name": path, "model.name_or_path": model_folder("bert")}
    arguments = [*options(chosen, {"data.on_bad_row": "skip", "training.max_steps": 1, "training.batch_size": 2})]
    assert cli(["train", *arguments, "--dry-run", "--output-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["config"]["task"] == "classify"
    lines = [line.removeprefix("# data ") for line in out.splitlines() if line.startswith("# data ")]
    assert f"unused columns: 'source' ({len(rows)} rows)" in lines
    assert f"  1: {path}, line {len(rows) + 1}: its text is empty; fix or remove the row." in lines
    assert lines[0] == f"rows: {len(rows) + 1} in {path}"


def test_init_proposes_the_task_of_the_rows(
    tmp_path: Path, capsys: Captured, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(model_folder("bert")), "--hours", "0.1", "--yes"]
    assert cli(["init", "a.yaml", "--text", str(labeled_rows(tmp_path / "rows.jsonl")), *model]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"labeled texts: text \+ label \(48 rows, about \d+ tokens\), for task classify", shown)
    assert yaml.safe_load(Path("a.yaml").read_text())["task"] == "classify"


def test_rows_that_are_lists_of_turns_are_conversations(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [[ASKED, GIVEN], [ASKED], {"messages": [ASKED, GIVEN]}])
    found = looked(path)
    (split,) = found.splits
    assert (found.task, split.usable, split.left_out[0].rows) == ("sft", 2, 1)
    assert (split.forms, split.used) == ({"messages": 2}, {"messages": 2})
    assert [part.name for part in found.examples[0].parts] == ["user", "assistant"]


BROKEN: list[tuple[str, str]] = [
    ("{\n  'text': 'a'\n}\n", "line 1 is not valid JSON"),
    ("{'text': 'a'}\n", "line 1 is not valid JSON: Expecting property name"),
    ('{"text": "a", "label": "x"},\n{"text": "b", "label": "y"},\n', "line 1 is not valid JSON: Extra data"),
    ('{\n  "text": "a"\n}\n', "line 1 is not valid JSON"),
    ('[\n{"text": "a"},\n', "line 1 is not valid JSON"),
    ("3\n4\n", "line 1 is of type int instead of an object with columns"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=range(len(BROKEN)))
def test_lines_that_are_no_rows_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        looked(path)


def test_the_reason_of_the_task_that_fits_best_is_named(tmp_path: Path) -> None:
    good = {"messages": [ASKED, GIVEN]}
    path = write_rows(tmp_path / "rows.jsonl", [good, good, *[{"messages": [{"role": "wizard", "content": "a"}]}] * 5])
    with pytest.raises(
        ConfigError, match=r"fits task sft best, but only 2 of the first 7 rows are valid for it; .*line 3"
    ):
        looked(path)


def test_a_folder_from_the_hub_is_guessed_from_its_rows(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A dataset\n")
    for part in ("train", "test"):
        write_rows(folder / f"{part}.jsonl", [{"messages": [ASKED, GIVEN], "source": part}])
    found = looked(folder)
    assert (found.task, found.splits[0].rows, found.splits[0].left_out) == ("sft", 1, ())
    assert capsys.readouterr().err.count("warning: 1 text file beside files with rows left out (README.md)") == 1
    for part in ("train", "test"):
        write_rows(folder / f"{part}.jsonl", [{"text": f"{part} {label}", "label": label} for label in "xy"])
    found = looked(folder)
    assert (found.task, found.splits[0].rows, found.splits[0].left_out) == ("classify", 2, ())
    source = open_sources(DataConfig(dataset_name=str(folder))).train
    assert "# A dataset" in "".join(piece.text for piece in source.read()), "pretraining reads all files"


def test_numbers_with_decimal_commas_are_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text;label\n" + "".join(f"text {n};{n},5\n" for n in range(4)))
    scores = looked(tmp_path / "rows.csv", task="classify").scores
    assert (scores.smallest, scores.largest) == (0.5, 3.5)


def test_the_reason_is_given_why_spans_do_not_fit(tmp_path: Path) -> None:
    spans = [{"start": 0, "end": 3, "label": "PER"}], [{"start": 5, "end": 40, "label": "PER"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "Ada lived here.", "spans": given} for given in spans])
    (reason,) = looked(path, task="tokens").splits[0].left_out
    assert "span 0 from 5 to 40 is empty or not within the 15 characters of the text" in str(reason)


def test_rows_are_written_only_to_new_files_of_json_lines(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "rows.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    for name in ("w.csv", "w.parquet", "w.jsonl.gz", "w"):
        assert cli(["data", str(folder), "--write", str(tmp_path / name)]) == 2
        assert "must end in .jsonl" in capsys.readouterr().err
    assert cli(["data", str(folder), "--write", str(folder / "new.jsonl")]) == 2
    assert "is in the folder of the data" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "rows.jsonl"]


def test_rows_that_a_run_refuses_are_left_out(tmp_path: Path, capsys: Captured) -> None:
    answers = {"text": ["b"], "answer_start": [2]}
    question = {"id": "1", "question": "q", "context": "a b", "answers": answers}
    split = looked(write_rows(tmp_path / "qa.jsonl", [question, question])).splits[0]
    assert (split.usable, "an earlier question has the same id" in split.left_out[0].first) == (1, True)
    rows = [{"anchor": "a", "positive": "b"}, {"sentence1": "a", "sentence2": "b", "score": 0.5}]
    split = looked(write_rows(tmp_path / "embed.jsonl", rows), task="embed").splits[0]
    assert (split.usable, "it has two texts and a score, but" in split.left_out[0].first) == (1, True)
    rows = [{"messages": [ASKED, GIVEN]}] * 20 + [{"messages": [ASKED]}] * 11
    out = shown(capsys, write_rows(tmp_path / "chats.jsonl", rows))
    assert "11 of 31 rows (a run stops, because they are more than data.max_bad_rows=" in " ".join(out.split())


def test_turns_of_answers_are_shown_one_by_one(tmp_path: Path, capsys: Captured) -> None:
    chosen = [GIVEN, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}]
    row = {"prompt": [ASKED], "chosen": chosen, "rejected": [{"role": "assistant", "content": "5"}]}
    out = shown(capsys, write_rows(tmp_path / "rows.jsonl", [row]))
    assert "chosen, user: Sure?\nchosen, assistant: ⟦Yes⟧\nrejected: ⟦5⟧" in out


def test_forms_are_named_by_the_columns_of_the_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"sent0": "a", "sent1": "b"}])
    assert looked(path, task="embed").splits[0].forms == {"sent0 + sent1": 1}
    path = tmp_path / "empty.csv"
    path.touch()
    with pytest.raises(ConfigError, match=r"empty\.csv has no rows; add some"):
        looked(path)
    path = tmp_path / "rows.json"
    path.write_bytes(json.dumps([{"text": "a", "label": "x"}]).encode("utf-16"))
    assert any(note.endswith("; data.encoding changes this.") for note in looked(path).notes)


def test_a_model_shows_what_its_template_leaves_out(tmp_path: Path) -> None:
    thought = {**GIVEN, "weather": "fine"}
    rows = [{"messages": [ASKED, thought], "tools": [{"name": "f"}]}]
    notes = looked(write_rows(tmp_path / "rows.jsonl", rows), model=str(model_folder("qwen2"))).notes
    assert any("not used by the chat template: " in note and "'tools' (1 row)" in note for note in notes)
