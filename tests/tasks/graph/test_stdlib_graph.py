"""The standard library becomes a knowledge graph of its definitions."""

from collections import Counter
from itertools import islice
from pathlib import Path
from textwrap import dedent

import pytest

from sansgpu.config import DataConfig
from sansgpu.data.forms.graphs import GraphDocument
from sansgpu.tasks.graph.sources import GraphSource, open_graphs
from sansgpu.tasks.graph.stdlib import stdlib_documents

RELATIONS = {
    "calls", "has_parameter", "declares", "defines", "instantiates", "returns", "imports", "raises", "inherits_from",
    "has_field", "catches", "annotated_with",
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> GraphSource:
    graphs = open_graphs(DataConfig(dataset_name="python-stdlib-graph"), pytest.fail)
    assert graphs.validation is graphs.test is None
    return graphs.train


@pytest.fixture(scope="module")
def documents(library: GraphSource) -> list[GraphDocument]:
    return list(library.documents())


@pytest.mark.long
def test_the_library_has_many_triples_of_twelve_relations(documents: list[GraphDocument]) -> None:
    counts = Counter(triple.relation for document in documents for triple in document.triples)
    assert counts.keys() == RELATIONS
    assert min(counts.values()) > 500
    assert 60_000 < sum(counts.values()) < 150_000


@pytest.mark.long
def test_every_head_stands_at_its_span(documents: list[GraphDocument]) -> None:
    for document in documents:
        for triple in document.triples:
            assert triple.head_span is not None
            assert document.text[slice(*triple.head_span)] == triple.head, document.id


@pytest.mark.long
def test_a_tail_is_one_name_and_no_triple_is_repeated(documents: list[GraphDocument]) -> None:
    for document in documents:
        assert len(set(document.triples)) == len(document.triples)
        assert all(triple.tail.isidentifier() for triple in document.triples), document.id


@pytest.mark.long
def test_a_module_is_never_divided(documents: list[GraphDocument]) -> None:
    modules: dict[str, set[str]] = {}
    for document in documents:
        modules.setdefault(document.group, set()).add(document.id.partition(":")[0])
    assert all(len(names) == 1 for names in modules.values())
    assert modules["json/decoder.py"] == {"json.decoder"}
    assert modules["json/__init__.py"] == {"json"}


@pytest.mark.long
def test_two_readings_are_equal(library: GraphSource, documents: list[GraphDocument]) -> None:
    assert list(islice(library.documents(), 1000)) == documents[:1000]
    again = open_graphs(DataConfig(dataset_name="python-stdlib-graph"), pytest.fail).train
    assert again.fingerprint == library.fingerprint


SOURCE = '''\
"""Doc of the module."""
import os.path, sys as system
from collections import deque
from . import sibling
try:
    import fast as quick
except ImportError:
    LIMIT = RATE = 3
first, second = 1, 2
size: int = 3

class Base:
    pass

@register
class Café(Base, sibling.Mixin, Generic[T]):
    """Doc of the class."""
    kind = "é"
    left: int
    def __init__(self, größe: int, *rest: "str", key: typing.List[int] = None, **more) -> None:
        self.größe, self.key = größe, key
        super().__init__(rest)
    shade = 1
    @property
    async def open(self):
        global LIMIT
        def inner(x):
            return helper(x)
        text = """
left of the indent"""
        try:
            base = Base()
            base.close()
            os.path.join(text)
            self.run(len(rest))
        except (OSError, socket.error):
            raise errors.Late("x")
        except KeyError as error:
            raise error
        return True

def helper(é="ü", then: Café = None): return sys.maxsize
'''


@pytest.fixture
def found(tmp_path: Path) -> dict[str, GraphDocument]:
    (tmp_path / "mod.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\ndef ä(): pass\n".encode("latin-1"))
    (tmp_path / "undecodable.py").write_bytes(b"x = '\xff'")
    names = ("pack/broken.py", "pack/mod.py", "pack/latin.py", "pack/undecodable.py")
    return {d.id: d for d in stdlib_documents({name: tmp_path / Path(name).name for name in names})}


def facts(document: GraphDocument) -> set[tuple[str, str]]:
    """Returns (relation, tail) of the triples whose head is the document's own definition."""
    own = document.id.rpartition(":")[2].rpartition(".")[2]
    return {(t.relation, t.tail) for t in document.triples if t.head in (own, document.id)}


def test_files_that_do_not_parse_are_passed_over(found: dict[str, GraphDocument]) -> None:
    assert list(found) == [
        "pack.mod", "pack.mod:Base", "pack.mod:Café", "pack.mod:Café.__init__", "pack.mod:Café.open",
        "pack.mod:Café.open.inner", "pack.mod:helper", "pack.latin", "pack.latin:ä",
    ]  # fmt: skip
    assert {d.group for d in found.values()} == {"pack/mod.py", "pack/latin.py"}


def test_a_module_imports_defines_and_declares(found: dict[str, GraphDocument]) -> None:
    assert found["pack.mod"].text == dedent("""\
        module pack.mod
        Doc of the module.
        import os.path, sys as system
        from collections import deque
        from . import sibling
        import fast as quick""")
    assert facts(found["pack.mod"]) == {
        ("imports", "path"), ("imports", "sys"), ("imports", "collections"), ("imports", "sibling"),
        ("imports", "fast"), ("declares", "LIMIT"), ("declares", "RATE"), ("declares", "first"),
        ("declares", "second"), ("declares", "size"), ("defines", "Base"), ("defines", "Café"), ("defines", "helper"),
    }  # fmt: skip


def test_a_class_is_its_head_and_the_heads_of_its_methods(found: dict[str, GraphDocument]) -> None:
    assert found["pack.mod:Café"].text.splitlines() == [
        "@register",
        "class Café(Base, sibling.Mixin, Generic[T]):",
        '    """Doc of the class."""',
        '    kind = "é"',
        "    left: int",
        '    def __init__(self, größe: int, *rest: "str", key: typing.List[int] = None, **more) -> None:',
        "    async def open(self):",
    ]
    assert facts(found["pack.mod:Café"]) == {
        ("inherits_from", "Base"), ("inherits_from", "Mixin"), ("inherits_from", "Generic"), ("has_field", "kind"),
        ("has_field", "left"), ("has_field", "shade"), ("has_field", "größe"), ("has_field", "key"),
        ("defines", "__init__"), ("defines", "open"),
    }  # fmt: skip


def test_a_function_is_its_source_and_what_it_does(found: dict[str, GraphDocument]) -> None:
    assert facts(found["pack.mod:Café.open"]) == {
        ("annotated_with", "property"), ("declares", "LIMIT"), ("declares", "inner"), ("instantiates", "Base"),
        ("calls", "join"), ("calls", "run"), ("calls", "len"), ("catches", "OSError"), ("catches", "error"),
        ("catches", "KeyError"), ("raises", "Late"), ("raises", "error"), ("returns", "True"),
    }  # fmt: skip
    text = found["pack.mod:Café.open"].text
    assert text.startswith("@property\nasync def open(self):\n    global LIMIT\n    def inner(x):\n")
    assert 'text = """\nleft of the indent"""\n    try:' in text
    assert facts(found["pack.mod:Café.open.inner"]) == {
        ("has_parameter", "x"), ("calls", "helper"), ("returns", "helper"),
    }  # fmt: skip
    assert ("instantiates", "super") in facts(found["pack.mod:Café.__init__"])
    assert ("calls", "__init__") in facts(found["pack.mod:Café.__init__"])


def test_parameters_are_annotated_at_their_own_place(found: dict[str, GraphDocument]) -> None:
    document = found["pack.mod:Café.__init__"]
    assert {(t.head, t.tail) for t in document.triples if t.relation == "annotated_with"} == {
        ("größe", "int"), ("rest", "str"), ("key", "List"), ("__init__", "None"),
    }  # fmt: skip
    assert [t.tail for t in document.triples if t.relation == "has_parameter"] == ["größe", "rest", "key", "more"]
    assert [t.tail for t in found["pack.mod:helper"].triples if t.head == "then"] == ["Café"]
    for one in found.values():
        assert all(t.head_span and one.text[slice(*t.head_span)] == t.head for t in one.triples)
