"""The decoder: what it sees, what it costs, and that others compute the same from its export."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from sansgpu.config import Config, ConfigError, ModelConfig, load_config
from sansgpu.data.tokenizer import BPETokenizer
from sansgpu.models import TransformerLM
from sansgpu.models.generate import Sampling, generate
from sansgpu.models.huggingface import export_model, load_decoder

SHAPE = {"vocab_size": 320, "d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 40, "max_seq_len": 24}
LAYOUTS = {
    "modern": {},
    "grouped": {"n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 500.0},
    "classic": {"activation": "gelu", "dropout": 0.1},
    "relu": {"activation": "relu", "tie_embeddings": False},
}
TEXT = ["The quick brown fox: naïve café, 12 or 345 things.\n"] * 20
TOKENIZER = BPETokenizer.train(TEXT, 300)


def model_of(layout: str, seed: int = 0, **changes: object) -> TransformerLM:
    """In evaluation, with weights moved off their initial zeros."""
    model = TransformerLM(ModelConfig.model_validate({**SHAPE, **LAYOUTS[layout], **changes}), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_computes_the_same_from_the_export(layout: str, tmp_path: Path) -> None:
    model, inputs = model_of(layout), tokens(2, 24)
    export_model(model, TOKENIZER, tmp_path / "final")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    torch.testing.assert_close(theirs(inputs).logits, model(inputs), atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "final").encode("naïve 12") == TOKENIZER.encode("naïve 12")
    ours = load_decoder(tmp_path / "final")
    assert ours is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    export_model(model_of("modern"), TOKENIZER, tmp_path / "final")
    (tmp_path / "final/model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="do not fit"):
        load_decoder(tmp_path / "final")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_token_changes_no_earlier_logit(layout: str) -> None:
    model, inputs = model_of(layout), tokens(1, 20)
    changed = inputs.clone()
    changed[0, 12] += 1
    before, after = model(inputs), model(changed % 320)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.allclose(before[0, 12:], after[0, 12:])


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 10), st.integers(1, 10), st.integers(0, 99))
def test_a_packed_document_sees_nothing_of_another(layout: str, first: int, second: int, seed: int) -> None:
    model = model_of(layout)
    inputs = tokens(1, first + second, seed)
    documents = torch.tensor([[0] * first + [1] * second])
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    packed = model(inputs, positions, documents)
    for changed_part, kept_part in ((slice(0, first), slice(first, None)), (slice(first, None), slice(0, first))):
        changed = inputs.clone()
        changed[:, changed_part] = (changed[:, changed_part] + 7) % 320
        assert torch.equal(model(changed, positions, documents)[:, kept_part], packed[:, kept_part])
    alone = torch.cat([model(inputs[:, :first]), model(inputs[:, first:])], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_gives_the_logits_of_the_whole(layout: str) -> None:
    model, inputs = model_of(layout), tokens(2, 15)
    caches = model.new_caches(2)
    parts = [model(part, caches=caches) for part in inputs.split([6, 1, 1, 7], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_activations_give_the_same_gradients(layout: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = model_of(layout, gradient_checkpointing=checkpointing).train()
        torch.manual_seed(0)
        model.summed_loss(tokens(2, 20), tokens(2, 20, 2)).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_dropout_acts_in_training_alone() -> None:
    model, inputs = model_of("classic"), tokens(1, 20)
    assert torch.equal(model(inputs), model(inputs))
    model.train()
    assert not torch.equal(model(inputs), model(inputs))


def test_the_seed_decides_the_weights_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (TransformerLM(ModelConfig.model_validate(SHAPE), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert all(torch.isfinite(p).all() for p in first.parameters())


def test_a_fresh_model_predicts_every_token_alike() -> None:
    for layout in LAYOUTS:
        model = TransformerLM(ModelConfig.model_validate({**SHAPE, **LAYOUTS[layout]}), 3).eval()
        loss = model.summed_loss(tokens(4, 24), tokens(4, 24, 2)) / 96
        assert loss.item() == pytest.approx(torch.tensor(320.0).log().item(), rel=0.02)


@pytest.mark.parametrize(("name", "millions"), [("nano", 82.9), ("cpu_small", 11.5), ("cpu_medium", 124.2)])
def test_the_configurations_have_the_sizes_they_claim(name: str, millions: float) -> None:
    config, _ = load_config(Path(__file__).parents[2] / "configs" / f"{name}.yaml")
    assert TransformerLM(config.model, seed=None).parameter_count / 1e6 == pytest.approx(millions, abs=0.1)


def test_flops_of_a_token_by_hand() -> None:
    model = TransformerLM(ModelConfig(vocab_size=10, d_model=4, n_heads=1, n_layers=1, d_ff=8, max_seq_len=8))
    matmul = 4 * 4 * 4 + 3 * 4 * 8 + 10 * 4  # q k v o, gate up down, head
    attention = 3 * 2 * 2 * 4 * (1 + 2 + 3) / 3  # two products a key, over an average of two keys
    assert model.flops_per_token(3) == 6 * matmul + attention


def text_of(model: TransformerLM, prompt: str, count: int, **sampling: object) -> str:
    return "".join(generate(model, TOKENIZER, prompt, count, Sampling(**sampling)))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["modern", "classic"])
def test_generation_is_greedy_at_temperature_zero_and_at_one_choice(layout: str) -> None:
    model = model_of(layout, vocab_size=300)
    ids = [TOKENIZER.end_id, *TOKENIZER.encode("The quick")]  # a prompt begins a document and does not end it
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    written = ids[len(ids) - 8 :]
    stop = written.index(TOKENIZER.end_id) if TOKENIZER.end_id in written else len(written)
    expected = TOKENIZER.decode(written[:stop])
    assert text_of(model, "The quick", 8, temperature=0) == expected
    assert text_of(model, "The quick", 8, top_k=1, seed=4) == expected
    assert text_of(model, "The quick", 8, top_p=1e-6, seed=5) == expected


@pytest.mark.parametrize("layout", ["modern", "classic"])
def test_a_text_may_be_longer_than_the_context(layout: str) -> None:
    model = model_of(layout, vocab_size=300)
    with torch.no_grad():
        model.embedding.weight[TOKENIZER.end_id] = 0  # an end would end it early
    long_prompt = TEXT[0] * 4
    written = text_of(model, long_prompt, 100, seed=1)
    assert len(TOKENIZER.encode(written)) > model.config.max_seq_len
    assert written == text_of(model, long_prompt, 100, seed=1) != text_of(model, long_prompt, 100, seed=2)


def test_pieces_join_to_the_text_and_tear_no_character() -> None:
    model = model_of("modern", vocab_size=300)
    pieces = list(generate(model, TOKENIZER, "", 200, Sampling(temperature=3.0, seed=3)))
    assert len(pieces) > 10
    assert "".join(pieces) == text_of(model, "", 200, temperature=3.0, seed=3)
    ids = TOKENIZER.encode("é世🎉")
    assert len(ids) > 3

    class Scripted(TransformerLM):
        """Writes the given tokens, whatever it is asked."""

        def hidden(self, inputs, positions=None, document_ids=None, caches=None):  # type: ignore[no-untyped-def]
            caches[0].length += inputs.shape[1]
            place = min(caches[0].length - 1, len(ids) - 1)
            direction = self.embedding.weight[ids[place]] * 1e4
            return direction.expand(1, inputs.shape[1], -1)

    scripted = Scripted(ModelConfig.model_validate({**SHAPE, "vocab_size": 300}), 0).eval()
    shown = list(generate(scripted, TOKENIZER, "", len(ids), Sampling(temperature=0)))
    assert "".join(shown) == "é世🎉"
    assert not any("\ufffd" in piece for piece in shown)


def test_the_built_in_model_is_a_decoder_of_seven_million() -> None:
    config = Config()
    shape = config.model.model_copy(update={"vocab_size": 8192})
    assert TransformerLM(shape, seed=None).parameter_count / 1e6 == pytest.approx(7.2, abs=0.1)
