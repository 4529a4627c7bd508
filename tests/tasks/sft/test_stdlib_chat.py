"""Docstrings of the standard library become rows of questions and answers for task sft."""

from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import sansgpu
from sansgpu.config import DataConfig
from sansgpu.data.built_in import stdlib_conversations
from sansgpu.data.sources import open_sources
from sansgpu.data.tokenizer import BPETokenizer

STDLIB = DataConfig(dataset_name="python-stdlib-chat")

MODULE = '''"""Walks through trees of folders. More is said below."""

def walk(top):
    """Yield every folder
    below top. In no order.
    """
    def inner():
        """Is not asked about at all."""

def _hidden():
    """Nobody asks about this one."""

def short():
    """Too short."""

def silent():
    pass

class Walker:
    """Something that walks through folders!"""

    async def step(self):
        """Take one step to the next folder."""

    def __init__(self):
        """Make a walker of some kind."""
'''


def test_public_definitions_are_asked_about_with_their_first_sentence(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "_private.py").write_text(MODULE)
    names = ("_private.py", "broken.py", "package/__init__.py")
    rows = list(stdlib_conversations({name: tmp_path / name for name in names}))
    assert [(row.value["prompt"], row.value["completion"]) for row in rows] == [
        ("What is package?", "Walks through trees of folders."),
        ("What does package.walk do?", "Yield every folder below top."),
        ("What is package.Walker?", "Something that walks through folders!"),
        ("What does package.Walker.step do?", "Take one step to the next folder."),
    ]


@pytest.mark.long
def test_the_standard_library_gives_thousands_of_rows() -> None:
    source = open_sources(STDLIB).train
    rows = {row.value["prompt"]: row.value["completion"] for row in source.rows()}
    assert len(rows) > 2000
    assert rows["What does shutil.copyfile do?"].startswith("Copy data from src to dst")


def test_a_generation_prompt_has_the_tokens_that_precede_an_answer(tmp_path: Path) -> None:
    corpus = (row.value["completion"] for row in islice(open_sources(STDLIB).train.rows(), 500))
    BPETokenizer.train(corpus, 600).save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = (Path(sansgpu.__file__).parent / "models/huggingface/templates/simple.jinja").read_text()
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Return the file."}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked)["input_ids"]
    assert tokenizer(whole)["input_ids"][: len(ids)] == ids
