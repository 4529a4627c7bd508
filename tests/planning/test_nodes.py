"""The estimated time of a step on several nodes agrees with a simulation of every hop."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import TrainingConfig
from sansgpu.machine.distributed.gloo_rate import Link
from sansgpu.machine.memory import effective_batch
from sansgpu.planning.nodes import (
    BACKWARD_SHARE,
    MIN_SCALING,
    NodeShare,
    NodeWork,
    ShardingLayout,
    buckets,
    critical_batch_tokens,
    exposed_seconds,
    link_of,
    pays_until,
    ring_seconds,
    share_of,
    step_of,
)
from sansgpu.train.gradient_reduction import BUCKET_BYTES

GLOO = Link(1e9, 50e-6)
WORK = NodeWork(0.02, 0.03, 0.1, gradients=300_000_000, last=40_000_000)

links = st.builds(Link, st.floats(1e6, 1e10), st.floats(0, 1e-3))
nodes = st.integers(1, 40)
sizes = st.lists(st.integers(1, BUCKET_BYTES), min_size=1, max_size=12)
seconds = st.floats(0, 20)


def simulated(sent: list[int], count: int, link: Link, backward: float) -> float:
    """Simulates every hop: a node proceeds once it has its own part of the previous bucket and its neighbor's."""
    clocks = [0.0] * count
    left = sum(sent[:-1])  # backward fills these buckets at a constant rate
    rate, at = left / backward if backward else math.inf, 0.0
    for number, size in enumerate(sent):
        at = backward if number == len(sent) - 1 else at + size / rate
        clocks = [max(clock, at) for clock in clocks]
        for _ in range(2 * (count - 1)):
            clocks = [max(clocks[i], clocks[i - 1]) + size / count / link.bytes_per_second + link.hop_seconds
                      for i in range(count)]  # fmt: skip
    return max(0.0, max(clocks) - backward)


@given(sizes, nodes, links, seconds)
def test_exposed_communication_matches_a_simulation_of_the_ring(
    sent: list[int], count: int, link: Link, backward: float
) -> None:
    said = exposed_seconds(sent, count, link, backward)
    assert said == pytest.approx(simulated(sent, count, link, backward), rel=1e-6, abs=1e-6)


@given(sizes, nodes, links, seconds)
def test_at_least_the_last_bucket_and_at_most_all_buckets_are_exposed(
    sent: list[int], count: int, link: Link, backward: float
) -> None:
    each = [ring_seconds(size, count, link) for size in sent]
    exposed = exposed_seconds(sent, count, link, backward)
    least = each[-1] + max(0.0, sum(each[:-1]) - backward)
    assert least * (1 - 1e-9) - 1e-9 <= exposed <= sum(each) * (1 + 1e-9) + 1e-9


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 30))
def test_buckets_hold_all_gradients_and_embeddings_are_sent_last(others: int, last: int) -> None:
    sent = buckets(others + last, last)
    assert sum(sent) == others + last
    assert all(size <= BUCKET_BYTES for size in sent[:-1])
    assert not sent or last <= sent[-1] <= max(last, BUCKET_BYTES)


@given(links, seconds, seconds, seconds, st.integers(1, 16))
def test_one_node_has_nothing_to_send(link: Link, fixed: float, each: float, update: float, pieces: int) -> None:
    work = replace(WORK, pass_seconds=fixed, example_seconds=each, update_seconds=update)
    for spread in (None, ShardingLayout(10**8, 10**8, 10**8, 12)):
        step = step_of(replace(work, spread=spread), NodeShare(1, 4, pieces), link)
        assert step.communication == step.hidden == 0
        assert step.seconds == step.compute == pytest.approx(pieces * (fixed + 4 * each) + update)


@given(links, st.floats(1, 8), st.integers(2, 40))
def test_a_slower_network_and_more_bytes_never_make_a_step_shorter(link: Link, factor: float, count: int) -> None:
    share, spread = NodeShare(count, 2, 3), ShardingLayout(10**8, 10**8, 10**8, 12)
    slower = Link(link.bytes_per_second / factor, link.hop_seconds * factor)
    more = replace(WORK, gradients=round(WORK.gradients * factor))
    for work in (WORK, replace(WORK, spread=spread)):
        step = step_of(work, share, link)
        assert step_of(work, share, slower).seconds >= step.seconds * (1 - 1e-9)
        assert step_of(replace(work, gradients=more.gradients), share, link).seconds >= step.seconds * (1 - 1e-9)
        assert step_of(work, replace(share, nodes=count + 1), link).communication >= step.communication * (1 - 1e-9)
        assert 0 <= step.hidden <= BACKWARD_SHARE * (0.02 + 2 * 0.03) + 1e-9
        assert step.seconds >= step.compute


def test_a_sharded_update_is_shorter_and_needs_a_broadcast() -> None:
    share, spread = NodeShare(4, 2, 1), ShardingLayout(weights=100_000_000)
    whole, part = (step_of(replace(WORK, spread=s), share, GLOO) for s in (None, spread))
    assert whole.compute - part.compute == pytest.approx(0.1 * 3 / 4)
    assert part.weights == pytest.approx(2 * (0.1 + 50e-6))  # the broadcast tree of four nodes has two levels
    assert whole.weights == 0


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 300))
def test_every_node_has_work_and_all_examples_are_processed(size: int, pieces: int, count: int) -> None:
    for batch_size in (size, "auto"):
        training = TrainingConfig(batch_size=batch_size, gradient_accumulation_steps=pieces)
        batch = effective_batch(training)
        if count <= batch:
            share = share_of(training, 64, size, count)
            assert share.micro_batch <= min(size, -(-batch // count))
            assert count * share.pieces * share.micro_batch >= batch
            assert count * (share.pieces - 1) * share.micro_batch < batch


def test_the_slower_of_network_and_gloo_sets_the_rate_and_latencies_add_up() -> None:
    fast, slow = link_of(1e11, 20e-6, GLOO), link_of(1e9, 20e-6, GLOO)
    assert fast.bytes_per_second == GLOO.bytes_per_second
    assert slow.bytes_per_second == pytest.approx(117.5e6)
    assert fast.hop_seconds == slow.hop_seconds == pytest.approx(70e-6)


def test_adding_nodes_pays_until_a_doubling_no_longer_does() -> None:
    assert pays_until({1: 8.0}) == 1
    assert pays_until({1: 8.0, 2: 4.0, 4: 2.0}) == 4
    assert pays_until({1: 8.0, 2: 4.0, 4: 3.9, 8: 1.0}) == 2
    assert pays_until({1: MIN_SCALING, 2: 1.0, 4: 0.99}) == 2


def test_the_critical_batch_matches_the_paper() -> None:
    """B* is the critical batch at a loss of 1; figure 10 of Kaplan et al. shows about a million tokens near 3 nats."""
    assert critical_batch_tokens(1.0) == 2.1e8
    assert 0.5e6 < critical_batch_tokens(3.0) < 2e6
    assert critical_batch_tokens(2.5) > critical_batch_tokens(3.0)
