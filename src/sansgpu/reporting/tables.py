"""Prints the results of commands as tables."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sansgpu.reporting.terminal import batch_shape, clock, duration

Result = dict[str, Any]


def count(number: float) -> str:
    """Formats a count, e.g. 25.1M."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def figure(number: float) -> str:
    """Formats a number with three significant digits, or without decimals from 100 on."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def pace(result: Result) -> str:
    return (
        f"{result['tokens_per_second']:,.0f} tokens/s, {result['seconds_per_million_tokens']:,.0f} s per million tokens"
    )


def grid() -> Table:
    """Returns an empty table of two columns without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    return table


def print_plan(console: Console, plan: Result) -> None:
    parts = ", ".join(f"{name.replace('_', ' ')} {count(n)}" for name, n in plan["parameters_by_part"].items())
    table = grid()
    table.add_row("parameters", f"{count(plan['parameters'])}: {parts}")
    memory = {name: size for name, size in plan["memory_bytes"].items() if name != "total" and size}
    table.add_row("memory", ", ".join(f"{name} {gigabytes(size)}" for name, size in memory.items()))
    needed, available = plan["memory_bytes"]["total"], plan["available_bytes"]
    verdict = "fits" if plan["fits"] else "does not fit"
    if plan["fits"] and needed > available:
        verdict += ", but snapshots will block training"
    have = f"{gigabytes(available)} available of {gigabytes(plan['machine_bytes'])}"
    table.add_row("", f"{gigabytes(needed)} total, {have}: {verdict}", style=None if plan["fits"] else "red")
    for change in plan.get("changes", []):
        settings = " ".join(f"--set {setting}" for setting in change["set"])
        table.add_row("  it fits with", f"{settings}: {gigabytes(change['memory'])}, {change['cost']}")
    table.add_row(
        "step",
        f"{batch_shape(plan['batch_size'], plan)}: {plan['tokens_per_step']:,} tokens; {plan['optimizer']}, "
        f"{plan['precision']}, {plan['threads']} threads, "
        f"{'compiled' if plan['compile'] == 'on' else 'not compiled'}, {plan['kernels']} kernels",
    )
    if plan["step_seconds"]:
        share = plan["machine_share"]
        table.add_row(
            "speed",
            f"{pace(plan)}, {plan['step_seconds']:.3g} s per step"
            + (f": {share:.0%} of the limit by matrix products and memory bandwidth" if share else ""),
        )
    else:
        table.add_row("speed", "not measured, because three layers do not fit into memory")
    if plan["total_steps"]:
        epochs = f", {plan['epochs']:.2g} epochs" if plan["epochs"] else ""
        length = f"{plan['total_steps']:,} steps, {count(plan['total_tokens'])} tokens{epochs}"
        if plan["total_seconds"]:
            finish = clock(datetime.fromisoformat(plan["finish"]))
            length += f": {duration(plan['total_seconds'])}, if started now done {finish}"
        table.add_row("time", length)
    elif plan["train_tokens"] is None:
        table.add_row("time", "unknown, because the length is given in epochs and the data was not read")
    console.print(table)
    if "candidates" in plan:
        _print_candidates(console, plan)
    if "cluster" in plan:
        _print_cluster(console, plan["cluster"])


def _print_candidates(console: Console, plan: Result) -> None:
    table = Table(title="chosen from", title_justify="left")
    for name in ("parameters", "width x layers", "tokens/s", "tokens", "epochs", "expected loss"):
        table.add_column(name, justify="right")
    for row in plan["candidates"]:
        table.add_row(
            count(row["parameters"]),
            f"{row['d_model']} x {row['n_layers']}",
            f"{row['tokens_per_second']:,.0f}",
            count(row["tokens"]),
            f"{row['epochs']:.1f}",
            "best" if not row["behind"] else f"+{row['behind']:.1%}",
        )
    console.print(table)
    console.print(f"written to {plan['file']}; train it with: sansgpu train {plan['file']}", soft_wrap=True)


