"""The columns of CoNLL files are found by what is in them, and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.conll import conll_layout, conll_rows, spelling_of
from sansgpu.data.files import read_documents, read_rows
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.tags import TAGGED

CONLLU = """# sent_id = 1
# text = Maria vive no Porto
1\tMaria\tMaria\tPROPN\t_\t_\t2\tnsubj\t_\t{0}
2\tvive\tviver\tVERB\t_\t_\t0\troot\t_\t{2}
3-4\tno\t_\t_\t_\t_\t_\t_\t_\t_
3\tem\tem\tADP\t_\t_\t5\tcase\t_\t{2}
4\to\to\tDET\t_\t_\t5\tdet\t_\t{2}
4.1\tlugar\tlugar\tNOUN\t_\t_\t_\t_\t_\t_
5\tPorto\tPorto\tPROPN\t_\t_\t2\tobl\t_\t{1}

"""
WORDS = ["Maria", "vive", "em", "o", "Porto"]
TAGS = ["B-PER", "O", "O", "O", "B-LOC"]
ONTONOTES = """#begin document (bc/cctv/00); part 000
bc/cctv 0 0 Maria NNP (TOP(S* - - - s1 (PERSON) (0)
bc/cctv 0 1 saw VBD * see 01 1 s1 * -
bc/cctv 0 2 New NNP (NP* - - - s1 (GPE* (1
bc/cctv 0 3 York NNP *)) - - - s1 *) 1)

#end document
"""


def layout(tmp_path: Path, content: str, name: str = "a.conll", tag_column: int | None = None) -> tuple[int, int, str]:
    """Returns the columns of the words and of the tags, and what is said about them."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = conll_layout(tmp_path / name, tag_column)
    return found.word, found.tag, found.described() or ""


def sentences(tmp_path: Path, content: str, name: str = "a.conll", tag: int | None = None) -> list[tuple[str, str]]:
    (tmp_path / name).write_text(content, encoding="utf-8")
    rows = [*conll_rows(tmp_path / name, tag)]
    assert all(row.problem is None for row in rows), rows
    return [(" ".join(row.value["tokens"]), " ".join(row.value["tags"])) for row in rows]


@pytest.mark.parametrize(
    "tags",
    [
        ("B-PER", "B-LOC", "O"),
        ("B-PER", "B-LOC", "_"),
        ("NE=B-PER", "SpaceAfter=No|NE=B-LOC", "NE=O"),
        ("NER=B-PER|Gloss=x", "NER=B-LOC", "_"),
        ("Entity=B-PER", "Entity=B-LOC", "SpaceAfter=No"),
    ],
)
@pytest.mark.parametrize("has_comments", [True, False])
def test_words_of_conllu_are_its_second_column(tmp_path: Path, tags: tuple[str, ...], has_comments: bool) -> None:
    content = CONLLU.format(*tags)
    content = content if has_comments else content.split("\n", 2)[2]
    expected = (" ".join(WORDS), " ".join(TAGS))
    for name in ("a.conll", "a.conllu"):
        assert sentences(tmp_path, content * 2, name) == [expected] * 2
    key = f" ({tags[0].partition('=')[0]}=)" if "=" in tags[0] else ", the last"
    said = f"word = column 1, tag = column 9{key} (data.tag_column sets it); columns 2, 3, 4, 5, 6, 7, 8 are not used"
    assert layout(tmp_path, content)[2] == said
    assert sentences(tmp_path, content, tag=3) == [(expected[0], "PROPN VERB ADP DET PROPN")]
    pieces = read_documents(tmp_path / "a.conll", None)
    assert "".join(piece.text for piece in pieces) == expected[0]


def test_a_damaged_line_of_conllu_is_named(tmp_path: Path) -> None:
    content = CONLLU.format("B-PER", "B-LOC", "O").replace("2\tvive\tviver", "vive\tvive\tviver")
    (tmp_path / "a.conllu").write_text(content)
    (row,) = conll_rows(tmp_path / "a.conllu", None)
    assert str(row.problem).startswith(f"{tmp_path / 'a.conllu'}, line 4 does not begin with the number of a word")


def test_conllu_without_entities_has_parts_of_speech(tmp_path: Path) -> None:
    word, tag, said = layout(tmp_path, CONLLU.format("_", "_", "SpaceAfter=No"))
    assert (word, tag) == (1, 3)
    assert said.startswith("word = column 1, tag = column 3 (data.tag_column sets it)")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("EU NNP B-NP B-ORG\nrejects VBZ B-VP O\nGerman JJ B-NP B-MISC\n", (0, -1)),  # CoNLL-2003
        ("EU B-ORG NNP\nrejects O VBZ\n", (0, 1)),
        ("EU NNP B-ORG B-NP\nrejects VBZ O B-VP\n", (0, 2)),
        ("EU x B-ORG NNP y\nrejects x O VBZ y\n", (0, 2)),
        ("EU PER-B NNP\nran PER-I VB\nhere O RB\n", (0, 1)),
        ("1\tEU\tB-ORG\tO\n2\tBank\tI-ORG\tB-LOC\n", (1, 2)),  # GermEval: nested entities in the last column
        ("0 EU B-ORG\n1 ran O\n", (1, -1)),
        ("B-ORG\tEU\nO\trejects\n", (1, 0)),  # MIT Movies
        ("EU NNP B-NP\nrejects VBZ B-VP\n", (0, -1)),  # CoNLL-2000
        ("EU NOUN\nrejects VERB\n", (0, -1)),
        ("EU X O\nrejects Y O\n", (0, -1)),
        ("token\tpos\tner\tother\nEU\tNN\tB-ORG\tx\nran\tVB\tO\ty\n", (0, 2)),
        ("form\tlabel\nEU\tNOUN\nran\tVERB\n", (0, -1)),
    ],
)
def test_the_column_of_the_tags_has_entities(tmp_path: Path, content: str, found: tuple[int, int]) -> None:
    for end in ("", "\n" + content.rpartition("\n")[0].rpartition("\n")[2] + "\n"):  # another sentence of one word
        given = content if content[:1].isdigit() else content + end
        assert layout(tmp_path, given)[:2] == found
    assert "EU" in sentences(tmp_path, content)[0][0].split()[0]


