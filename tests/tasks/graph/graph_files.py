"""Rows for tests of graph data, and functions that read them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sansgpu.config import DataConfig
from sansgpu.data.forms.graphs import GraphDocument
from sansgpu.tasks.graph.sources import GraphSources, open_graphs

TEXT = "Metformin lowers hepatic glucose output in type 2 diabetes ."
TREATS = {"head": "Metformin", "relation": "treats", "tail": "diabetes", "head_span": [0, 9]}
IS_A = {"head": "type 2 diabetes", "relation": "isa", "tail": "diabetes"}
GOOD = {"id": "good", "text": TEXT, "triples": [TREATS]}
Write = Callable[..., Path]


def opened(path: Path, inverse: bool = False, **settings: object) -> GraphSources:
    data = DataConfig.model_validate({"dataset_name": str(path), **settings})
    return open_graphs(data, pytest.fail, inverse)


def read(path: Path, inverse: bool = False, **settings: object) -> list[GraphDocument]:
    return list(opened(path, inverse, **settings).train.documents())


def facts(document: GraphDocument) -> list[tuple[str, str, str]]:
    return [(triple.head, triple.relation, triple.tail) for triple in document.triples]
