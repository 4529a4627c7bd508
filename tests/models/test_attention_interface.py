"""transformers models compute the same with our attention kernel as with SDPA."""

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.kernels import cross_entropy
from sansgpu.kernels.attention import (
    causal_ranges,
    in_window,
    reference_attention,
    token_places,
    unfused_attention,
    visible_keys,
)
from sansgpu.models.attention_interface import (
    NAME,
    attention_forward,
    ranges_of,
    use_our_attention,
)
from sansgpu.models.huggingface.causal_lm import HuggingFaceLM
from sansgpu.models.packed_masks import KeyRanges, PackedMask, stand_in_mask
from sansgpu.models.shared_prefixes import SharedPrefixes

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
}


def model_of(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def tokens(batch: int = 3, time: int = 20) -> torch.Tensor:
    return torch.randint(1, 97, (batch, time), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> torch.Tensor:
    mask = torch.ones(3, 20, dtype=torch.int64)
    for row, missing in enumerate((0, 4, 11)):
        if missing:
            mask[row, slice(None, missing) if side == "left" else slice(20 - missing, None)] = 0
    return mask


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_logits_and_gradients_are_the_models_own(name: str, padding: str | None) -> None:
    inputs = {"input_ids": tokens()}
    real = torch.ones(3, 20, dtype=torch.bool)
    if padding:
        inputs["attention_mask"] = padded(padding)
        real = inputs["attention_mask"].bool()

    def outcome(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
        logits = model(**inputs).logits
        logits[real].square().sum().backward()
        return [logits[real].detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    theirs = outcome(model_of(name))
    model = model_of(name)
    assert use_our_attention(model)
    assert model.config._attn_implementation == NAME
    for mine, exact in zip(outcome(model), theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-4)


OTHER_SCORES = {
    "softcap": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=5, attn_logit_softcapping=0.3, attention_dropout=0
    ),
    "sinks": lambda: transformers.GptOssConfig(
        **SMALL, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default"}
    ),
}


@pytest.mark.parametrize("name", OTHER_SCORES)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_other_scores_and_gradients_are_the_models_own(name: str, padding: str | None) -> None:
    mask, found = torch.ones(3, 20, dtype=torch.int64) if padding is None else padded(padding), []
    for ours in (False, True):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(OTHER_SCORES[name](), attn_implementation="eager").eval()
        with torch.no_grad():
            for sinks in (p for key, p in made.named_parameters() if key.endswith("sinks")):
                sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        if ours:
            assert use_our_attention(made) == (name == "softcap")  # PyTorch's kernels compute sinks
            assert made.config._attn_implementation == NAME
        made(input_ids=tokens(), attention_mask=mask).logits[mask.bool()].square().sum().backward()
        found.append([p.grad for p in made.parameters() if p.grad is not None])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-4)


@settings(max_examples=25)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 600), st.integers(1, 700),
    st.none() | st.floats(0.1, 50), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_unfused_attention_is_the_softmax_of_capped_scores_and_sinks(
    batch: int, heads: int, shared: int, queries: int, keys: int, softcap: float | None, has_sinks: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * shared, queries, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, 4, generator=draw, dtype=torch.float64) for _ in "kv")
    first = torch.randint(0, keys + 1, (batch, queries), generator=draw)
    ranges = torch.stack((first, (first + torch.randint(0, 9, first.shape, generator=draw)).clamp(max=keys)), -1).int()
    scores = q @ k.repeat_interleave(shared, dim=1).transpose(-1, -2) / 2
    capped = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    exponentials = capped.exp() * visible_keys(ranges, keys)
    sinks = torch.randn(heads * shared, generator=draw, dtype=torch.float64) if has_sinks else None
    total = exponentials.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    expected = (exponentials / total).nan_to_num() @ v.repeat_interleave(shared, dim=1)
    torch.testing.assert_close(unfused_attention(q, k, v, ranges, softcap, sinks), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_a_window_keeps_the_last_keys(lengths: list[int], window: int) -> None:
    examples, positions = token_places(torch.tensor(lengths))
    ranges = in_window(causal_ranges(examples[None]), window)[0]
    for place, (first, end) in enumerate(ranges.tolist()):
        assert end == place + 1
        assert first == place - min(int(positions[place]), window - 1)


def test_an_encoder_sees_both_ways_and_no_padding() -> None:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    inputs = {"input_ids": tokens(), "attention_mask": padded("right")}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        theirs = model(**inputs).last_hidden_state[real]
        assert use_our_attention(model)
        torch.testing.assert_close(model(**inputs).last_hidden_state[real], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_with_a_cache_writes_the_same(name: str) -> None:
    model = model_of(name)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    theirs = model.generate(tokens(2, 9), **settings)
    assert use_our_attention(model)
    assert torch.equal(model.generate(tokens(2, 9), **settings), theirs)


def test_ranges_require_contiguous_keys() -> None:
    mask = torch.tensor([[[[True, True, False], [False, True, True], [False, False, False]]]])
    ranges = ranges_of(mask)
    assert ranges is not None
    assert ranges.tolist() == [[[0, 2], [1, 3], [0, 0]]]
    assert ranges_of(torch.tensor([[[[True, False, True]]]])) is None


@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_packed_masks_mean_the_same_to_our_kernel_and_to_sdpa(shares_prompts: bool, value_dim: int) -> None:
    """Our kernel does not support values that are narrower than keys, so SDPA computes them."""
    lengths = torch.tensor([12, 16, 5, 7])  # the first 7 and the first 3 tokens of two pairs are equal
    tokens = torch.cat([torch.arange(7), torch.arange(10, 15), torch.arange(7), torch.arange(20, 29)])
    tokens = torch.cat([tokens, 50 + torch.arange(5), 50 + torch.arange(3), torch.arange(60, 64)])
    layout = SharedPrefixes.of(tokens, lengths, shares_prompts)
    documents = torch.repeat_interleave(torch.arange(4), lengths)
    mask: PackedMask = layout if shares_prompts else KeyRanges(causal_ranges(documents[None]))
    copies, originals = layout.copies, layout.originals
    assert layout.saved == (10 if shares_prompts else 0)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, len(originals), d, generator=random) for h, d in ((4, 8), (2, 8), (2, value_dim)))
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    found, _ = attention_forward(module, q, k, v, stand_in_mask(mask, q.device), scaling=0.2)
    copied = (q[:, :, copies] * 0.2 * 8**0.5, k[:, :, copies], v[:, :, copies])
    expected = reference_attention(*copied, causal_ranges(documents[None]))[:, :, originals]
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_a_softcapped_model_keeps_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.Gemma2Config(**SMALL, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # large enough for soft caps to change the results
    model.save_pretrained(tmp_path)
    ours = HuggingFaceLM(str(tmp_path))
    ids = tokens()
    used: list[float] = []
    original = cross_entropy.linear_cross_entropy
    monkeypatch.setattr(
        "sansgpu.models.huggingface.causal_lm.linear_cross_entropy",
        lambda h, w, t, shape: used.append(shape.softcap) or original(h, w, t, shape),
    )
    with torch.no_grad():
        exact = torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        assert float(ours.summed_loss(ids[:, :-1], ids[:, 1:])) == pytest.approx(float(exact), rel=1e-4)
    assert used == [3.0]
