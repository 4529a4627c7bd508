"""Estimated costs of a graph encoder match real models."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.kernels import library
from sansgpu.kernels.attention import bidirectional_ranges
from sansgpu.machine.execution import Execution
from sansgpu.tasks.graph.costs import GraphEncoderCosts
from sansgpu.tasks.graph.encoder import GraphEncoder
from tests.models.kept import kept_bytes_of


def shape(**changes: object) -> ModelConfig:
    given = {"activation": "gelu", "vocab_size": 64, "max_seq_len": 32, "n_relations": 3, "dropout": 0.1}
    return ModelConfig.model_validate({**given, "attention_dropout": 0.1, **changes})


def costs(
    model: ModelConfig, nodes: int = 32, masked: float = 0.15, longest_span: int | None = None, facts: int = 0
) -> GraphEncoderCosts:
    return GraphEncoderCosts(model, TrainingConfig(), nodes, nodes, masked, longest_span, facts)


@settings(max_examples=40)
@given(
    st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 40), st.integers(0, 3),
    st.sampled_from(["none", "learned", "sinusoidal"]), st.sampled_from(["none", "additive_log"]),
    st.sampled_from(["none", "hgat"]), st.sampled_from([None, 2]), st.booleans(), st.sampled_from([None, 3]),
)  # fmt: skip
def test_the_parts_add_up_to_the_model(
    layers: int, heads: int, inner: int, leaves: int, position: str, decay: str, fusion: str, rank: int | None,
    norm: bool, longest: int | None,
) -> None:  # fmt: skip
    config = shape(
        n_layers=layers, n_heads=heads, d_model=8 * heads, d_ff=inner, leaves=leaves, position=position, decay=decay,
        fusion=fusion, relation_rank=rank, embedding_norm=norm, slot_embedding=norm,
    )  # fmt: skip
    model = GraphEncoder(config, seed=None, longest_span=longest)
    assert sum(costs(config, longest_span=longest).parameters().values()) == model.parameter_count


def test_a_model_of_the_size_of_bert_base_has_the_expected_parameters() -> None:
    config = shape(
        d_model=768, n_heads=12, n_layers=12, d_ff=3072, vocab_size=8000, n_relations=12, max_seq_len=512,
        position="learned",
    )  # fmt: skip
    parts = costs(config).parameters()
    blocks = parts["attention"] + parts["feed_forward"] + parts["norms"]
    assert round(blocks / 1e6, 2) == 85.05
    assert round(parts["embedding"] / 1e6, 2) == 6.14
    assert round(parts["head"] / 1e6, 2) == 0.59


def test_flops_of_a_node_by_hand() -> None:
    config = shape(d_model=4, n_heads=1, n_layers=2, d_ff=8)
    matmul = 2 * (4 * 4 * 4 + 2 * 4 * 8)
    work = costs(config, nodes=10, masked=0.5).work(1)
    assert work.matmul == 6 * matmul
    assert work.attention == 2 * 3 * 2 * 2 * 4 * 10  # layers, passes, matmuls, FLOPs, width, nodes
    assert work.loss == 6 * 0.5 * (64 * 4 + 4 * 4)


def test_triples_without_text_are_scored_against_all_entities() -> None:
    config = shape(d_model=4, n_heads=1, n_layers=2, d_ff=8, n_entities=50)
    execution = Execution(100, 1, "fp32", "off", "native", "adamw")
    without, learned = (costs(config, nodes=10, masked=0.1, facts=facts) for facts in (0, 6))
    assert learned.work(20).loss - without.work(20).loss == 6 * 2 * 6 * 50 * 4  # FLOPs, graphs, facts, entities, width
    more_rows = 600 - 100  # triples minus masked nodes in a micro-batch
    assert learned.memory(execution).logits - without.memory(execution).logits > more_rows * 50 * 4


def test_matrices_of_one_shape_are_all_counted() -> None:
    assert costs(shape(d_model=8, n_heads=1, d_ff=8)).products().block == {(8, 8): 6}


def kept_by_a_block(config: ModelConfig, execution: Execution, nodes: int) -> int:
    model = GraphEncoder(config, seed=0).train()

    def prepare() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x = torch.randn(1, nodes, config.d_model, requires_grad=True)
        places = torch.stack((torch.arange(nodes), torch.zeros(nodes, dtype=torch.int64)), dim=1).int()[None]
        ranges, table = bidirectional_ranges(torch.zeros(1, nodes, dtype=torch.int64)), model.decay_table()
        assert table is not None
        return lambda: model.blocks[0](x, ranges, places, table, False), [x, ranges, places, table]

    return kept_bytes_of(model, execution, prepare)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_block_saves_the_estimated_bytes(precision: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", kernels == "native")
    for width, feed_forward, heads in [(128, 512, 2), (256, 256, 4)]:
        config = shape(d_model=width, d_ff=feed_forward, n_heads=heads, n_layers=1, max_seq_len=256)
        execution = Execution(1, 1, precision, "off", kernels, "adamw")
        assert costs(config, 256).saved_bytes(execution) == pytest.approx(
            kept_by_a_block(config, execution, 256), rel=0.03
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_settings_that_take_more_memory_have_larger_estimates(precision: str) -> None:
    config = shape(d_model=128, n_heads=2, n_layers=4, d_ff=512, vocab_size=1000)

    def total(nodes: int = 1000, kernels: str = "native", optimizer: str = "adamw", **changes: object) -> int:
        execution = Execution(1, 1, precision, "off", kernels, optimizer)
        return costs(config.model_copy(update=changes), nodes).memory(execution).total

    assert total() < total(2000)
    assert total() < total(kernels="torch")
    assert total(gradient_checkpointing=True) < total()
    assert total(optimizer="muon") < total()
    assert total(n_relations=40) > total()
