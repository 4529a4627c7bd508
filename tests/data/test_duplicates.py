"""MinHash agrees with exact sets of shingles, and the first document of each group of duplicates stays."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.data import duplicates
from sansgpu.data.duplicates import MIN_SIMILARITY, SHINGLE_WORDS, hash_documents, shingle_hashes, smallest_hashes
from sansgpu.data.files import Piece

WORD = re.compile(r"[\u3000-\U0010ffff][0-9A-Za-z_\u0080-\u2fff]*|[0-9A-Za-z_\u0080-\u2fff]+")
TEXTS = st.lists(st.text(st.sampled_from("ab AB1_.,\n-é—深層"), max_size=60), max_size=6)
Shingles = set[tuple[str, ...]]


def lower(word: str) -> str:
    return "".join(letter.lower() if letter.isascii() else letter for letter in word)


def shingles(text: str) -> Shingles:
    """Returns the sequences of words of a text, which a text with too few words has one of."""
    words = [lower(word) for word in WORD.findall(text)]
    found = {tuple(words[first : first + SHINGLE_WORDS]) for first in range(max(1, len(words) - SHINGLE_WORDS + 1))}
    return found - {()}


def similarity(one: Shingles, other: Shingles) -> float:
    return len(one & other) / max(1, len(one | other))


def first(*documents: str, near: bool = True) -> list[bool]:
    found: list[bool] = hash_documents((Piece(text, True) for text in documents), near).are_first().tolist()
    return found


def sentence(draw: random.Random, words: int) -> list[str]:
    return [f"w{draw.randrange(5000)}" for _ in range(words)]


@given(texts=TEXTS)
def test_hashes_of_shingles_are_equal_where_their_words_are(texts: list[str]) -> None:
    hashes, text_of = shingle_hashes(texts)
    named: dict[tuple[str, ...], int] = {}
    for number, text in enumerate(texts):
        own = {int(value) for value in hashes[text_of == number]}
        expected = shingles(text)
        assert len(own) == len(expected)
        alone = {shingle: {int(value) for value in shingle_hashes([" ".join(shingle)])[0]} for shingle in expected}
        assert own == set().union(*alone.values())
        named |= {shingle: value for shingle, values in alone.items() for value in values}
    assert len(set(named.values())) == len(named)


@given(texts=TEXTS)
def test_the_smallest_hashes_are_those_of_plain_arithmetic(texts: list[str]) -> None:
    hashes, text_of = shingle_hashes(texts)
    expected = np.full((len(texts), duplicates.HASHES), duplicates.NO_SHINGLE)
    for value, number in zip(hashes.tolist(), text_of.tolist(), strict=True):
        products = [value * factor % 2**32 for factor in duplicates._FUNCTIONS.tolist()]
        expected[number] = np.minimum(expected[number], np.array(products, np.uint32))
    assert np.array_equal(smallest_hashes(texts), expected)


def test_signatures_estimate_the_similarity_without_bias() -> None:
    draw, errors = random.Random(0), []
    for _ in range(150):
        words = sentence(draw, draw.randint(50, 300))
        share = draw.random() * 0.1
        edited = [f"x{draw.randrange(5000)}" if draw.random() < share else word for word in words]
        one, other = " ".join(words), " ".join(edited)
        signatures = hash_documents([Piece(one, True), Piece(other, True)], near=True).signatures
        assert signatures is not None
        errors.append((signatures[0] == signatures[1]).mean() - similarity(shingles(one), shingles(other)))
    assert abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 0.06


def test_planted_near_duplicates_are_found_and_others_are_not() -> None:
    """The truth is the exact similarity. Pairs close to the limit may be taken for the other kind."""
    draw = random.Random(1)
    documents = [sentence(draw, draw.randint(60, 200)) for _ in range(150)]
    for number in range(150):
        words = list(documents[number])
        for place in draw.sample(range(len(words)), round(len(words) * draw.choice((0.0, 0.005, 0.01, 0.1, 0.3)))):
            words[place] = f"x{draw.randrange(5000)}"
        documents.append(words)
    texts = [" ".join(words) for words in documents]
    chosen = first(*texts)
    assert all(chosen[:150])
    near = [similarity(shingles(texts[number]), shingles(texts[number + 150])) for number in range(150)]
    clear = [number for number, value in enumerate(near) if abs(value - MIN_SIMILARITY) > 0.13]
    assert len(clear) > 100
    assert [chosen[number + 150] for number in clear] == [near[number] < MIN_SIMILARITY for number in clear]


@pytest.mark.parametrize("near", [False, True])
def test_of_equal_documents_the_first_stays(near: bool) -> None:
    assert first(near=near) == []
    assert first("one", near=near) == [True]
    assert first(*["the same"] * 500, near=near) == [True] + [False] * 499
    assert first("a", "b", "a", "...", "!!!", "...", "b", near=near) == [True, True, False, True, True, False, False]


def test_case_and_punctuation_do_not_make_a_document_new() -> None:
    words = " ".join(sentence(random.Random(2), 30))
    assert first(words, words.upper().replace(" ", ",\n"), near=True) == [True, False]
    assert first(words, words.upper(), near=False) == [True, True]


def test_a_group_is_connected_by_its_similar_pairs() -> None:
    """The last document is similar to the middle one only, which is similar to the first one."""
    words = sentence(random.Random(3), 400)
    steps = [[*(f"x{number}" for number in range(changed)), *words[changed:]] for changed in (0, 30, 60)]
    chain = [" ".join(changed) for changed in steps]
    values = [similarity(shingles(chain[a]), shingles(chain[b])) for a, b in ((0, 1), (1, 2), (0, 2))]
    assert min(values[:2]) > 0.84 > MIN_SIMILARITY > values[2]
    assert first(chain[0], chain[2], chain[1]) == [True, False, False]
    assert first(chain[0], chain[2]) == [True, True]


@given(data=st.data())
def test_pieces_and_batches_do_not_change_a_document(data: st.DataObject) -> None:
    """Pieces end at the end of a line here, so no shingle with words of two pieces is lost."""
    lines = st.lists(st.text(st.sampled_from("ab "), max_size=8).map("w x y z {}\n".format), min_size=1, max_size=4)
    documents = data.draw(st.lists(lines, min_size=1, max_size=6))
    pieces = [Piece(line, number == len(part) - 1) for part in documents for number, line in enumerate(part)]
    expected = [np.minimum.reduce([smallest_hashes([line])[0] for line in part]).astype(np.uint8) for part in documents]
    with pytest.MonkeyPatch.context() as patch:
        for size in (1, 30, 1000):
            patch.setattr(duplicates, "BATCH_CHARS", size)
            found = hash_documents(pieces, near=True)
            assert found.signatures is not None
            assert np.array_equal(found.signatures, expected)
            whole = hash_documents([Piece("".join(part), True) for part in documents], near=False)
            assert np.array_equal(found.content, whole.content)
