"""Text generation: sampling, stopping and streaming."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.data.tokenizer import CharTokenizer, Tokenizer
from sansgpu.models import TransformerLM
from sansgpu.models.generation.generate import decoder_step, generate
from sansgpu.models.generation.sampling import Sampling, sample_tokens
from tests.models.small import TEXT, TOKENIZER, config_of, model_of, text_of

TOKENIZERS = {"bpe": TOKENIZER, "char": CharTokenizer.train(["ab"])}  # "char" encodes é as bytes
LIKELIEST = Sampling(temperature=0)


def greedy(model: TransformerLM, ids: list[int], count: int) -> list[int]:
    """Continues ids greedily and recomputes the context for each token. A full context keeps only its newer half."""
    context = model.config.max_seq_len
    ids, held = list(ids), ids[-context:]
    for _ in range(count):
        if len(held) > context:
            held = ids[-(context // 2) :]
        ids.append(int(model(torch.tensor([held]))[0, -1].argmax()))
        held = [*held, ids[-1]]
    return ids


def writer_of(ids: list[int], end: int, vocabulary: int) -> TransformerLM:
    """Returns a model that greedily generates `ids` (all different), then the end token.

    The blocks of a new model output zeros, so the head sees only the embedding of the last token.
    """
    model = TransformerLM(config_of("modern", tie_embeddings=False, vocab_size=vocabulary), 0).eval()
    with torch.no_grad():
        model.head_weight.zero_()
        for before, after in pairwise([end, *ids, end]):
            model.head_weight[after] = F.normalize(model.embedding.weight[before], dim=0)
    return model


def written(tokenizer: Tokenizer, text: str, count: int = 99) -> list[str]:
    model = writer_of(tokenizer.encode(text), tokenizer.end_id, tokenizer.vocab_size)
    return list(generate(model, tokenizer, "", count, LIKELIEST))


@pytest.mark.parametrize("layout", ["modern", "grouped", "classic", "grouped_hybrid"])
def test_generation_is_greedy_at_temperature_zero_and_at_one_choice(layout: str) -> None:
    model = model_of(layout, vocab_size=300)
    prompt = [TOKENIZER.end_id, *TOKENIZER.encode("The quick")]  # it starts a document and does not end it
    expected = greedy(model, prompt, 8)[len(prompt) :]
    if TOKENIZER.end_id in expected:
        expected = expected[: expected.index(TOKENIZER.end_id)]
    assert expected
    text = TOKENIZER.decode(expected)
    for packs in (False, True):
        assert text_of(model, "The quick", 8, packs, temperature=0) == text
    assert text_of(model, "The quick", 8, top_k=1, seed=4) == text
    assert text_of(model, "The quick", 8, top_p=1e-6, seed=5) == text


def test_a_step_takes_any_number_of_query_heads_of_a_key_value_head() -> None:
    model = model_of("llama", d_model=160, n_heads=80, n_kv_heads=1)
    texts = {text_of(model, "The quick", 8, packs, temperature=0) for packs in (False, True)}
    assert decoder_step(model) is not None
    assert len(texts) == 1


@pytest.mark.parametrize("layout", ["modern", "classic", "hybrid"])
@pytest.mark.parametrize("prompt", ["", TEXT[0] * 4], ids=["short", "long"])
def test_beyond_the_context_the_later_half_is_read_again(layout: str, prompt: str) -> None:
    model = model_of(layout, vocab_size=300, tie_embeddings=False)
    with torch.no_grad():
        model.head_weight[TOKENIZER.end_id] = 0
        model.head_weight.copy_(model.head_weight + 0.05 * model.embedding.weight)
    start = [TOKENIZER.end_id, *TOKENIZER.encode(prompt)]
    expected = greedy(model, start, 60)[len(start) :]
    assert TOKENIZER.end_id not in expected
    for packs in (False, True):
        assert text_of(model, prompt, 60, packs, temperature=0) == TOKENIZER.decode(expected)


def test_the_seed_decides_the_text_and_global_randomness_is_left_alone() -> None:
    model = model_of("modern", vocab_size=300)
    state = torch.get_rng_state()
    first, again, other = (text_of(model, "The", 20, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_text_and_tear_no_character(name: str) -> None:
    text = "aé世b🎉"  # eleven bytes, all different
    pieces = written(TOKENIZERS[name], text)
    assert "".join(pieces) == text
    assert len(pieces) > 3  # streamed in several pieces, none of which splits a character


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    ids = TOKENIZER.encode("a🎉")[:-1]  # without the emoji's last byte
    model = writer_of(ids, TOKENIZER.end_id, TOKENIZER.vocab_size)
    assert "".join(generate(model, TOKENIZER, "", 99, LIKELIEST)) == TOKENIZER.decode(ids) == "a\ufffd"


def test_pieces_of_a_random_text_join_to_what_its_tokens_say() -> None:
    model = model_of("modern", vocab_size=300, max_seq_len=96)
    sampling = Sampling(temperature=3.0, seed=1)
    ids, generator = [TOKENIZER.end_id], torch.Generator().manual_seed(1)
    for _ in range(80):
        ids += sample_tokens(model(torch.tensor([ids]))[:, -1].detach(), sampling, [generator])
    assert TOKENIZER.end_id not in ids[1:]
    text = TOKENIZER.decode(ids[1:])
    assert "\ufffd" in text  # random bytes are rarely valid UTF-8
    pieces = list(generate(model, TOKENIZER, "", 80, sampling))
    assert "".join(pieces) == text
    assert len(pieces) > 5


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_text_ends_at_the_number_of_tokens_asked_for(count: int) -> None:
    assert "".join(written(TOKENIZERS["char"], "ab<>cd", count)) == "ab<>cd"[:count]


def test_generation_needs_no_dropout_and_leaves_the_model_in_the_mode_it_was_in() -> None:
    model = model_of("classic", vocab_size=300, dropout=0.5)
    expected = text_of(model, "The", 8, temperature=0)
    for training in (True, False):
        model.train(training)
        assert "".join(generate(model, TOKENIZER, "The", 8, LIKELIEST)) == expected
        assert model.training == training
    model.train()
    pieces = generate(model, TOKENIZER, "The", 8, LIKELIEST)
    next(pieces)
    pieces.close()  # a caller that stops reading early closes the iterator, too
    assert model.training


def reference_choices(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Returns the probability of each token that may be drawn, computed in plain Python."""
    weights = ((logits.double() / sampling.temperature) - logits.max() / sampling.temperature).exp().tolist()
    best = sorted(range(len(weights)), key=lambda token: -weights[token])
    best = best[: sampling.top_k] if sampling.top_k else best
    whole, kept, reached = sum(weights[token] for token in best), [], 0.0
    for token in best:
        if reached >= sampling.top_p:
            break
        kept.append(token)
        reached += weights[token] / whole
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@pytest.mark.long
@settings(max_examples=25)
@given(
    st.integers(2, 9), st.sampled_from([0.3, 0.8, 1.0, 2.5]), st.integers(0, 10), st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.integers(0, 99),
)  # fmt: skip
def test_tokens_are_drawn_as_often_as_they_are_likely(
    vocabulary: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, draws = torch.randn(vocabulary, generator=generator), 1500
    sampling = Sampling(temperature, top_k, top_p)
    expected = reference_choices(logits, sampling)
    drawn = [sample_tokens(logits[None], sampling, [generator])[0] for _ in range(draws)]
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        spread = (probability * (1 - probability) / draws) ** 0.5
        assert abs(drawn.count(token) / draws - probability) <= 5 * spread + 5 / draws  # 5 / draws: rare tokens
