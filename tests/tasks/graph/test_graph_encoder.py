"""The graph encoder, compared with a plain one in the padded layout of the GraphMERT paper."""

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.graph.plain_encoder import PlainEncoder, padded
from transformers import AutoModelForMaskedLM, AutoTokenizer

from sansgpu.config import ModelConfig
from sansgpu.data.batch import IGNORE
from sansgpu.data.forms.graphs import Triple
from sansgpu.data.tokenizer import BPETokenizer
from sansgpu.kernels.attention import Decay, attention
from sansgpu.models.formats.folders import is_graph_folder
from sansgpu.tasks.graph.batch import GraphBatch, MaskedExample
from sansgpu.tasks.graph.encoder import GraphEncoder, RelationFusion
from sansgpu.tasks.graph.folder import export_graph_model, load_graph_folder
from sansgpu.tasks.graph.leafy import LeafyExample, PlacedTriple
from sansgpu.tasks.graph.tokenizer import BERT, GraphCodec, MaskTokenizer

ROOTS, LEAVES, VOCABULARY, RELATIONS = 12, 3, 320, 4


def shape(**changes: object) -> ModelConfig:
    given = {
        "vocab_size": VOCABULARY, "d_model": 32, "n_heads": 2, "n_layers": 2, "d_ff": 64, "max_seq_len": ROOTS,
        "leaves": LEAVES, "n_relations": RELATIONS, "activation": "gelu",
    }  # fmt: skip
    return ModelConfig.model_validate({**given, **changes})


