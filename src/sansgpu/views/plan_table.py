"""The results of `sansgpu plan`, and their tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console

from sansgpu.config.wording import count, counted, duration
from sansgpu.planning.results import ClusterPlan, ProposedPlan, RunPlan, length_text
from sansgpu.views.tables import grid, pace, print_table, storage, table_of
from sansgpu.views.terminal import batch_shape, clock_of


def figure(number: float) -> str:
    """Formats a number with three significant digits, or without decimals if it is at least 100."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def print_plan(console: Console, plan: RunPlan | ProposedPlan) -> None:
    parts = ", ".join(f"{name.replace('_', ' ')} {count(n)}" for name, n in plan["parameters_by_part"].items())
    table = grid()
    table.add_row("parameters", f"{count(plan['parameters'])}: {parts}")
    memory = {name: size for name, size in plan["memory_bytes"].items() if name != "total" and size}
    table.add_row("memory", ", ".join(f"{name} {storage(size)}" for name, size in memory.items()))
    needed, available = plan["memory_bytes"]["total"], plan["available_bytes"]
    verdict = "fits" if plan["fits"] else "does not fit"
    if plan["fits"] and needed > available:
        verdict += ", but training will pause while snapshots are written"
    have = f"{storage(available)} available of {storage(plan['machine_bytes'])}"
    table.add_row("", f"{storage(needed)} total, {have}: {verdict}", style=None if plan["fits"] else "red")
    for change in plan.get("changes", []):
        settings = " ".join(f"--set {setting}" for setting in change["set"])
        table.add_row("  it fits with", f"{settings}: {storage(change['memory'])}, {change['cost']}")
    table.add_row(
        "step",
        f"{batch_shape(plan['batch_size'], dict(plan))}: {plan['tokens_per_step']:,} tokens; {plan['optimizer']} "
        f"at a learning rate of {plan['learning_rate']:g}, {_precisions(plan)}, {counted(plan['threads'], 'thread')}, "
        f"{'compiled, ' if plan['compile'] == 'on' else ''}{plan['kernels']} kernels",
    )
    if plan["kept_bytes"]:
        table.add_row("disk", f"{storage(plan['kept_bytes'])} in the cache for the outputs of the frozen layers")
    if plan["tokens_per_second"] and plan["step_seconds"]:
        share = plan["machine_share"]
        table.add_row(
            "speed",
            f"{pace(plan['tokens_per_second'])}, {plan['step_seconds']:.3g} s per step"
            + (f", {share:.0%} of what matrix products and memory bandwidth allow" if share else ""),
        )
        if plan["freeze_step"] and plan["later_step_seconds"]:
            after = f"after {counted(plan['freeze_step'], 'step')}, when layers stop learning"
            table.add_row("", f"{plan['later_step_seconds']:.3g} s per step {after}")
    else:
        table.add_row("speed", "not measured, because three layers do not fit into memory")
    if plan["total_steps"] and plan["total_tokens"]:
        length = length_text(plan)
        if plan["total_seconds"] and plan["finish"]:
            finish = clock_of(plan["finish"])
            length += f": {duration(plan['total_seconds'])}, if started now done {finish}"
        table.add_row("time", length)
    elif plan["train_tokens"] is None:
        table.add_row("time", "unknown, because the length of an epoch is unknown without the data")
    console.print(table)
    if "candidates" in plan:
        _print_candidates(console, cast(ProposedPlan, plan))
    if "cluster" in plan:
        _print_cluster(console, plan["cluster"])


def _precisions(plan: RunPlan) -> str:
    base = plan["base_precision"]
    return (
        plan["precision"] if base in (None, plan["precision"]) else f"{plan['precision']} with base weights in {base}"
    )


def _print_candidates(console: Console, plan: ProposedPlan) -> None:
    columns = "parameters", "width x layers", "tokens/s", "tokens", "epochs", "expected loss"
    table = table_of(columns, title="candidates")
    for row in plan["candidates"]:
        table.add_row(
            count(row["parameters"]),
            f"{row['d_model']} x {row['n_layers']}",
            f"{row['tokens_per_second']:,.0f}",
            count(row["tokens"]),
            f"{row['epochs']:.1f}",
            "best" if not row["behind"] else f"+{row['behind']:.1%}",
        )
    print_table(console, table)
    console.print(f"written to {plan['file']}; train it with: sansgpu train {plan['file']}", soft_wrap=True)


