"""llama.cpp computes the same tokens and, up to rounding, the same logits from our GGUF files."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from sansgpu.data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer
from sansgpu.models import families
from sansgpu.models.formats.decoder_folder import load_gguf_decoder
from sansgpu.models.formats.gguf_reader import GGUFType
from sansgpu.models.formats.gguf_source import open_gguf
from tests.models.formats.gguf_models import (
    BASES,
    GPT4O,
    TEKKEN,
    base,
    falcon,
    logits_of,
    rewritten,
    sentence_piece,
    split,
    write_base,
    write_ours,
)
from tests.models.llama import LlamaFile
from tests.models.small import IN_GGUF, TEXT, model_of, tokens

pytest.importorskip("xllamacpp")
LARGE = 3.0  # logits of most models are smaller
# Allowed differences of log-probabilities for logits up to `LARGE`. Unlike ours, llama.cpp rounds activations and reads
# GELU from an f16 table.
APART = {"f32": 1e-5, "f16": 5e-3, "bf16": 3e-2, "q8_0": 8e-2}
APART_BY_GELU = 3e-3
OFTEN = ("llama", "gpt2", "gemma3_text", "mixtral")
ODD = [
    "", " ", "\n", "\r\n \r\n", "\t\tx", "a  b   c \n\n\n d", "naïve café", "e\u0301", "世界 12345 ٣٤٥ ½", "ſ 'ſ ŉ",
    "I'M he'LL we've 'S", "👨\u200d👩\u200d👧 🇩🇪", "\u00a0\u200b\u3000\ufeff", "\x00\x01\x7f", "x" * 300,
    "<|endoftext|> <0x41> [PAD3]", "def f(x):\n    return x\n",
]  # fmt: skip


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    alphabet = [*"abXYZ09'  \t\n\r.,!_ß世é😀\u00a0\u3000ſ", "'s", "'RE", "  ", "\r\n", "def ", "<|endoftext|>", "1234"]
    every = ["".join(draw.choice(alphabet) for _ in range(draw.randint(1, 25))) for _ in range(count)]
    points = [chr(point) for point in range(1, 0x30000, 41) if not 0xD800 <= point < 0xE000]
    return every + [f"a{c}b {c}1{c}{c}'{c} \n{c}.{c}\t" for c in points]


def odd(theirs: LlamaFile, tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """Returns the texts whose tokens differ."""
    pairs = zip(texts, theirs.encode_all(texts), strict=True)
    return [text for text, ids in pairs if ids != tokenizer.encode(text)]


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("layout", IN_GGUF)
def test_logits_of_our_layouts(layout: str, kind: GGUFType, tmp_path: Path) -> None:
    path, ids = tmp_path / "model.gguf", tokens(1, 24)[0, :-1].tolist()  # the server predicts the last token
    write_ours(path, model_of(layout, d_ff=64), kind)
    ours = load_gguf_decoder(open_gguf(path))
    assert ours is not None
    allowed = APART[kind] + (APART_BY_GELU if layout == "classic" else 0)
    assert LlamaFile(path).largest_error(logits_of(ours.eval(), ids), ids) < allowed


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.long) for n in BASES])
def test_logits_and_tokens_of_what_fine_tuning_continues_from(name: str, tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", name)
    write_base(tmp_path / "model.gguf", model, tokenizer, "f32")
    theirs, ids = LlamaFile(tmp_path / "model.gguf"), [number * 23 % 1000 for number in range(200)]
    has_gelu = any("GELU" in type(module).__name__.upper() for module in model.modules())
    logits = logits_of(model, ids)
    allowed = APART["f32"] * max(1.0, float(logits.abs().max()) / LARGE) + (APART_BY_GELU if has_gelu else 0)
    assert theirs.largest_error(logits, ids) < allowed
    assert theirs.encode("naïve text") == tokenizer("naïve text").input_ids


BPE = BPETokenizer.train([*TEXT, *random_texts(300)[:300]], 700)


def has_case_beyond_ascii(text: str) -> bool:
    """Returns True if GPT-4o and tekken divide a text where llama.cpp does not: before `Y` in `éY`, and `É` in `yÉ`."""
    return any(a.islower() and b.isupper() and not (a + b).isascii() for a, b in pairwise(text))


@pytest.mark.parametrize(
    "tokenizer",
    [split(GPT4O, tokenizer=BPE), split(TEKKEN, ignore_merges=True, tokenizer=BPE)],
    ids=["gpt-4o", "tekken"],
)
def test_odd_texts_become_the_same_tokens_up_to_case(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_ours(tmp_path / "model.gguf", model_of("modern", vocab_size=704), "f16", tokenizer)
    theirs = LlamaFile(tmp_path / "model.gguf")
    texts = [*ODD, *random_texts(1000), "iPhone SHOUTed DON'T He'LL Привет МИР ÀÉ हिन्दी में ᾈ ǅ"]
    texts = [text for text in texts if not has_case_beyond_ascii(text)]
    assert odd(theirs, tokenizer, texts) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["command-r", "starcoder", "chatglm-bpe", "glm4", "stablelm2", "olmo", "seed-coder"])
def test_odd_texts_become_the_same_tokens_with_names_of_other_families(name: str, tmp_path: Path) -> None:
    patterns = {known: one.patterns for family in families.every() for known, one in family.pre_tokenizers.items()}
    tokenizer = split(*patterns[name], tokenizer=BPE)
    write_ours(tmp_path / "model.gguf", model_of("modern", vocab_size=704), "f16", tokenizer)
    key = "tokenizer.ggml.pre"
    path = rewritten(tmp_path / "model.gguf", tmp_path / "other.gguf", leave_out=key, **{key: name})
    # without the characters of all scripts, because some of the newest are digits only for one of the two
    assert odd(LlamaFile(path), tokenizer, [*ODD, *random_texts(300)[:300]]) == []


@pytest.mark.parametrize(
    "tokenizer",
    [
        BPE, CharTokenizer.train(TEXT),
        sentence_piece(adds_space=False), sentence_piece(adds_space=True), falcon(),
    ],
    ids=["bpe", "characters", "gemma", "llama2", "falcon"],
)  # fmt: skip
def test_odd_texts_become_the_same_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_ours(tmp_path / "model.gguf", model_of("modern", vocab_size=704), "f16", tokenizer)
    theirs = LlamaFile(tmp_path / "model.gguf")
    underscore = "▁"  # llama.cpp reads it as a space in character tokenizers
    texts = [text for text in [*ODD, *random_texts(1000)] if underscore not in text]
    assert odd(theirs, tokenizer, texts) == []
    assert theirs.encode("x") == [tokenizer.end_id, *tokenizer.encode("x")]