def scaled(model: GraphEncoder) -> GraphEncoder:
    """Scales up a model's weights so that errors show in its outputs, and returns it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            if name == "decay_center":
                parameter.add_(torch.tensor([-0.5, 0.7]))
    return model.eval()


def random_batch(seed: int, graphs: int) -> GraphBatch:
    draws = np.random.default_rng(seed)
    examples, shown = [], []
    for _ in range(graphs):
        roots = int(draws.integers(4, ROOTS + 1))
        placed = []
        for place in np.sort(draws.choice(roots - 1, int(draws.integers(0, 3)), replace=False)):
            tail = draws.integers(5, VOCABULARY, int(draws.integers(1, LEAVES + 1)))
            heads = int(draws.integers(1, roots - place + 1))
            placed.append(
                PlacedTriple(int(place), heads, int(draws.integers(1, RELATIONS + 1)), tail, Triple("", "", ""))
            )
        example = LeafyExample(draws.integers(5, VOCABULARY, roots), np.ones(roots, bool), placed)
        tokens = np.concatenate([example.tokens, *(p.tail for p in placed)])
        targets = np.where(draws.random(len(tokens)) < 0.4, tokens, IGNORE)
        bounds = np.zeros((len(tokens), 2), np.int64)
        examples.append(example)
        shown.append(MaskedExample(tokens, targets, bounds))
    return GraphBatch.of(examples, shown)


def logits(model: GraphEncoder, batch: GraphBatch) -> torch.Tensor:
    states = model.hidden(batch.tokens, batch.nodes, batch.lengths, batch.placed_triples())
    return model.logits(states)


@pytest.mark.parametrize("seed", range(4))
def test_without_its_empty_leaves_a_graph_gives_what_the_padded_one_gives(seed: int) -> None:
    """Compares logits of real nodes and gradients of all weights with the plain model in float64."""
    config = shape()
    ours = scaled(GraphEncoder(config, seed))
    plain = PlainEncoder(config, ROOTS)
    plain.take(ours)
    plain = plain.double().eval()
    batch = random_batch(seed, 3)
    tokens, targets, triples, real = padded(batch, ROOTS, LEAVES)
    expected = plain.loss(tokens, targets, triples, real).sum()
    kept = batch.targets != IGNORE
    found = torch.nn.functional.cross_entropy(logits(ours, batch)[kept], batch.targets[kept], reduction="sum")
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()  # type: ignore[no-untyped-call]
    found.backward()  # type: ignore[no-untyped-call]
    theirs = {plain.our_name(name): p.grad for name, p in plain.named_parameters()}
    for name, parameter in ours.named_parameters():
        grad = theirs[name]
        assert grad is not None
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-9)


@pytest.mark.parametrize("changes", [{}, {"decay": "additive_log"}, {"decay": "none"}, {"relation_rank": 3}])
def test_graphs_of_a_batch_do_not_see_each_other(changes: dict[str, object]) -> None:
    model = scaled(GraphEncoder(shape(**changes), 1))
    batch = random_batch(5, 4)
    together = logits(model, batch)
    apart = torch.cat([logits(model, batch.rows(number, number + 1)) for number in range(4)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_a_low_rank_relation_is_the_product_of_its_two_matrices() -> None:
    torch.manual_seed(0)
    low = RelationFusion(shape(relation_rank=5), RELATIONS).eval()
    whole = RelationFusion(shape(), RELATIONS).eval()
    assert low.outer is not None
    product = low.outer.weight.view(-1, 32, 5) @ low.matrix.weight.view(-1, 5, 32)
    whole.load_state_dict({"matrix.weight": product.flatten(1), "attention.weight": low.attention.weight})
    x, triples = torch.randn(9, 32), torch.tensor([[2, 0, 3, 7, 2], [1, 4, 1, 6, 1]])
    torch.testing.assert_close(low(x, triples), whole(x, triples), rtol=1e-4, atol=1e-5)
    assert torch.equal(low(x, triples)[:6], x[:6])  # roots are unchanged


def test_order_is_known_by_distance_alone() -> None:
    """Without position embeddings, a reversed text gives the reversed states."""
    forwards = random_batch(0, 1).tokens
    nodes = torch.stack((torch.arange(len(forwards)), torch.zeros(len(forwards), dtype=torch.int64)), dim=1).int()
    lengths = torch.tensor([len(forwards)])
    for position, same in (("none", True), ("learned", False), ("sinusoidal", False)):
        model = scaled(GraphEncoder(shape(position=position, max_seq_len=60), 2))
        one, other = model.hidden(forwards, nodes, lengths), model.hidden(forwards.flip(0), nodes, lengths)
        assert torch.allclose(one, other.flip(0), atol=1e-4) is same


def test_multiplied_logits_smooth_where_added_ones_decay() -> None:
    """Compares the attention to a far key when a near key matches better."""
    nodes = torch.tensor([[[0, 0], [0, 1], [30, 0]]], dtype=torch.int32)  # a root, its leaf, a far root
    ranges = torch.tensor([[[1, 3]] * 3], dtype=torch.int32)  # keys: leaf and far root
    q = torch.tensor([2.0, 0.0]).expand(1, 1, 3, 2).contiguous()
    k = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-4.0, 0.0]])[None, None]
    v = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, None]  # the first number is the far key's weight
    seen = {}
    for decay in ("none", "multiply_logits", "additive_log"):
        table = GraphEncoder(shape(decay=decay, max_seq_len=40), 0).decay_table()
        with_decay = None if table is None else Decay(nodes, table[:1].detach(), decay == "additive_log")
        seen[decay] = float(attention(q, k, v, ranges, 0.0, with_decay)[0, 0, 0, 0])
    assert seen["multiply_logits"] > 5 * seen["none"]  # the far key's negative logit rose to almost 0
    assert seen["additive_log"] < 0.2 * seen["none"]


def test_weights_begin_as_the_paper_has_them() -> None:
    model = GraphEncoder(shape(d_model=64, n_heads=4), 3)
    assert model.fusion is not None
    assert float(model.fusion.matrix.weight[0].abs().max()) == 0.0
    assert float(model.fusion.matrix.weight[1:].std()) == pytest.approx(0.02, rel=0.1)
    first = model.blocks[0]
    limit = (6 / 128) ** 0.5
    for name, most in (("q", limit * 2**-0.5), ("v", limit * 2**-0.5), ("o", limit)):
        weight = getattr(first.attention, name).weight
        assert most * 0.95 < float(weight.abs().max()) <= most
    assert model.decay_center is not None
    table = model.decay_table()
    assert table is not None
    expected = [1.000, 0.870, 0.750, 0.569, 0.369]
    assert [float(table[0, d]) for d in (0, 1, 2, 4, 8)] == pytest.approx(expected, abs=1.5e-3)
    added = GraphEncoder(shape(decay="additive_log"), 3).decay_table()
    assert added is not None
    torch.testing.assert_close(added[0].exp(), table[0, : added.shape[1]])


@pytest.fixture(scope="module")
def codec() -> GraphCodec:
    backend = BPETokenizer.train(["a b c d e f g"] * 3, VOCABULARY, BERT).backend
    return GraphCodec(MaskTokenizer(backend, "test"), ("isa", "part of"))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_an_encoder_of_text_alone_is_exported_as_bert(tmp_path: Path, codec: GraphCodec, activation: str) -> None:
    config = shape(
        leaves=0, decay="none", position="learned", embedding_norm=True, activation=activation, n_relations=None
    )
    model = scaled(GraphEncoder(config, 4))
    export_graph_model(model, GraphCodec(codec.tokenizer, ()), tmp_path / "bert")
    theirs, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(5, 5 + ROOTS)
    nodes = torch.stack((torch.arange(ROOTS), torch.zeros(ROOTS, dtype=torch.int64)), dim=1).int()
    ours = model.logits(model.hidden(tokens, nodes, torch.tensor([ROOTS])))
    torch.testing.assert_close(ours, theirs.eval()(input_ids=tokens[None]).logits[0], rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    assert tokenizer.mask_token == "[MASK]"
    assert tokenizer("a b").input_ids == codec.tokenizer.encode_batch(["a b"])[0].ids


def test_a_graph_encoder_is_exported_as_a_folder(tmp_path: Path, codec: GraphCodec) -> None:
    model = scaled(GraphEncoder(shape(), 4, longest_span=3))
    export_graph_model(model, codec, tmp_path / "final", {"data": {"max_length": 9}})
    assert is_graph_folder(tmp_path / "final")
    (again, learned), batch = load_graph_folder(tmp_path / "final"), random_batch(1, 2)
    assert learned == {"data": {"max_length": 9}}
    assert torch.equal(logits(model, batch), logits(again.eval(), batch))
    assert GraphCodec.load(tmp_path / "final").relations == ("isa", "part of")
