"""A real chat model, SmolLM2-135M-Instruct in 4 bits, gives the same results as in transformers and llama.cpp."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sansgpu.tasks.pretrain.task import Pretrain
from sansgpu.tasks.task import ModelSource
from tests.models.llama import LlamaFile
from tests.processes import finish
from tests.real_model import NAME, real_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
WINDOW = 256
# Texts on which tokenizers differ most.
HARD = [
    "h\u00e9llo w\u00f6rld e\u0301 \u4f60\u597d\u4e16\u754c \u0645\u0631\u062d\u0628\u0627",
    "\U0001f642\U0001f469\u200d\U0001f467",
    "1234567890 12.5e-7 \u0661\u0662\u0663 \u00b2\u00b3 \u2167",
    "  leading\t\ttabs\r\n\r\n  x\u00a0y\u200bz\u2028",
    "for i in range(10):\n\t\tprint(f'{i!r}')  # don't I'LL we'Ve",
    "a" * 500,
]

# Questions that are not in the training conversations, and a part of each right answer.
ASKED = {
    "At what time do you close?": "from 9 am to 6 pm",
    "May I park near the shop?": "free parking behind the mill",
    "I can't eat gluten. What do you have?": "buckwheat",
    "How much is the sourdough course?": "45 euros",
    "My order is broken.": "Send us a photo",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def theirs(model: Path) -> tuple[Any, Any]:
    """Returns the model, in fp32, and the tokenizer as transformers loads them from the GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=NAME, dtype=torch.float32).eval()
    return loaded, AutoTokenizer.from_pretrained(model.parent, gguf_file=NAME)


def test_perplexity_equals_that_of_transformers(model: Path, theirs: tuple[Any, Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    content = (ROOT / "README.md").read_text(encoding="utf-8")[:2500] + "".join(HARD)
    text.write_bytes(content.encode())
    evaluate = ["eval", str(model), "--data", str(text), "--window", str(WINDOW), "--json"]
    code, shown, error = finish(evaluate, tmp_path / "cache")
    assert code == 0, error
    loaded, _ = theirs
    # transformers' GGUF loader ignores that each digit, in any script, is a separate token.
    ids = Pretrain.load(ModelSource(str(model)))[1].backend.encode(content).ids
    total = 0.0
    for first in range(0, len(ids) - 1, WINDOW):
        piece = torch.tensor([ids[first : first + WINDOW + 1]])
        with torch.no_grad():
            logits = loaded(piece[:, :-1]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
    expected = total / (len(ids) - 1)
    assert json.loads(shown)["loss"] == pytest.approx(expected, abs=1e-4)
    assert json.loads(shown)["perplexity"] == pytest.approx(math.exp(expected), rel=1e-3)


def test_texts_have_the_same_tokens_as_in_llama_cpp(model: Path) -> None:
    pytest.importorskip("xllamacpp")
    tokenizer = Pretrain.load(ModelSource(str(model)))[1]
    lines = (ROOT / "docs/lab-notes.md").read_text(encoding="utf-8").splitlines()
    texts = [*HARD, "<|im_end|> stays text", *filter(None, lines)]
    for text, ids in zip(texts, LlamaFile(model).encode_all(texts), strict=True):
        assert tokenizer.backend.encode(text).ids == ids, text


def test_it_answers_with_its_own_template(model: Path, tmp_path: Path) -> None:
    ask = ["--prompt", "What is the capital of France?", "--temperature", "0", "--max-new-tokens", "20"]
    code, answer, error = finish(["chat", str(model), *ask], tmp_path / "cache")
    assert code == 0, error
    assert "Paris" in answer


def test_a_bakery_s_answers_are_learned(model: Path, tmp_path: Path) -> None:
    """Uses the configuration and the conversations of the README."""
    example = ROOT / "examples/bakery.yaml"
    changes = [f"model.name_or_path={model}", f"data.dataset_name={ROOT / 'examples/bakery.jsonl'}"]
    overrides = [part for change in changes for part in ("--set", change)]
    code, _, error = finish(
        ["train", str(example), *overrides, "--output-dir", str(tmp_path / "run")], tmp_path / "cache"
    )
    assert code == 0, error
    known = (ROOT / "examples/bakery.jsonl").read_text(encoding="utf-8")
    for question, answer in ASKED.items():
        assert question not in known
        chat = ["chat", str(tmp_path / "run"), "--prompt", question, "--temperature", "0"]
        code, said, error = finish(chat, tmp_path / "cache")
        assert code == 0, error
        assert answer in said, question