def _print_cluster(console: Console, cluster: ClusterPlan) -> None:
    table = grid()
    nodes, network, gloo = cluster["nodes"], cluster["network_bits_per_second"], cluster["gloo_bytes_per_second"]
    every = cluster["sync_every"]
    content = "gradients" if every == 1 else "weights and moments"
    often = "" if every == 1 else f" every {every:,} steps"
    table.add_row(
        counted(nodes, "node"),
        f"like this machine, connected with {network / 1e9:g} Gbit/s and {cluster['latency_seconds'] * 1e6:g} us "
        f"latency; {content} of {cluster['gradient_bytes'] / 1e6:,.0f} MB{often}, which gloo reduces at "
        f"{gloo * 8e-9:.1f} Gbit/s",
    )
    verdict = "fits" if cluster["fits"] else "does not fit"
    table.add_row("memory", f"{storage(cluster['memory_bytes']['total'])} per node: {verdict}")
    step, compute = round(cluster["step_seconds"], 4), round(cluster["compute_seconds"], 4)
    sent, hidden = round(cluster["communication_seconds"], 4), round(cluster["overlapped_seconds"], 4)
    small = round(cluster["collectives_seconds"], 4)
    overlap = f" (and {figure(hidden)} s overlapped with the backward pass)" if hidden else ""
    table.add_row(
        "step",
        f"{figure(step)} s: {figure(compute)} s for computation, {figure(sent - hidden - small)} s for "
        f"{content}{overlap}, {figure(small)} s for small collectives",
    )
    table.add_row(
        "speed",
        f"{cluster['tokens_per_second']:,.0f} tokens/s, {figure(cluster['speed_up'])} times the speed of one node: "
        f"efficiency {cluster['efficiency']:.0%}",
    )
    finish = clock_of(cluster["finish"])
    cost = "" if cluster["cost"] is None else f", which cost {cluster['cost']:,.2f}"
    table.add_row(
        "time",
        f"{counted(cluster['total_steps'], 'step')}: {duration(cluster['total_seconds'])}, if started now done "
        f"{finish}; {figure(cluster['node_hours'])} node-hours{cost}",
    )
    console.print(table)
    _print_curve(console, cluster)


def _print_curve(console: Console, cluster: ClusterPlan) -> None:
    priced = cluster["cost"] is not None
    columns = "nodes", "step", "tokens/s", "speed-up", "efficiency", "hours", "cost" if priced else "node-hours"
    table = table_of(columns, title="strong scaling (fixed batch size)")
    rows = [row for row in cluster["curve"] if row["step_seconds"]]
    for row in rows:
        table.add_row(
            f"{row['nodes']:,}",
            f"{figure(row['step_seconds'])} s",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speed_up']:.2f}",
            f"{row['efficiency']:.0%}",
            figure(row["total_seconds"] / 3600),
            f"{row['cost']:,.2f}" if priced else figure(row["node_hours"]),
            style=None if row["fits"] else "red",
        )
    print_table(console, table)
    for sentence in _about_nodes(cluster, rows):
        console.print(sentence, highlight=False)


def _about_nodes(cluster: ClusterPlan, rows: list[dict[str, Any]]) -> Iterator[str]:
    most, last = cluster["most_nodes"], cluster["curve"][-1]["nodes"]
    if len(rows) < len(cluster["curve"]):
        yield f"more than {most:,} nodes are not possible, because each node needs at least one example of the batch"
    if not all(row["fits"] for row in rows):
        fitting = next(
            (f"the run fits into memory on {counted(row['nodes'], 'node')} or more" for row in rows if row["fits"]),
            f"the run does not fit into memory on up to {last:,} nodes",
        )
        yield f"{fitting}"
    faster, pays, fastest = f"{cluster['pays']:g} times as fast", cluster["pays_until"], cluster["fastest_nodes"]
    if pays > 1:
        yield f"up to {pays:,} nodes, doubling the nodes makes a step at least {faster}; {fastest:,} are the fastest"
    elif most > 1:
        yield (
            f"adding nodes is inefficient: with two nodes, a step is less than {faster}; {counted(fastest, 'node')} "
            "would be the fastest"
        )
    if (nodes := cluster["nodes"]) > 1:
        grown = cluster["grown_batch"]
        yield (
            f"weak scaling: with a batch {nodes:,} times as large ({count(grown['tokens_per_step'])} tokens), "
            f"{nodes:,} nodes reach {grown['tokens_per_second']:,.0f} tokens/s: efficiency {grown['efficiency']:.0%}"
        )
    if cluster["critical_batch_tokens"]:
        yield (
            f"critical batch size: up to about {count(cluster['critical_batch_tokens'])} tokens (one example on each "
            f"of {cluster['critical_batch_nodes']:,} nodes), larger batches need nearly proportionally fewer steps; "
            f"estimated as in Kaplan et al. 2020 for a loss of {cluster['critical_batch_loss']:.2f} nats per token"
        )
