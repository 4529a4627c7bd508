"""The name of a file is the model_type of its family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sansgpu.models import families
from sansgpu.models.family import Family

NEWER = ("granite_swa",)  # architectures that llama.cpp knows, but not yet the package gguf
FILES = [path.stem for path in Path(families.__file__).parent.glob("*.py") if path.stem != "__init__"]


def test_every_file_has_a_family_that_transformers_knows() -> None:
    assert [family.model_type.replace("-", "_") for family in families.every()] == sorted(FILES)
    assert {family.model_type for family in families.every()} <= {*CONFIG_MAPPING_NAMES}


def test_no_two_families_have_the_same_name() -> None:
    titles = [family.title for family in families.every() if family.title]
    assert len({*titles}) == len(titles) > 30


@pytest.mark.parametrize("family", families.with_gguf(), ids=lambda family: family.model_type)
def test_llama_cpp_knows_the_architecture_and_transformers_the_class(family: Family) -> None:
    import transformers

    assert family.llama_cpp_name in {*gguf.MODEL_ARCH_NAMES.values(), *NEWER}
    assert hasattr(transformers, family.model_class)
    assert family.tiny


def test_a_file_is_of_one_family() -> None:
    """At most one of the families that share a name in llama.cpp takes the files that no other recognizes."""
    others = Counter(family.llama_cpp_name for family in families.with_gguf() if family.gguf_recognizes is None)
    assert max(others.values()) == 1


@pytest.mark.parametrize("model_type", ["unknown", "deberta_v2", "../family", "__init__", "", None, 5, ["llama"]])
def test_other_model_types_have_no_family(model_type: object) -> None:
    assert families.find(model_type) is None
