"""Compares the loss of tokens selected by their excess loss, in C++ and in plain torch, with float64 code."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sansgpu.config import Config
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.models import TransformerLM
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.pretrain.costs import DecoderCosts
from sansgpu.tasks.pretrain.objective import PretrainObjective
from tests.kernels.test_kernels import RANDOM

VOCABULARY = 23


def tiny(share: float) -> Config:
    model = {"d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 24, "max_seq_len": 64, "vocab_size": VOCABULARY}
    distillation = {"teacher": "lessons", "weight": 0, "token_share": share}
    training = {"distillation": distillation, "z_loss": 0.001, "seed": 3}
    return as_config({"model": {**model, "dropout": 0}, "training": training}, "the test")


def random_batch(rows: int, time: int, ignored: float, packed: bool, seed: int) -> Batch:
    draws = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(0, VOCABULARY, (2, rows, time), generator=draws)
    targets[torch.rand(rows, time, generator=draws) < ignored] = IGNORE
    known = -4 * torch.rand(rows, time, generator=draws).half()
    batch = Batch(inputs, targets, teacher_target_log_probabilities=known)
    if not packed:
        return batch
    documents = (torch.rand(rows, time, generator=draws) < 0.2).cumsum(1)
    return replace(batch, document_ids=documents, positions=torch.arange(time).expand(rows, time))


def plain_loss(model: TransformerLM, batch: Batch, share: float, z_loss: float) -> torch.Tensor:
    """Computes the loss of a micro-batch from the logits of all tokens: the mean over the selected ones times N."""
    logits = model(batch.inputs, batch.positions, batch.document_ids)
    assert isinstance(logits, torch.Tensor)
    assert batch.teacher_target_log_probabilities is not None
    valid = batch.targets != IGNORE
    logits, count = logits[valid], int(valid.sum())
    losses = torch.nn.functional.cross_entropy(logits, batch.targets[valid], reduction="none")
    excess = (losses + batch.teacher_target_log_probabilities[valid].double()).detach()
    chosen = sorted(range(count), key=lambda token: -float(excess[token]))
    last = max(1, round(share * count))
    assume(last >= count or float(excess[chosen[last - 1]] - excess[chosen[last]]) > 1e-4)  # no ties within rounding
    losses = losses + z_loss * torch.logsumexp(logits, dim=1).square()
    return losses[chosen[:last]].sum() * (count / last) if count else losses.sum()


@RANDOM
@given(
    st.integers(1, 5), st.integers(1, 20), st.sampled_from([0.0, 0.3, 1.0]), st.booleans(), st.floats(0.05, 0.99),
    st.integers(1, 3), st.integers(1, 2), st.integers(0, 99),
)  # fmt: skip
def test_loss_and_gradients(
    kernels: str, rows: int, time: int, ignored: float, packed: bool, share: float, size: int, ranks: int, seed: int
) -> None:
    config, batch = tiny(share), random_batch(rows, time, ignored, packed, seed)
    objective = PretrainObjective(config)
    wide = deepcopy(objective.model).double()
    pieces = [piece for rank in range(ranks) for piece in batch.micro_batches(size, rank, ranks)]
    assert sum(piece.target_count() for piece in pieces) == batch.target_count()
    total, expected = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for piece in pieces:  # the sum over accumulated micro-batches and ranks
        total = total + objective.loss(piece)
        expected = expected + plain_loss(wide, piece, share, config.training.z_loss)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-4)
    total.backward()
    expected.backward()
    for ours, theirs in zip(objective.model.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]


def test_the_estimate_counts_the_head_twice_in_part() -> None:
    """The losses of all tokens take 2 FLOPs per weight of the head, and those of the selected tokens 6."""
    whole, half = (DecoderCosts(c.model, c.training, 64, 64).work(1) for c in (tiny(1 - 1e-9), tiny(0.5)))
    assert whole.loss == pytest.approx(8 * 16 * VOCABULARY)
    assert half.loss == pytest.approx(5 * 16 * VOCABULARY)
    assert whole.matmul == half.matmul
