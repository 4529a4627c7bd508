"""Files and folders are read as the splits of a graph."""

from pathlib import Path

import datasets
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.graphs import GraphDocument, Triple
from sansgpu.tasks.graph.sources import GraphSources, open_graph_part, open_graphs
from tests.tasks.graph.graph_files import GOOD, Write, facts, opened, read


def parts(graphs: GraphSources) -> list[list[str]]:
    """Returns the document ids of the training, validation and test split."""
    sources = [graphs.train, graphs.validation, graphs.test]
    return [[document.id for document in source.documents()] if source else [] for source in sources]


@pytest.fixture
def folder(write: Write) -> Path:
    write("01\t_has_part\t02", "03\tbelongs_to\t01", "01\t_also_see\t04", "01\t_has_part\t02", name="train.tsv")
    write("02\t_has_part\t03", name="dev.tsv")
    write("03\t_also_see\t01", "04\t_also_see\t01", name="test.tsv")
    write("01\ttree, a tall plant", "02\tleaf", "03\ttwig, small branch, thin", name="entity2text.txt")
    return write("_has_part\thas part", "_unused\t", name="relation2text.txt").parent


def test_a_folder_of_triples_has_splits_and_texts(folder: Path) -> None:
    graphs = opened(folder)
    assert parts(graphs) == [["01", "03"], ["02"], ["03", "04"]]
    tree, twig = graphs.train.documents()
    assert tree == GraphDocument(
        "01",
        "01",
        "tree, a tall plant",
        (Triple("tree", "has part", "leaf", (0, 4), "01", "02"), Triple("tree", "also see", "04", (0, 4), "01", "04")),
        about="01",
    )
    assert facts(twig) == [("twig", "belongs to", "tree")]


def test_names_and_descriptions_of_entities_may_be_in_separate_files(folder: Path, write: Write) -> None:
    before = opened(folder).train.fingerprint
    write("01\tTree, tall", "02\tleaf", name="entity2text.txt")
    write("01\tA plant, tall and thin.", "03\tTwigs are small.", name="entity2textlong.txt")
    tree, twig = read(folder)
    assert tree.text == "Tree, tall: A plant, tall and thin."
    assert [(t.head, t.tail, t.head_span) for t in tree.triples] == [
        ("Tree, tall", "leaf", (0, 10)),
        ("Tree, tall", "04", (0, 10)),
    ]
    assert (twig.text, facts(twig)) == ("03: Twigs are small.", [("03", "belongs to", "Tree, tall")])
    (leaf,) = [d for d in read(folder, inverse=True) if d.id == "02"]
    assert (leaf.text, facts(leaf)) == ("leaf", [("leaf", "inverse of has part", "Tree, tall")])
    seen = [before, opened(folder).train.fingerprint]
    write("01\tAnother text.", name="entity2textlong.txt")
    assert len({*seen, opened(folder).train.fingerprint}) == 3


def test_inverse_triples_of_a_folder_stay_in_their_split(folder: Path) -> None:
    assert parts(opened(folder, inverse=True)) == [["01", "02", "03", "04"], ["02", "03"], ["03", "01", "04"]]
    found = {d.id: d for d in read(folder, inverse=True)}
    assert facts(found["01"]) == [
        ("tree", "has part", "leaf"),
        ("tree", "inverse of belongs to", "twig"),
        ("tree", "also see", "04"),
    ]
    assert found["02"].triples == (Triple("leaf", "inverse of has part", "tree", (0, 4), "02", "01"),)
    assert found["04"].text == "04"


@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        ("train.tsv", "01\t_has_part", "line 2: it needs three columns"),
        ("train.tsv", "01\t\t02", "line 2: it needs three columns"),
        ("train.tsv", "01\ta\t02\t03", "line 2: it needs three columns"),
        ("entity2text.txt", "no text", "line 2: it needs two columns"),
        ("entity2textlong.txt", "01\ta\tb", "line 2: it needs two columns"),
        ("relation2text.txt", "\ttext", "line 2: it needs two columns"),
    ],
)
def test_a_line_without_its_columns_is_a_bad_row(
    folder: Path, write: Write, name: str, line: str, sentence: str
) -> None:
    first = "01\tx\t02" if name == "train.tsv" else "01\ttext"
    path = write(first, line, "", name=name)
    with pytest.raises(ConfigError, match=sentence) as error:
        read(folder)
    assert str(path) in str(error.value)
    notes: list[str] = []
    data = DataConfig(dataset_name=str(folder), on_bad_row="skip")
    assert len(list(open_graphs(data, notes.append).train.documents())) >= 1
    assert [note.partition(" of ")[0] for note in notes] == [f"{folder}: bad rows skipped: 1"]
    path.write_bytes(b"01\t\xff")
    with pytest.raises(ConfigError, match=f"{name}, line 1 is not UTF-8 text"):
        read(folder)


def test_a_folder_without_train_tsv_is_an_ordinary_folder(folder: Path, write: Write) -> None:
    (folder / "train.tsv").rename(folder / "entity2text.txt")
    for name in ("dev.tsv", "test.tsv"):
        (folder / name).unlink()
    write(GOOD)
    assert [d.id for d in read(folder)] == ["good", "entity2text.txt", "relation2text.txt"]


def evaluated(name: Path) -> list[str]:
    return [d.id for d in open_graph_part(str(name), DataConfig(), pytest.fail).documents()]


def test_the_last_available_split_is_evaluated(folder: Path, write: Write) -> None:
    assert evaluated(write(GOOD, name="rows.jsonl")) == ["good"]
    for name, ids in (("test.tsv", ["03", "04"]), ("dev.tsv", ["02"]), ("entity2text.txt", ["01", "03"])):
        assert evaluated(folder) == ids
        (folder / name).unlink()


def test_names_of_files_and_splits_determine_the_split(tmp_path: Path, write: Write) -> None:
    rows = {name: {**GOOD, "id": name} for name in ("train", "validation", "test")}
    for name, row in rows.items():
        write(row, name=f"{name}.jsonl")
    assert parts(opened(tmp_path)) == [["train"], ["validation"], ["test"]]
    splits = {name: datasets.Dataset.from_list([row]) for name, row in rows.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert parts(opened(tmp_path / "saved")) == [["train"], ["validation"], ["test"]]


def test_a_validation_source_can_be_named(folder: Path, write: Write) -> None:
    assert parts(opened(write(GOOD), validation_name=str(folder))) == [["good"], ["02"], []]
    assert parts(opened(folder, validation_name=str(folder / "a.jsonl")))[1] == ["good"]


def test_the_fingerprint_depends_on_content_and_settings(folder: Path, write: Write) -> None:
    rows = write(GOOD)
    seen = [opened(folder).train.fingerprint, opened(rows).train.fingerprint]
    assert seen == [opened(folder).train.fingerprint, opened(rows).train.fingerprint]
    seen += [opened(folder, inverse=True).train.fingerprint, opened(rows, on_bad_row="skip").train.fingerprint]
    seen += [part.fingerprint for part in [opened(folder).validation, opened(folder).test] if part]
    write("01\ta shrub", name="entity2text.txt")
    write(GOOD, GOOD)
    seen += [opened(folder).train.fingerprint, opened(rows).train.fingerprint]
    assert len(seen) == len(set(seen)) == 8
