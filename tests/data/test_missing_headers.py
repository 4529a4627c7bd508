"""Tables without a header are recognized or refused; a header is never mistaken for data."""

from pathlib import Path

import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.labels import LABELED
from sansgpu.data.forms.pairs import TEXT_GROUPS
from sansgpu.data.forms.tags import TAGGED
from sansgpu.tasks.graph.sources import open_graphs
from tests.tasks.graph.graph_files import facts, read

FILMS = "a good film\tpos\na bad film\tneg\nanother good one\tpos\n"


def columns(tmp_path: Path, name: str, content: str, **settings: object) -> tuple[object, object]:
    """Returns the text column and the label column chosen for a table with this content."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    data = DataConfig.model_validate({"dataset_name": str(path), **settings})
    found, clause = resolve_columns(data, LABELED)
    assert (clause is None) == (found == data)
    return found.text_column, found.label_column


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (FILMS, (0, 1)),
        ("ham\tsee you at ten\nham\tok then\nspam\twin a prize now\n", (1, 0)),
        ("a good film\t3.5\na bad film\t1.25\n", (0, 1)),
        ("a good film\t1\na bad film\t0\n", (0, 1)),
    ],
)
def test_a_text_and_its_label_are_recognized(tmp_path: Path, content: str, expected: tuple[int, int]) -> None:
    assert columns(tmp_path, "a.tsv", content) == expected
    assert columns(tmp_path, "a.csv", content.replace("\t", ",")) == expected


@pytest.mark.parametrize(
    "content",
    [
        "text\tlabel\n" + FILMS,
        "Text\tsentiment\n" + FILMS,
        "review\tsentiment\n" + FILMS,
        "review text\tsentiment of it\n" + FILMS,
        "review\tsentiment\n" + FILMS + "review\tsentiment\n" + FILMS,  # concatenated tables
        "0,1\na good film,1\na bad film,0\n",  # written by pandas without column names
        "",
    ],
)
def test_a_header_is_never_data(tmp_path: Path, content: str) -> None:
    assert columns(tmp_path, "a.tsv", content) == (None, None)
    assert columns(tmp_path, "a.csv", content) == (None, None)


UNCLEAR = {
    "mail\tspam\nbuy it now\tspam\nsee you at ten\tham\n": "numbers of their columns",  # "spam": column name or label?
    "good\tpos\nbad\tneg\nfine\tpos\n": "numbers of their columns",
    "1\ta good film\tpos\n2\ta bad film\tneg\n": r'\(column 0 is "1", 1 is "a good film", 2 is "pos"\)',
}


@pytest.mark.parametrize(("content", "said"), UNCLEAR.items())
def test_unclear_columns_are_refused_with_the_settings_to_use(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.tsv: its first line looks like data, .*{said}"):
        columns(tmp_path, "a.tsv", content)


def test_names_that_are_set_are_not_replaced(tmp_path: Path) -> None:
    said = "set data.text_column to 0 and data.label_column to 1 if no file has a header"
    with pytest.raises(ConfigError, match=said):
        columns(tmp_path, "a.tsv", FILMS, text_column="review")
    assert columns(tmp_path, "b.tsv", "review\tlabel\n" + FILMS, text_column="review") == ("review", None)


def test_files_with_and_without_a_header_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "held.tsv").write_text("text\tlabel\n" + FILMS)
    with pytest.raises(ConfigError, match="if no file has a header"):
        columns(tmp_path, "a.tsv", FILMS, validation_name=str(tmp_path / "held.tsv"))
    with pytest.raises(ConfigError, match=r"held\.tsv: its first line is a header with the column label"):
        columns(tmp_path, "a.tsv", FILMS, validation_name=str(tmp_path / "held.tsv"), text_column=0, label_column=1)
    data = DataConfig(dataset_name=str(tmp_path / "held.tsv"), label_column=1)
    with pytest.raises(ConfigError, match="its first line is a header with the column label"):
        resolve_columns(data, TEXT_GROUPS)
    (tmp_path / "held.tsv").write_text(FILMS)
    assert columns(tmp_path, "a.tsv", FILMS, validation_name=str(tmp_path / "held.tsv")) == (0, 1)


WORDS = "EU\tB-ORG\nrejects\tO\n\nPeter\tB-PER\nof\tO\nUN\tB-ORG\n"


@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.csv"])
def test_words_with_tags_are_recognized(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = DataConfig(dataset_name=str(path))
    for content in (WORDS, "-DOCSTART-\n\n" + WORDS, WORDS.replace("\t", " NN "), "word\ttag\n" + WORDS):
        path.write_text(content)
        found, clause = resolve_columns(data, TAGGED)
        assert found.tag_column == -1
        assert clause is not None
        assert clause.startswith(f"{path}: its lines look like words with tags")
    for content in (WORDS.replace("\n\n", "\n"), "only words\nin texts\n"):
        path.write_text(content)
        if name == "a.txt":
            assert resolve_columns(data, TAGGED) == (data, None)
        else:
            with pytest.raises(ConfigError, match=r"set data\.tag_column to the number of the tags' column"):
                resolve_columns(data, TAGGED)


def test_a_table_without_a_header_may_be_beside_documents(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(FILMS)
    (tmp_path / "README.md").write_text("Films.\n")
    found, clause = resolve_columns(DataConfig(dataset_name=str(tmp_path)), LABELED)
    assert (found.text_column, found.label_column) == (0, 1)
    assert clause is not None
    (tmp_path / "b.jsonl").write_text('{"text": "a film", "label": "pos"}\n')
    with pytest.raises(ConfigError, match="if no file has a header"):
        resolve_columns(DataConfig(dataset_name=str(tmp_path)), LABELED)


TRIPLES = "01\t_part\t02\n01\t_part\t03\n"


@pytest.mark.parametrize(
    "content", [TRIPLES, "Q1\tP31\tQ2\nQ3\tP31\tQ1\n", "Aspirin\ttreats\tpain\nMorphine\ttreats\tpain\n"]
)
def test_triples_without_a_header_are_those_with_one(tmp_path: Path, content: str) -> None:
    path, headed = tmp_path / "a.tsv", tmp_path / "b.csv"
    path.write_text(content)
    headed.write_text("head,relation,tail\n" + content.replace("\t", ","))
    notes: list[str] = []
    bare = open_graphs(DataConfig(dataset_name=str(path)), notes.append).train.documents()
    assert [facts(document) for document in bare] == [facts(document) for document in read(headed)]
    assumed = "head = column 0, relation = column 1, tail = column 2"
    assert notes == [f"{path}: its first line is a triple, so the file is read without a header: {assumed}."]


@pytest.mark.parametrize("content", ["node1\tlabel\tnode2\n01\tlabel\t02\n", "1\t2\t3\n4\t5\t6\n"])
def test_unclear_triples_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(ConfigError, match="add a first line with the column names, which are head, relation, tail"):
        read(tmp_path / "a.tsv")


def test_the_header_of_a_folder_of_triples_is_not_a_triple(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("head\trelation\ttail\n" + TRIPLES)
    assert [facts(document) for document in read(tmp_path)] == [[("01", "part", "02"), ("01", "part", "03")]]
