"""Tags in all schemes, tables of words and cells with lists are learned as spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.forms.tags import TAGGED, untagged_text
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.tasks.tokens.data import open_tagged
from sansgpu.tasks.tokens.spans import spans_of
from tests.data.forms.tagged_rows import DONE, LISTS, TEXT, TOKENS, learned, one, studio

WORDS = ["Maria", "Silva", "left", "Porto"]


@pytest.mark.parametrize(
    ("tags", "note"),
    [
        ("B-PER I-PER O B-LOC", ""),
        ("I-PER I-PER O I-LOC", "IOB1"),
        ("B-PER E-PER O S-LOC", "BIOES"),
        ("B-PER L-PER O U-LOC", "tags such as L-PER are read as E-PER"),
        ("B_PER I_PER O B_LOC", "tags such as B_PER are read as B-PER"),
        ("PER-B PER-I O LOC-B", "tags such as PER-B are read as B-PER"),
        ("B.PER I.PER O B.LOC", "tags such as B.PER are read as B-PER"),
    ],
)
def test_tags_in_all_schemes_become_iob2(tags: str, note: str, tmp_path: Path) -> None:
    for row in ({"tokens": WORDS, "tags": tags.split()}, {"words": WORDS, "labels": tags.split()},
                {"tokens": " ".join(WORDS), "ner_tags": tags}, {"sentence": " ".join(WORDS), "tag": tags.split()},
                {"tokens": WORDS, "upos": ["X"] * 4, "ner": tags.split()}):  # fmt: skip
        spans, notes = one(row)
        assert spans == ["Maria Silva PER", "Porto LOC"]
        assert note in " ".join(notes)
        assert ("columns not used: 'upos' (1 row)" in notes) == ("upos" in row)
    lines = "\n".join(map(" ".join, zip(WORDS, tags.split(), strict=True)))
    (tmp_path / "a.conll").write_text(f"{lines}\n\n{lines}\n")
    assert learned(tmp_path / "a.conll")[0] == [["Maria Silva PER", "Porto LOC"]] * 2


def test_numbers_of_tags_have_names_or_a_note() -> None:
    row = {"tokens": WORDS, "ner_tags": [1, 2, 0, 3]}
    spans, notes = one(row)
    assert spans_of(["1", "2", "O", "3"], entities=False)[0].label == "1"
    assert notes[0].startswith("rows: the tags are numbers without names, so 0 is read as O")
    assert "set data.labels to their names in order" in notes[0]
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    spans, notes = one(row, labels=names)
    assert spans == ["Maria Silva PER", "Porto LOC"]
    assert "1 = B-PER" in notes[0]
    with pytest.raises(BadRowError, match=r"line 1: its tag 3 has no name among the 3 of data\.labels"):
        one(row, labels=names[:3])


SENTENCES = [["Maria Silva PER"], ["Porto LOC"]]
TABLES = {
    "ner_dataset.csv": "Sentence #,Word,POS,Tag\nSentence: 1,Maria,NN,B-PER\n,Silva,NN,I-PER\n,\",\",P,O\n"
                       "Sentence: 2,Porto,NN,B-LOC\n",
    "filled.csv": "Sentence #,Word,Tag\nSentence: 1,Maria,B-PER\nSentence: 1,Silva,I-PER\nSentence: 2,Porto,B-LOC\n",
    "numbered.tsv": "\tsentence_idx\tword\ttag\n0\t1\tMaria\tB-PER\n1\t1\tSilva\tI-PER\n2\t2\tPorto\tB-LOC\n",
    "rows.jsonl": "\n".join(json.dumps({"sentence_id": n, "token": word, "ner": tag}) for n, word, tag in
                            [(4, "Maria", "B-PER"), (4, "Silva", "I-PER"), (7, "Porto", "B-LOC")]),
    "grouped.csv": "Sentence #,Sentence,Tag\n1,Maria Silva,\"['B-PER', 'I-PER']\"\n2,Porto,['B-LOC']\n",
    "lists.csv": "tokens,ner_tags\nMaria Silva,B-PER I-PER\n['Porto'],['B-LOC']\n",
    "spans.csv": "text,entities\nMaria Silva,\"[(0, 11, 'PER')]\"\nPorto,\"[[0, 5, \"\"LOC\"\"]]\"\n",
    "gaps.csv": "Word,Tag\nMaria,B-PER\nSilva,I-PER\n\nPorto,B-LOC\nran,I-PER\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_words_are_joined_to_sentences(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TABLES[name])
    spans, notes = learned(tmp_path / name)
    assert spans == (SENTENCES if name != "gaps.csv" else [SENTENCES[0], ["Porto LOC", "ran PER"]])
    assert ("columns not used: 'POS' (2 rows)" in notes) == (name == "ner_dataset.csv")


def test_a_table_of_words_without_sentences_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Word,Tag\nMaria,B-PER\nleft,O\n")
    with pytest.raises(ConfigError, match=r"a\.csv .* has no header with the columns `sentence`, `word` and `tag`"):
        learned(tmp_path / "a.csv")


def test_documents_of_spacy_2_have_sentences() -> None:
    tokens = [{"id": 0, "orth": "Maria", "tag": "NN", "ner": "U-PER"}, {"id": 1, "orth": "left", "ner": "-"}]
    paragraph = {"raw": "Maria left", "sentences": [{"tokens": tokens}, {"tokens": tokens[1:]}]}
    spans, notes = learned([{"id": 3, "paragraphs": [paragraph, paragraph]}])
    assert spans == [["Maria PER"], []] * 2
    assert "columns not used: 'tag in a token' (2 rows)" in notes
    for broken in ({"paragraphs": []}, {"paragraphs": [{"raw": "a"}]}, {"paragraphs": [{"sentences": [1]}]}):
        with pytest.raises(BadRowError, match="line 1"):
            learned([broken])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (studio(DONE), TEXT),
        ([TEXT, {"entities": LISTS}], TEXT),
        ({"data": TEXT, "label": LISTS}, TEXT),
        ({"tokenized_text": WORDS, "ner": []}, " ".join(WORDS)),
        ({"words": WORDS}, " ".join(WORDS)),
        ({"text": TEXT, "tokens": TOKENS}, TEXT),
        ({"Word": "Maria", "Tag": "O"}, "Maria"),
    ],
)
def test_rows_to_predict_have_the_same_forms(row: Any, text: str) -> None:
    (single,) = TAGGED.single_rows([SourceRow("rows.jsonl, line 1", row)])
    assert untagged_text(single).text == text


@pytest.mark.parametrize(
    ("tokens", "tags"),
    [
        ("['Rome' 'fell']", "['B-LOC' 'O']"),
        ("""["Rome" 'fell']""", "['B-LOC'\n 'O']"),
        ("array(['Rome', 'fell'], dtype=object)", "array(['B-LOC', 'O'],\n      dtype='<U5')"),
        ("[np.str_('Rome'), np.str_('fell')]", '["B-LOC", "O"]'),
        ("Rome fell", "['B-LOC' 'O']"),
    ],
)
def test_lists_in_cells_are_read_as_numpy_and_pandas_write_them(tokens: str, tags: str) -> None:
    assert one({"tokens": tokens, "tags": tags}) == (["Rome LOC"], [])


@pytest.mark.parametrize("word", ["nan", "NULL", "#N/A", "None", "NA"])
def test_words_of_tables_are_no_missing_values(tmp_path: Path, word: str) -> None:
    path = tmp_path / "words.csv"
    path.write_text(f"Sentence #,Word,Tag\n1,{word},B-LOC\n1,fell,O\n2,Rome,B-LOC\n")
    assert learned(path)[0] == [[f"{word} LOC"], ["Rome LOC"]]


def test_texts_of_label_studio_without_a_label_have_no_spans(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    label = '"[{""start"": 0, ""end"": 4, ""text"": ""Rome"", ""labels"": [""LOC""]}]"'
    path.write_text(f"annotation_id,annotator,id,label,text\n1,1,1,{label},Rome fell\n2,1,2,,It fell\n")
    assert learned(path)[0] == [["Rome LOC"], []]
    spans = [{"start": 0, "end": 4, "text": "Rome", "labels": ["LOC"]}]
    rows = [{"text": "Rome fell", "label": spans}, {"text": "It fell"}]
    assert learned([{**row, "id": 1, "annotator": 1, "annotation_id": 1} for row in rows])[0] == [["Rome LOC"], []]
    with pytest.raises(BadRowError, match="it has no list `spans`"):
        learned(rows)


def test_numbers_in_cells_are_tags_as_numpy_writes_them() -> None:
    spans, notes = one({"tokens": "['a' 'b' 'c']", "tags": "[1 2 0]"}, labels=["O", "B-PER", "I-PER"])
    assert spans == ["a b PER"], notes


def test_tags_with_an_unknown_prefix_are_named() -> None:
    assert learned([{"tokens": ["Ada", "left"], "tags": ["X-PER", "O"]}])[1] == [
        "rows: tags such as X-PER have none of the prefixes B, I, E and S, so each word with one is a span of its own."
    ]


def test_a_configured_column_of_tags_is_for_conll_alone(tmp_path: Path) -> None:
    table, words = tmp_path / "a.csv", tmp_path / "b.conll"
    table.write_text("text,entities\nMaria left,\"[(0, 5, 'PER')]\"\n")
    words.write_text("Maria B-PER NN\nleft O VB\n")
    data = TaggedDataConfig(dataset_name="x", tag_column=1)
    assert next(open_tagged(str(table), data, []).rows()).value["text"] == "Maria left"
    assert next(open_tagged(str(words), data, []).rows()).value["tags"] == ["B-PER", "O"]