def _print_cluster(console: Console, cluster: Result) -> None:
    table = grid()
    nodes, network, gloo = cluster["nodes"], cluster["network_bits_per_second"], cluster["gloo_bytes_per_second"]
    table.add_row(
        f"{nodes:,} node{'s' if nodes > 1 else ''}",
        f"like this machine, connected with {network / 1e9:g} Gbit/s and {cluster['latency_seconds'] * 1e6:g} us "
        f"latency, for {cluster['gradient_bytes'] / 1e6:,.0f} MB of gradients; gloo reduces {gloo * 8e-9:.1f} Gbit/s",
    )
    verdict = "fits" if cluster["fits"] else "does not fit"
    table.add_row("memory", f"{gigabytes(cluster['memory_bytes']['total'])} per node: {verdict}")
    keys = ("step", "compute", "communication", "overlapped", "collectives")
    step, compute, sent, hidden, small = (round(cluster[f"{key}_seconds"], 4) for key in keys)
    overlap = f" ({figure(hidden)} s more overlap with the backward pass)" if hidden else ""
    table.add_row(
        "step",
        f"{figure(step)} s: {figure(compute)} s computing, {figure(sent - hidden - small)} s waiting for gradients"
        f"{overlap}, {figure(small)} s for small collectives",
    )
    table.add_row(
        "speed",
        f"{cluster['tokens_per_second']:,.0f} tokens/s, {figure(cluster['speed_up'])} times one node: efficiency "
        f"{cluster['efficiency']:.0%}",
    )
    finish = clock(datetime.fromisoformat(cluster["finish"]))
    cost = "" if cluster["cost"] is None else f", which cost {cluster['cost']:,.2f}"
    table.add_row(
        "time",
        f"{cluster['total_steps']:,} steps: {duration(cluster['total_seconds'])}, if started now done {finish}; "
        f"{figure(cluster['node_hours'])} node-hours{cost}",
    )
    console.print(table)
    _print_curve(console, cluster)


def _print_curve(console: Console, cluster: Result) -> None:
    priced = cluster["cost"] is not None
    table = Table(title="strong scaling (fixed batch size)", title_justify="left")
    for name in ("nodes", "step", "tokens/s", "speed-up", "efficiency", "hours", "cost" if priced else "node-hours"):
        table.add_column(name, justify="right")
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
    console.print(table)
    for sentence in _about_nodes(cluster, rows):
        console.print(sentence, highlight=False)


def _about_nodes(cluster: Result, rows: list[Result]) -> Iterator[str]:
    most, last = cluster["most_nodes"], cluster["curve"][-1]["nodes"]
    if len(rows) < len(cluster["curve"]):
        yield f"beyond {most:,}: the batch has too few examples, because each node needs at least one"
    if not all(row["fits"] for row in rows):
        fitting = next(
            (f"on {row['nodes']:,} nodes or more" for row in rows if row["fits"]), f"on none of up to {last:,}"
        )
        yield f"it fits into memory {fitting}"
    faster, pays, fastest = f"{cluster['pays']:g} times as fast", cluster["pays_until"], cluster["fastest_nodes"]
    if pays > 1:
        yield f"up to {pays:,} nodes, doubling them makes a step at least {faster}; the fastest count is {fastest:,}"
    elif most > 1:
        yield f"adding nodes is inefficient: two do not make a step {faster}; the fastest count is {fastest:,}"
    if (nodes := cluster["nodes"]) > 1:
        grown = cluster["grown_batch"]
        yield (
            f"with the batch {nodes:,} times as large, {count(grown['tokens_per_step'])} tokens, {nodes:,} nodes reach "
            f"{grown['tokens_per_second']:,.0f} tokens/s: efficiency {grown['efficiency']:.0%}"
        )
    if cluster["critical_batch_tokens"]:
        yield (
            f"larger batches save steps nearly in proportion up to about {count(cluster['critical_batch_tokens'])} "
            f"tokens, one example per node for {cluster['critical_batch_nodes']:,} nodes: a rule of thumb (Kaplan et "
            f"al. 2020) at a loss of {cluster['critical_batch_loss']:.2f} nats per token"
        )


