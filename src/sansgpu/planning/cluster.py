"""Estimates a run on several machines like this one (`sansgpu plan --nodes N --network 10gbps`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sansgpu.config import ConfigError, change_config
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.distributed.gloo_rate import Link, measure_gloo
from sansgpu.machine.measurements import cached_measurement
from sansgpu.machine.memory import Memory, effective_batch
from sansgpu.models.costing import FULL
from sansgpu.planning.forecast import done_at, expected_bits_per_byte, forecast_of, length_of
from sansgpu.planning.memory_fit import OUTSIDE_BLOCKS, estimate_memory
from sansgpu.planning.nodes import (
    MIN_SCALING,
    NodeShare,
    NodeStep,
    NodeWork,
    ShardingLayout,
    critical_batch_tokens,
    link_of,
    pays_until,
    share_of,
    step_of,
)
from sansgpu.planning.resolve import PLAN, ignore_message, resolve_run
from sansgpu.planning.results import ClusterPlan, ClusterPoint, CriticalBatch, GrownBatch
from sansgpu.tasks.pretrain.data import TextCorpus
from sansgpu.train.calibrate import Timing
from sansgpu.train.gradient_reduction import BUCKET_BYTES, message_dtype
from sansgpu.train.outer_optimizer import MOMENT_DTYPE
from sansgpu.train.run import TrainingRun

NODE_COUNTS = tuple(1 << doublings for doublings in range(11))  # 1 to 1,024
DEFAULT_LOSS = 3.0  # nats per token, typical of a small language model, if no estimate is available
SAMPLED_WINDOWS = 64  # validation windows used to measure bytes per token
BITS_PER_SECOND = {"gbps": 9, "gbit": 9, "mbps": 6, "mbit": 6}  # powers of ten
SECONDS = {"us": -6, "ms": -3}  # powers of ten


@dataclass(frozen=True)
class Cluster:
    """A number of nodes and the network between them."""

    nodes: int
    bits_per_second: float
    latency_seconds: float  # one way
    price: float | None  # price of a node for an hour


def cluster_of(nodes: int, network: str, latency: str, price: float | None) -> Cluster:
    """Parses command-line arguments. Raises ConfigError."""
    bits = _quantity("--network", network, BITS_PER_SECOND, "10gbps or 100mbit")
    return Cluster(nodes, bits, _quantity("--latency", latency, SECONDS, "50us or 0.1ms"), price)


def require_examples(nodes: int, config: Config, processes: int = 1) -> None:
    """Raises ConfigError if a batch has fewer examples than there are nodes with this number of processes each."""
    if (batch := effective_batch(config.training)) < nodes * processes:
        many, each = (f" with {processes} processes each", "process") if processes > 1 else ("", "node")
        raise ConfigError(
            f"--nodes is {nodes}{many}, but a step has {counted(batch, 'example')}, and each {each} needs at least "
            "one; raise training.gradient_accumulation_steps or lower --nodes."
        )


def plan_nodes(run: TrainingRun, cluster: Cluster, progress: ReportProgress) -> ClusterPlan:
    """Returns the `cluster` object of `plan --json`. Raises ConfigError if no step could be timed on this machine."""
    if run.timing is None:
        raise ConfigError(
            "the model is too large to time on this machine (three of its layers do not fit into memory), so --nodes "
            "cannot be estimated; run the command on one of the nodes."
        )
    gloo, most = _gloo(run, progress), effective_batch(run.config.training)
    link = link_of(cluster.bits_per_second, cluster.latency_seconds, gloo)
    cluster_run = _ClusterRun(run, cluster, link, _work(run, run.timing, progress))
    curve = [cluster_run.row(nodes) for nodes in NODE_COUNTS if nodes <= most]
    seconds = {row["nodes"]: row["step_seconds"] for row in curve}
    here, step = cluster_run.row(cluster.nodes), cluster_run.step(cluster.nodes)
    unknown = dict.fromkeys(here)
    return {
        **here,
        "network_bits_per_second": cluster.bits_per_second,
        "latency_seconds": cluster.latency_seconds,
        "gloo_bytes_per_second": gloo.bytes_per_second,
        "gloo_hop_seconds": gloo.hop_seconds,
        "gradient_bytes": cluster_run.work.gradients,
        "sync_every": cluster_run.work.sync_every,
        "compute_seconds": step.compute,
        "communication_seconds": step.communication,
        "overlapped_seconds": step.hidden,
        "collectives_seconds": step.collectives,
        "finish": done_at(here["total_seconds"]),
        "memory_bytes": cluster_run.memory(cluster.nodes).to_json(),
        "most_nodes": most,
        "pays": MIN_SCALING,
        "pays_until": pays_until(seconds),
        "fastest_nodes": min(seconds, key=lambda nodes: seconds[nodes]),
        "grown_batch": cluster_run.grown(cluster.nodes),
        **_critical_batch(run),
        "curve": [*map(dict, curve), *(unknown | {"nodes": nodes} for nodes in NODE_COUNTS if nodes > most)],
    }


@dataclass(frozen=True)
class _ClusterRun:
    """A run on a variable number of nodes."""

    run: TrainingRun
    cluster: Cluster
    link: Link
    work: NodeWork

    def row(self, nodes: int) -> ClusterPoint:
        run, price = self.run, self.cluster.price
        step_seconds = self.step(nodes).seconds
        steps, seconds = length_of(run, forecast_of(run, nodes, step_seconds))
        speed_up, node_hours = self.step(1).seconds / step_seconds, nodes * seconds / 3600
        return {
            "nodes": nodes,
            "step_seconds": step_seconds,
            "tokens_per_second": run.learned_per_step / step_seconds,
            "speed_up": speed_up,
            "efficiency": speed_up / nodes,
            "total_steps": steps,
            "total_seconds": seconds,
            "node_hours": node_hours,
            "cost": None if price is None else node_hours * price,
            "fits": self.memory(nodes).fits(run.available),
        }

    def grown(self, nodes: int) -> GrownBatch:
        """Returns speed and efficiency with a batch `nodes` times as large, i.e. the same work per node."""
        step = step_of(self.work, replace(self._share(1), nodes=nodes), self.link)
        return {
            "tokens_per_step": nodes * self.run.tokens_per_step,
            "tokens_per_second": nodes * self.run.learned_per_step / step.seconds,
            "efficiency": self.step(1).seconds / step.seconds,
        }

    def step(self, nodes: int) -> NodeStep:
        return step_of(self.work, self._share(nodes), self.link)

    def memory(self, nodes: int) -> Memory:
        size = self._share(nodes).micro_batch
        return estimate_memory(self.run.config, replace(self.run.execution, world_size=nodes, micro_batch=size))

    def _share(self, nodes: int) -> NodeShare:
        config = self.run.config
        return share_of(config.training, config.window, self.run.execution.micro_batch, nodes)


def _work(run: TrainingRun, timing: Timing, progress: ReportProgress) -> NodeWork:
    """Returns a step's work in seconds and bytes. Assumes pass times to be linear in the size of the micro-batch."""
    training = run.config.training
    parts, layers = run.costs.parameters(), run.costs.pass_layers
    whole, example = timing.pass_seconds(layers), 0.0
    if timing.micro_batch > 1 and (one := _one_example(run, timing, progress)) is not None:
        example = max(0.0, whole - one.pass_seconds(layers)) / (timing.micro_batch - 1)
    sharded = sum(n for part, n in parts.items() if part not in OUTSIDE_BLOCKS) if training.sharding == "full" else 0
    trained = parts.get("adapter", sum(parts.values())) - sharded
    sent, is_local = message_dtype(training).itemsize, training.sync_every > 1
    moments = run.costs.moment_bytes(run.execution) // FULL * MOMENT_DTYPE.itemsize if is_local else 0
    read = run.execution.compute_dtype.itemsize
    spread = ShardingLayout(trained * read, sharded * read, sharded * FULL, run.costs.layers if sharded else 0)
    return NodeWork(
        pass_seconds=whole - timing.micro_batch * example,
        example_seconds=example,
        update_seconds=timing.step_seconds(run.costs, accumulation=0),
        gradients=trained * sent + moments,
        last=0 if is_local or "adapter" in parts else parts.get("embedding", 0) * sent,
        spread=None if training.sharding == "none" else spread,
        sync_every=training.sync_every,
    )


