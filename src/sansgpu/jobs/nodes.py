"""How long a step takes that several nodes share: a model, with one process a node and gloo's ring between them.

N nodes. Every node has the same share of the batch, computes its gradients in micro-batches, and adds them up with
the others' in buckets, each bucket as soon as the last micro-batch's backward pass has filled it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from sansgpu.config import TrainingConfig
from sansgpu.machine.gloo_rate import Link
from sansgpu.machine.memory import micro_batch_choices, micro_batches_each
from sansgpu.train.reduce import BUCKET_BYTES

# Of a pass is backward: measured as 0.47 to 0.61. It has two products for each one forward, but the loss computes its
# gradient, and the head's, on the way forward.
BACKWARD_SHARE = 0.5
# Of a message's bytes on Ethernet are data: 1,448 of a frame's 1,538, its gap and the headers of IP and TCP counted.
PAYLOAD_SHARE = 0.94
# A step's small collectives: sums over ranks twice, each two all-gathers of N - 1 hops, and one maximum of 2 (N - 1).
SMALL_HOPS = 6
PAYS = 1.25  # times as fast, for which twice the nodes are worth it


@dataclass(frozen=True)
class Share:
    """A node's part of a step."""

    nodes: int
    micro_batch: int  # examples
    pieces: int  # micro-batches


@dataclass(frozen=True)
class Spread:
    """What nodes tell each other besides gradients, where each keeps only a part (`training.sharding`)."""

    weights: int  # bytes that the one node which updates them gives to the others
    cut: int = 0  # bytes of the blocks' matrices as products read them, put together for every pass
    cut_gradients: int = 0  # and of their gradients, added up after every pass
    blocks: int = 0  # which is done one by one


@dataclass(frozen=True)
class Work:
    """What a step asks of the nodes together."""

    pass_seconds: float  # of a micro-batch, however few its examples
    example_seconds: float  # more, for each of them
    update_seconds: float
    gradients: int  # bytes that are added up after the last micro-batch
    last: int  # of these, the embedding's: whole only when backward is at its end
    spread: Spread | None = None


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step go."""

    compute: float
    gradients: float  # that the link is busy with them
    hidden: float  # of which backward still goes on
    weights: float  # putting together, and giving away, what is spread over nodes
    collectives: float  # small ones: sums of losses and counts, and whether to stop

    @property
    def communication(self) -> float:
        """Everything sent, hidden or not."""
        return self.gradients + self.weights + self.collectives

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.communication - self.hidden


def link_of(bits_per_second: float, latency_seconds: float, gloo: Link) -> Link:
    """The link over a network: as fast as the slower of it and `gloo`, which is what the processors do without one.

    gloo cuts a message into segments and adds one up while the next is on its way, so the faster of the two waits.
    """
    network = bits_per_second / 8 * PAYLOAD_SHARE
    return Link(min(network, gloo.bytes_per_second), latency_seconds + gloo.hop_seconds)


def share_of(training: TrainingConfig, window: int, most: int, nodes: int) -> Share:
    """A node's part, in micro-batches of up to `most` examples, as training chooses among what it may."""
    choices = micro_batch_choices(training, window, nodes)
    size = max((size for size in choices if size <= most), default=choices[0])
    return Share(nodes, size, micro_batches_each(training, size, nodes))


def step_of(work: Work, share: Share, link: Link) -> Step:
    """A step of `share.nodes` nodes."""
    spread, nodes = work.spread, share.nodes
    one_pass = work.pass_seconds + share.micro_batch * work.example_seconds
    update = work.update_seconds / (nodes if spread else 1)
    sizes = buckets(work.gradients, work.last)
    sending = sum(ring_seconds(size, nodes, link) for size in sizes)
    exposed = exposed_seconds(sizes, nodes, link, BACKWARD_SHARE * one_pass)
    return Step(
        compute=share.pieces * one_pass + update,
        gradients=sending,
        hidden=max(0.0, sending - exposed),
        weights=_spread_seconds(spread, share, link) if spread else 0.0,
        collectives=SMALL_HOPS * (nodes - 1) * link.hop_seconds,
    )


def ring_seconds(size: float, nodes: int, link: Link) -> float:
    """Of adding up `size` bytes over a ring: 2 (N - 1) steps, in each of which a node passes on an N-th.

    N - 1 steps add, N - 1 more give everyone the sums (Patarasuk and Yuan 2009; gloo's default).
    """
    return 2 * (nodes - 1) * (size / nodes / link.bytes_per_second + link.hop_seconds)


def buckets(gradients: int, last: int) -> list[int]:
    """Bytes that travel together, in the order in which backward fills them; `last` is in the last one."""
    full, rest = divmod(gradients - last, BUCKET_BYTES)
    ends = [rest + last] if rest + last <= BUCKET_BYTES else [rest, last]
    return [size for size in (*[BUCKET_BYTES] * full, *ends) if size]


def exposed_seconds(sizes: list[int], nodes: int, link: Link, backward_seconds: float) -> float:
    """How long the buckets, one behind the other, are on their way after backward has ended.

    Backward fills them at a constant rate, and the last one as it ends.
    """
    inside, filled, done = sum(sizes[:-1]), 0, 0.0
    for size in sizes:
        filled += size
        ready = backward_seconds * min(1.0, filled / inside) if inside else backward_seconds
        done = max(done, ready) + ring_seconds(size, nodes, link)
    return max(0.0, done - backward_seconds)


def pays_until(seconds: dict[int, float]) -> int:
    """By the seconds of a step on 1, 2, 4, ... nodes: the count behind the last doubling that pays."""
    counts = sorted(seconds)
    for fewer, more in pairwise(counts):
        if seconds[fewer] < PAYS * seconds[more]:
            return fewer
    return counts[-1]


def critical_batch_tokens(loss: float) -> float:
    """Tokens of a batch beyond which a larger one no longer saves steps in proportion, by the loss in nats a token.

    B* / L^(1 / 0.21), fitted to Transformers on web text (Kaplan et al. 2020, arXiv 2001.08361, section 5.1).
    """
    return 2.1e8 * math.pow(loss, -4.76)


def _spread_seconds(spread: Spread, share: Share, link: Link) -> float:
    """Weights go down a binary tree from the node that updates them, as gloo broadcasts, one behind the other.

    Matrices that are cut are put together for every pass forward and again backward, and their gradients added up, as
    gloo has it over a ring; torch's fully_shard waits for each.
    """
    others, rate = share.nodes - 1, link.bytes_per_second
    given = others.bit_length() * (spread.weights / rate + link.hop_seconds)
    gathered = 2 * others * (spread.cut / share.nodes / rate + spread.blocks * link.hop_seconds)
    added = 2 * others * (spread.cut_gradients / share.nodes / rate + spread.blocks * link.hop_seconds)
    return given + share.pieces * (gathered + added)