def print_presets(console: Console, rows: list[Result]) -> None:
    table = Table()
    for name in (
        "preset",
        "parameters",
        "memory",
        "at least",
        "step",
        "tokens/s",
        "1,000 steps",
        "20 tokens per parameter",
    ):
        table.add_column(name, justify="left" if name == "preset" else "right")
    for row in rows:
        speed = row["tokens_per_second"]
        table.add_row(
            row["preset"],
            count(row["parameters"]),
            gigabytes(row["memory_bytes"]["total"]) + ("" if row["fits"] else " (too much)"),
            gigabytes(row["least_memory_bytes"]),
            f"{row['batch_size']} x {row['gradient_accumulation_steps']} x {row['window']}",
            f"{speed:,.0f}" if speed else "?",
            duration(1000 * row["step_seconds"]) if speed else "?",
            f"{count(row['optimal_tokens'])}: {duration(row['optimal_seconds'])}" if speed else "?",
        )
    console.print(table)
    console.print("at least: with micro-batch 1 and gradient checkpointing", style="dim")


def print_bench(console: Console, result: Result) -> None:
    """Prints a summary of `bench`; its report has the details."""
    table = grid()
    step, build = result["step_seconds"], result["build_seconds"]
    table.add_row(
        "step",
        f"{step['median']:.3g} s ({step['min']:.3g} to {step['max']:.3g}) of {result['tokens_per_step']:,} tokens: "
        f"{result['micro_batch']} x {result['gradient_accumulation_steps']} "
        f"{'windows of' if result['task'] == 'pretrain' else 'examples of up to'} {result['window']}",
    )
    table.add_row(
        "speed",
        f"{pace(result)}, {rate(result['flops_per_second'])}, MFU {result['mfu']:.0%} of "
        f"{rate(result['gemm_flops_per_second'])}",
    )
    table.add_row("peak memory", gigabytes(result["peak_rss_bytes"]))
    table.add_row("setup", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build.items()))
    shares = result["breakdown"].items()
    table.add_row("step time", ", ".join(f"{part} {share:.0%}" for part, share in shares))
    for row in result["what_if"][1:]:
        if "speedup" in row:
            table.add_row("what if", f"{row['name']}: {row['speedup']:.2f}x, trade-off: {row['gives_up']}")
    for projection in result["projections"]:
        finish = clock(datetime.fromisoformat(projection["done"]))
        table.add_row(f"{projection['steps']:,} steps", f"{duration(projection['seconds'])}, done {finish}")
    for text in result["disturbances"]:
        table.add_row("disturbance", text, style="yellow")
    table.add_row("written", ", ".join(result["files"]))
    console.print(table)


def print_forward(console: Console, result: Result) -> None:
    table = Table(title=f"{count(result['parameters'])} parameters, forward only", title_justify="left")
    for name in ("batch", "seconds", "tokens/s", "GFLOP/s", "MFU", "memory"):
        table.add_column(name, justify="right")
    for row in result["forward"]:
        table.add_row(
            f"{row['batch_size']} x {row['window']}",
            f"{row['seconds']:.3g}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:,.0f}",
            f"{row['mfu']:.0%}",
            gigabytes(row["peak_rss_bytes"]),
        )
    console.print(table)