def _one_example(run: TrainingRun, timing: Timing, progress: ReportProgress) -> Timing | None:
    settings = (
        "training.batch_size=1",
        f"training.gradient_accumulation_steps={effective_batch(run.config.training)}",
        f"training.compile='{run.execution.compile}'",
        f"training.precision={run.execution.precision}",
    )
    changed = change_config(run.config, settings)
    return resolve_run(changed, progress, ignore_message, PLAN).timing


def _gloo(run: TrainingRun, progress: ReportProgress) -> Link:
    """Returns gloo's speed at this run's bucket size and dtype. Measured once and then read from the cache."""
    dtype = str(message_dtype(run.config.training)).removeprefix("torch.")
    key = {"gloo": BUCKET_BYTES, "dtype": dtype, "torch": str(torch.__version__)}

    def measure() -> dict[str, Any]:
        progress("timing gloo between two processes", 0, 0)
        return vars(measure_gloo(BUCKET_BYTES, dtype))

    return Link(**cached_measurement(run.cache, key, measure))


def _critical_batch(run: TrainingRun) -> CriticalBatch:
    """Estimates the critical batch size of a language model from its expected final loss (nats per token)."""
    config, corpus, loss = run.config, run.corpus, DEFAULT_LOSS
    if config.settings.varying_length:
        return {"critical_batch_tokens": None, "critical_batch_loss": None, "critical_batch_nodes": None}
    if isinstance(corpus, TextCorpus):
        steps, _ = length_of(run, forecast_of(run))
        tokens, parameters = steps * run.learned_per_step, sum(run.costs.parameters().values())
        bits = expected_bits_per_byte(parameters, tokens, corpus.train_tokens)
        uniform_loss = math.log(corpus.tokenizer.vocab_size)
        loss = min(uniform_loss, bits * _bytes_per_token(corpus) * math.log(2))
    tokens = critical_batch_tokens(loss)
    return {
        "critical_batch_tokens": tokens,
        "critical_batch_loss": loss,
        "critical_batch_nodes": math.floor(tokens / run.example_tokens),
    }


def _bytes_per_token(corpus: TextCorpus) -> float:
    sample = np.arange(min(len(corpus.validation), SAMPLED_WINDOWS))
    return float(corpus.validation.target_bytes(sample).sum()) / corpus.validation.batch(sample).target_count()


def _quantity(option: str, text: str, units: dict[str, int], example: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(units)})", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"{option} is {text!r}; write a positive number with a unit, e.g. {example}.")
    return float(f"{match[1]}e{units[match[2]]}")
