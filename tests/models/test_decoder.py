"""The decoder: masking, losses, compilation and initialization."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from sansgpu.config import Config, ModelConfig
from sansgpu.kernels import library
from sansgpu.models import TransformerLM
from sansgpu.models.formats.decoder_weights import hugging_face_config, to_hugging_face
from sansgpu.models.modules import compile_blocks
from sansgpu.tasks.configuration import load_config
from tests.models.small import LAYOUTS, config_of, model_of, tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_token_changes_no_earlier_logit(layout: str) -> None:
    model, inputs = model_of(layout), tokens(1, 20)
    changed = inputs.clone()
    changed[0, 12] += 1
    before, after = model(inputs), model(changed % 320)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.allclose(before[0, 12:], after[0, 12:])


@settings(max_examples=20)
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


@settings(max_examples=10)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 7), st.integers(0, 7), st.integers(0, 99))
def test_padding_changes_neither_logits_nor_loss(layout: str, before: int, after: int, seed: int) -> None:
    model, inputs = model_of(layout), tokens(2, 16, seed)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :before], mask[0, 16 - after :] = 0, 0
    padded = model(inputs, attention_mask=mask, labels=inputs)
    exact = model_of(layout).double()
    loss, targets = torch.tensor(0.0, dtype=torch.float64), 0
    for row, logits, kept in zip(inputs, padded.logits, mask.bool(), strict=True):
        alone = exact(row[kept][None])[0]
        torch.testing.assert_close(logits[kept].double(), alone, atol=1e-5, rtol=1e-4)
        loss += F.cross_entropy(alone[:-1], row[kept][1:], reduction="sum")
        targets += len(alone) - 1
    torch.testing.assert_close(padded.loss.double(), loss / targets, atol=1e-5, rtol=1e-4)
    assert torch.equal(model(inputs, attention_mask=mask.bool()), padded.logits)


def test_padding_stays_apart_from_packed_documents() -> None:
    model, inputs = model_of("modern"), tokens(1, 12)
    documents, mask = torch.tensor([[0] * 5 + [1] * 7]), torch.tensor([[1] * 9 + [0] * 3])
    expected = model(inputs[:, :9], document_ids=documents[:, :9])
    torch.testing.assert_close(model(inputs, document_ids=documents, attention_mask=mask)[:, :9], expected)


def test_a_mask_that_is_not_of_padding_is_refused() -> None:
    model, inputs = model_of("modern"), tokens(1, 4)
    with pytest.raises(ValueError, match="zeros between the tokens of a row"):
        model(inputs, attention_mask=torch.tensor([[1, 0, 1, 1]]))
    with pytest.raises(ValueError, match=r"shape \(1, 1, 4, 4\), but input_ids has \(1, 4\)"):
        model(inputs, attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match="is not supported with key-value caches"):
        model(inputs, caches=model.new_caches(1), attention_mask=torch.ones(1, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_gives_the_logits_of_the_whole(layout: str) -> None:
    model, inputs = model_of(layout), tokens(2, 15)
    caches = model.new_caches(2)
    with torch.no_grad():
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_dropout_acts_in_training_alone(layout: str, kind: str) -> None:
    none = {"dropout": 0.0, "attention_dropout": 0.0}
    inputs = tokens(1, 20)
    model, plain = model_of(layout, **{**none, kind: 0.2}), model_of(layout, **none)
    expected = plain(inputs)
    assert torch.equal(model(inputs), expected)
    assert torch.equal(plain.train()(inputs), expected)
    model.train()
    assert not torch.equal(model(inputs), model(inputs))


@settings(max_examples=20)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 3), st.integers(1, 24), st.floats(0, 1), st.integers(0, 99))
def test_the_loss_is_the_cross_entropy_of_the_logits_against_the_targets_as_given(
    layout: str, rows: int, length: int, ignored: float, seed: int
) -> None:
    model, inputs, targets = model_of(layout), tokens(rows, length, seed), tokens(rows, length, seed + 1)
    targets[torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < ignored] = -100
    logits = model(inputs).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.summed_loss(inputs, targets), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_with_labels_returns_loss_logits_and_gradients_of_transformers(layout: str) -> None:
    ours = model_of(layout)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hugging_face_config(ours.config, end_id=0)))
    theirs.load_state_dict(to_hugging_face(ours.config, ours.state_dict()), strict=False)
    theirs.tie_weights()
    inputs = tokens(3, 20)
    labels = inputs.clone()
    labels[:, :4], labels[1, 9] = -100, -100
    output, expected = (model(input_ids=inputs, labels=labels) for model in (ours, theirs.eval()))
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-4, rtol=1e-4)
    output.loss.backward()
    expected.loss.backward()
    gradients = to_hugging_face(
        ours.config, {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    )
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_labels_of_the_next_document_are_ignored() -> None:
    model, inputs = model_of("modern"), tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    labels = inputs.clone()
    labels[0, 5] = -100
    expected = model(inputs, document_ids=documents, labels=labels).loss
    torch.testing.assert_close(model(inputs, document_ids=documents, labels=inputs).loss, expected)
    assert not torch.equal(model(inputs, labels=inputs).loss, expected)
    assert torch.equal(
        model(inputs, document_ids=documents), model(inputs, document_ids=documents, labels=inputs).logits
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_made_without_reading_memory_nobody_wrote(layout: str) -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # empty tensors are filled with NaN
    try:
        assert torch.empty(1).isnan().all()
        model = TransformerLM(config_of(layout), 3)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    values = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, value in values if not value.isfinite().all()] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_without_a_seed_has_shapes_and_no_values_until_it_is_loaded(layout: str) -> None:
    seeded, bare = TransformerLM(config_of(layout), 3).eval(), TransformerLM(config_of(layout), None).eval()
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert bare.parameter_count == seeded.parameter_count
    bare.load_state_dict(seeded.state_dict(), assign=True)
    assert torch.equal(bare(tokens(1, 9)), seeded(tokens(1, 9)))


def test_a_tied_head_is_the_embedding_and_is_counted_once() -> None:
    tied, untied = (TransformerLM(config_of("modern", tie_embeddings=tie), None) for tie in (True, False))
    assert tied.head_weight is tied.embedding.weight
    assert untied.parameter_count - tied.parameter_count == 320 * 32


def test_training_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_size must be set"):
        TransformerLM(ModelConfig())


def test_the_seed_decides_the_weights_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (TransformerLM(config_of("modern"), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert all(torch.isfinite(p).all() for p in first.parameters())


def test_a_fresh_model_predicts_every_token_alike() -> None:
    for layout in LAYOUTS:
        model = TransformerLM(config_of(layout), 3).eval()
        loss = model.summed_loss(tokens(4, 24), tokens(4, 24, 2)) / 96
        assert loss.item() == pytest.approx(torch.tensor(320.0).log().item(), rel=0.02)


@pytest.mark.parametrize(("name", "millions"), [("nano", 82.9), ("cpu_small", 11.5), ("cpu_medium", 124.2)])
def test_the_configurations_have_the_sizes_they_claim(name: str, millions: float) -> None:
    config, _ = load_config(Path(__file__).parents[2] / "configs" / f"{name}.yaml")
    assert TransformerLM(config.model, seed=None).parameter_count / 1e6 == pytest.approx(millions, abs=0.1)


def test_the_built_in_model_is_a_decoder_of_seven_million() -> None:
    config = Config()
    shape = config.model.model_copy(update={"vocab_size": 8192})
    assert TransformerLM(shape, seed=None).parameter_count / 1e6 == pytest.approx(7.2, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["modern", "classic"])
def test_compiled_blocks_are_one_graph_and_compute_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", False)  # torch.compile is for models that our kernels do not compute
    torch._dynamo.reset()
    counters.clear()
    model, inputs = model_of(layout, dropout=0.0), tokens(2, 21)
    model.train()
    losses, gradients = [], []
    for compiled in (False, True):
        if compiled:
            compile_blocks(model)
        loss = model.summed_loss(inputs[:, :-1], inputs[:, 1:])
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
