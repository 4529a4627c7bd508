"""Performance model of a data-parallel step on N nodes with one process each and gloo's ring all-reduce.

Every node computes gradients of an equal share of the batch in micro-batches. Gradients are all-reduced in buckets,
each as soon as the last micro-batch's backward pass has filled it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from sansgpu.config.training import TrainingConfig
from sansgpu.machine.distributed.gloo_rate import Link
from sansgpu.machine.memory import micro_batch_choices, micro_batches_per_rank
from sansgpu.train.gradient_reduction import BUCKET_BYTES

# Backward's share of a forward and backward pass, measured as 0.47 to 0.61. It is not 2/3, because the loss computes
# its gradient and the head's in the forward pass.
BACKWARD_SHARE = 0.5
# Data's share of bytes on Ethernet: 1,448 of 1,538 per frame, after the inter-frame gap and IP and TCP headers.
PAYLOAD_SHARE = 0.94
# Hops of a step's small collectives, in units of N - 1: two sums (two all_gathers each) and one maximum (2 (N - 1)).
SMALL_HOPS = 6
MIN_SCALING = 1.25  # minimum speedup that justifies doubling the nodes


@dataclass(frozen=True)
class NodeShare:
    """One node's part of a step."""

    nodes: int
    micro_batch: int  # examples
    pieces: int  # micro-batches per step


@dataclass(frozen=True)
class ShardingLayout:
    """Communication that `training.sharding` adds to the gradient all-reduce."""

    weights: int  # bytes broadcast by the nodes that update them
    cut: int = 0  # bytes of sharded block weights, all-gathered in every forward and backward pass
    cut_gradients: int = 0  # bytes of their gradients, reduce-scattered after every pass
    blocks: int = 0  # sharded blocks, each communicated separately


@dataclass(frozen=True)
class NodeWork:
    """Compute and communication of one step."""

    pass_seconds: float  # fixed cost of a micro-batch
    example_seconds: float  # additional cost per example
    update_seconds: float
    gradients: int  # bytes to all-reduce after the last micro-batch, or with sync_every > 1 in a synchronization
    last: int  # bytes of these that are ready only when backward ends (the embedding's)
    spread: ShardingLayout | None = None  # None without sharding
    sync_every: int = 1  # steps between synchronizations


@dataclass(frozen=True)
class NodeStep:
    """Duration of a step's parts in seconds."""

    compute: float
    gradients: float  # all-reduce of gradients, or of changes and moments
    hidden: float  # part of it that overlaps with backward
    weights: float  # broadcast and all-gather of sharded weights
    collectives: float  # small ones: sums of losses and counts, and the decision to stop

    @property
    def communication(self) -> float:
        """All communication, overlapped or not."""
        return self.gradients + self.weights + self.collectives

    @property
    def seconds(self) -> float:
        return self.compute + self.communication - self.hidden


def link_of(bits_per_second: float, latency_seconds: float, gloo: Link) -> Link:
    """Returns the effective link: the slower of the network and `gloo`, gloo's speed measured without a network.

    gloo reduces one segment of a message while it sends the next, so the slower of the two decides.
    """
    network = bits_per_second / 8 * PAYLOAD_SHARE
    return Link(min(network, gloo.bytes_per_second), latency_seconds + gloo.hop_seconds)


def share_of(training: TrainingConfig, window: int, most: int, nodes: int) -> NodeShare:
    """Returns a node's share, in the largest allowed micro-batches of up to `most` examples."""
    choices = micro_batch_choices(training, window, nodes)
    size = max((size for size in choices if size <= most), default=choices[0])
    return NodeShare(nodes, size, micro_batches_per_rank(training, size, nodes))


def step_of(work: NodeWork, share: NodeShare, link: Link) -> NodeStep:
    spread, nodes = work.spread, share.nodes
    one_pass = work.pass_seconds + share.micro_batch * work.example_seconds
    update = work.update_seconds / (nodes if spread else 1)
    sizes = buckets(work.gradients, work.last)
    sending = sum(ring_seconds(size, nodes, link) for size in sizes)
    exposed = exposed_seconds(sizes, nodes, link, BACKWARD_SHARE * one_pass) if work.sync_every == 1 else sending
    return NodeStep(
        compute=share.pieces * one_pass + update,
        gradients=sending / work.sync_every,
        hidden=max(0.0, sending - exposed),
        weights=_spread_seconds(spread, share, link) if spread else 0.0,
        collectives=SMALL_HOPS * (nodes - 1) * link.hop_seconds / work.sync_every,
    )


def ring_seconds(size: float, nodes: int, link: Link) -> float:
    """Returns the duration of a ring all-reduce of `size` bytes: 2 (N - 1) steps of size / N bytes.

    The first N - 1 steps reduce, the others distribute the sums (Patarasuk and Yuan 2009; gloo's default).
    """
    return 2 * (nodes - 1) * (size / nodes / link.bytes_per_second + link.hop_seconds)


def buckets(gradients: int, last: int) -> list[int]:
    """Returns bucket sizes in bytes, in the order in which backward fills them. The final one includes `last`."""
    full, rest = divmod(gradients - last, BUCKET_BYTES)
    ends = [rest + last] if rest + last <= BUCKET_BYTES else [rest, last]
    return [size for size in (*[BUCKET_BYTES] * full, *ends) if size]


def exposed_seconds(sizes: list[int], nodes: int, link: Link, backward_seconds: float) -> float:
    """Returns how long the sequential all-reduces of all buckets continue after backward has ended.

    Assumes that backward fills buckets at a constant rate and completes the last one at its end.
    """
    before_last, filled, done = sum(sizes[:-1]), 0, 0.0
    for size in sizes:
        filled += size
        ready = backward_seconds * min(1.0, filled / before_last) if before_last else backward_seconds
        done = max(done, ready) + ring_seconds(size, nodes, link)
    return max(0.0, done - backward_seconds)


def pays_until(seconds: dict[int, float]) -> int:
    """Returns the node count up to which every doubling pays, given step seconds on 1, 2, 4, ... nodes."""
    counts = sorted(seconds)
    for fewer, more in pairwise(counts):
        if seconds[fewer] < MIN_SCALING * seconds[more]:
            return fewer
    return counts[-1]


def critical_batch_tokens(loss: float) -> float:
    """Returns the critical batch size in tokens at a loss in nats per token.

    B* / L^(1 / 0.21), fitted to Transformers on web text (Kaplan et al. 2020, arXiv 2001.08361, section 5.1).
    """
    return 2.1e8 * math.pow(loss, -4.76)


def _spread_seconds(spread: ShardingLayout, share: NodeShare, link: Link) -> float:
    """Returns the duration of the communication that sharding adds to a step.

    Updated weights are broadcast down gloo's binary tree. With sharding full, weights are all-gathered over a ring for
    forward and again for backward, and gradients are reduced over a ring. torch's fully_shard overlaps none of it.
    """
    others, rate = share.nodes - 1, link.bytes_per_second
    broadcast = others.bit_length() * (spread.weights / rate + link.hop_seconds)
    all_gather = 2 * others * (spread.cut / share.nodes / rate + spread.blocks * link.hop_seconds)
    reduce = 2 * others * (spread.cut_gradients / share.nodes / rate + spread.blocks * link.hop_seconds)
    return broadcast + share.pieces * (all_gather + reduce)