def print_doctor(console: Console, facts: Result) -> None:
    table = grid()
    quota = f", of which the container may use {facts['cpu_quota']:.1f}" if facts["cpu_quota"] else ""
    nodes = f"{facts['numa_nodes']} NUMA node{'s' if facts['numa_nodes'] > 1 else ''}"
    table.add_row("processor", facts["processor"])
    table.add_row("cores", f"{facts['cores']}{quota}, {nodes}; {facts['busy_cores']:.1f} used by other programs")
    table.add_row("instructions", " ".join(facts["isa"]))
    bf16 = facts["gemm_flops_per_second"]["bf16"]
    rates = f"fp32 {rate(facts['gemm_flops_per_second']['fp32'])}, "
    rates += f"bf16 {rate(bf16)}" if bf16 else "bf16 only emulated"
    table.add_row("matrix products", rates)
    limit = facts["memory_limit_bytes"]
    container_limit = f", container limit {gigabytes(limit)}" if limit else ""
    table.add_row(
        "memory",
        f"{gigabytes(facts['available_bytes'])} available of {gigabytes(facts['memory_bytes'])}{container_limit}, "
        f"{facts['memory_bandwidth_bytes_per_second'] / 1e9:.0f} GB/s; swap {gigabytes(facts['swap_bytes'])}; "
        f"huge pages {facts['transparent_huge_pages'] or 'unknown'}",
    )
    table.add_row("GPU", facts["gpu"] or "none visible to torch")
    table.add_row("torch", f"{facts['torch']} with {facts['torch_blas']}, {', '.join(facts['openmp']) or 'no OpenMP'}")
    table.add_row("compiler", facts["compiler"] or "none")
    table.add_row(
        "kernels", "compiled" if facts["kernels"] == "native" else f"PyTorch operators: {facts['kernels_problem']}"
    )
    table.add_row("allocator", facts["allocator"])
    table.add_row("governor", facts["governor"] or "unknown")
    table.add_row("cache", f"{facts['cache']}, {gigabytes(facts['cache_free_bytes'])} free")
    console.print(table)
    for advice in facts["advice"]:
        gain = f"up to {1 + advice['gain']:.2g} times as fast: " if advice["gain"] else ""
        console.print(Text.assemble(("advice", "yellow"), f"  {gain}{advice['text']}"), soft_wrap=True)
    if not facts["advice"]:
        console.print("no recommended changes", style="dim")


def rate(flops_per_second: float) -> str:
    return f"{flops_per_second / 1e9:,.0f} GFLOP/s"


def print_link_prediction(console: Console, result: Result) -> None:
    """Prints ranking metrics of held-out triples, and baselines without a model."""
    for side in ("tail", "head"):
        if side not in result:
            continue
        found = result[side]
        console.print(
            f"{side}s of {found['queries']:,} triples among {found['candidates']:,} entities, filtered by known "
            f"triples; {found['covered']:.1%} of the triples could be evaluated",
            highlight=False,
        )
        table = Table(box=None, pad_edge=False)
        for title in ("", "triples", "MRR", "Hits@1", "Hits@3", "Hits@10", "baseline MRR"):
            table.add_column(title, justify="left" if not title else "right")
        for name, row in {"all": found, **found["relations"]}.items():
            hits = (f"{row[key]:.3f}" if key in row else "" for key in ("hits_at_1", "hits_at_3", "hits_at_10"))
            baseline = f"{row['relation_frequency_mrr']:.4f}" if "relation_frequency_mrr" in row else "unknown"
            table.add_row(name, f"{row['queries']:,}", f"{row['mrr']:.4f}", *hits, baseline)
        console.print(table)
        console.print("baseline: entities ranked by their frequency with the relation in training", highlight=False)
        console.print(f"MRR of random ranking: {found['random_mrr']:.5f}", highlight=False)


def print_extraction(console: Console, result: Result) -> None:
    """Prints the number of extracted triples, and their precision and recall if the texts have triples."""
    console.print(f"{result['triples']:,} triples from {result['documents']:,} texts", highlight=False)
    if "gold" in result:
        given = result["given"]
        console.print(
            f"compared to {result['gold']:,} gold triples: precision {result['precision']:.3f}, "
            f"recall {result['recall']:.3f}, F1 {result['f1']:.3f}",
            highlight=False,
        )
        if result.get("best_min_score") is not None:
            best, score = result["best_f1"], result["best_min_score"]
            console.print(f"best F1 {best:.3f} with --min-score {score:.4f}, selected on these texts", highlight=False)
        console.print(
            f"given head and relation: {given['accuracy']:.1%} of {given['pairs']:,} tails correct",
            highlight=False,
        )