def test_a_choice_between_columns_is_said(tmp_path: Path) -> None:
    said = layout(tmp_path, "EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n")[2]
    assert said == (
        "word = column 0, tag = column 3, the last (column 2 also has entity tags; data.tag_column sets it); columns "
        "1, 2 are not used"
    )
    assert layout(tmp_path, "EU B-ORG\nrejects O\n")[2] == ""
    assert layout(tmp_path, "EU NNP B-ORG\n", tag_column=1)[1] == 1


def test_comments_and_separators_are_no_words(tmp_path: Path) -> None:
    content = (
        "# id 7  domain=train\nthe _ _ O\nsands _ _ B-LOC\n\n# id 8\tdomain=train\n# _ _ O\n\n-DOCSTART- -X- O O\n"
    )
    assert sentences(tmp_path, content) == [("the sands", "O B-LOC"), ("#", "O")]
    assert sentences(tmp_path, "# O\n#tag B-X\n\n#1 a O\n") == [("# #tag", "O B-X"), ("#1", "O")]


def test_the_format_of_webanno_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("#FORMAT=WebAnno TSV 3.3\n\n#Text=Maria left\n1-1\t0-5\tMaria\tPER\t\n1-2\t6-10\tleft\t_\t\n\n")
    with pytest.raises(ConfigError, match=r"a\.tsv is in the format of WebAnno and INCEpTION; export the document as"):
        resolve_columns(DataConfig(dataset_name=str(path)), TAGGED)


def test_brackets_of_ontonotes_are_tags(tmp_path: Path) -> None:
    expected = ("Maria saw New York", "B-PERSON O B-GPE I-GPE")
    assert sentences(tmp_path, ONTONOTES) == [expected]
    assert sentences(tmp_path, ONTONOTES, tag=4) == [(expected[0], "NNP VBD NNP NNP")]


def test_quoted_words_of_a_table_with_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('Word,POS,Tag\nMaria,NNP,B-PER\n",",PU,O\n\nTom,NNP,B-PER\n')
    data, said = resolve_columns(DataConfig(dataset_name=str(path)), TAGGED)
    assert (data.tag_column, "column 1 is not used" in str(said)) == (-1, True)
    assert [row.value for row in read_rows(path, tag_column=-1)] == [
        {"tokens": ["Maria", ","], "tags": ["B-PER", "O"]},
        {"tokens": ["Tom"], "tags": ["B-PER"]},
    ]


def test_files_with_different_columns_need_a_setting(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("EU NN B-ORG\nrejects VB O\n\nUN NN B-ORG\n")
    (tmp_path / "valid.txt").write_text("EU B-ORG NN\nrejects O VB\n\nUN B-ORG NN\n")
    data = DataConfig(dataset_name=str(tmp_path / "train.txt"), validation_name=str(tmp_path / "valid.txt"))
    with pytest.raises(ConfigError, match=r"in different columns .*train\.txt in column -1; .*set data\.tag_column"):
        resolve_columns(data, TAGGED)


def test_files_with_other_suffixes_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "eng.train"
    path.write_text("EU B-ORG\nrejects O\n\nUN B-ORG\n")
    data, said = resolve_columns(DataConfig(dataset_name=str(path)), TAGGED)
    assert data.tag_column == -1
    assert str(said).startswith(f"{path}: its lines look like words with tags")


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O", "B-PER I-PER O"),
        ("B_PER I_PER O", "B-PER I-PER O"),
        ("PER-B PER-I O", "B-PER I-PER O"),
        ("PER_B PER_I O", "B-PER I-PER O"),
        ("B.PER I.PER O", "B-PER I-PER O"),
        ("b-per i-per o", "B-per I-per O"),
        ("U-PER B-a_B L-a_B O", "S-PER B-a_B E-a_B O"),
        ("B-x M-x E-x W-x O", "B-x I-x E-x S-x O"),
        ("NOUN VERB PRP$ -LRB-", None),
        ("A-B C-B", None),  # no word is outside of spans, so these are names
        ("O", None),
    ],
)
def test_tags_are_spelled_in_several_ways(tags: str, expected: str | None) -> None:
    spelling = spelling_of(tags.split())
    assert (spelling and [spelling.standard(tag) for tag in tags.split()]) == (expected and expected.split())
