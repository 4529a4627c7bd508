"""Prints the results of commands as tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sansgpu.config.wording import count, counted

if TYPE_CHECKING:
    from sansgpu.planning.results import FittingPresets, MemoryOption, MemoryOptions, PresetRow

Result = dict[str, Any]
_PRECISIONS = {"bf16": "bf16", "int8": "int8", "int4": "int4", "file": "as in the file", "auto": "as in the file"}
HOUR, DAY = 3600.0, 86400.0


def storage(size: float) -> str:
    """Formats a number of bytes, e.g. 1.50 GB."""
    if size >= 1e8:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def rate(flops_per_second: float) -> str:
    return f"{flops_per_second / 1e9:,.0f} GFLOP/s"


def percent(ratio: float | None) -> str:
    """Formats a ratio, or None as unknown: the MFU is None if the model exceeds the measured GEMM rate."""
    return "unknown" if ratio is None else f"{ratio:.0%}"


def pace(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tokens/s, {1e6 / tokens_per_second:,.0f} s per million tokens"


def grid() -> Table:
    """Returns an empty table of two columns without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # a long path continues on the next line
    return table


def table_of(columns: Sequence[str], left: Collection[str] = (), title: str | None = None, **options: Any) -> Table:
    """Returns an empty table, whose columns are aligned to the right except those in `left`."""
    table = Table(title=title, title_justify="left", **options)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table of strings, or each row as a list if the screen is too narrow for the columns."""
    heads = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    narrow = [max(map(len, (*head.split(), *cells)), default=0) for head, cells in zip(heads, columns, strict=True)]
    wide = [max(width, len(head)) for width, head in zip(narrow, heads, strict=True)]
    between, lines = 2 * (len(heads) - 1), 3 * len(heads) + 1
    widths = wide if sum(wide) + (lines if table.box else between) <= console.width else narrow
    if sum(widths) + lines > console.width:
        table.box, table.pad_edge = None, False
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    if sum(widths) + (lines if table.box else between) <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title)
    for number, row in enumerate(table.rows):
        listed = grid()
        for head, cells in zip(heads, columns, strict=True):
            listed.add_row(head, cells[number], style=row.style)
        console.print(listed, "")


def print_doctor(console: Console, facts: Result) -> None:
    table = grid()
    quota = f", container limit {facts['cpu_quota']:.1f}" if facts["cpu_quota"] else ""
    nodes = f"{counted(facts['numa_nodes'], 'NUMA node')}"
    table.add_row("processor", facts["processor"])
    table.add_row("cores", f"{facts['cores']}{quota}, {nodes}; {facts['busy_cores']:.1f} used by other programs")
    table.add_row("instructions", " ".join(facts["isa"]))
    rates = facts["gemm_flops_per_second"]
    known = [f"{precision} {rate(value)}" for precision, value in rates.items() if value]
    known += [] if rates["bf16"] else ["bf16 not supported (emulated)"]
    table.add_row("matrix products", ", ".join(known))
    limit, swap = facts["memory_limit_bytes"], storage(facts["swap_bytes"]) if facts["swap_bytes"] else "none"
    limited = f", limit {storage(limit)}" if limit else ""
    table.add_row(
        "memory",
        f"{storage(facts['available_bytes'])} available of {storage(facts['memory_bytes'])}{limited}, "
        f"{facts['memory_bandwidth_bytes_per_second'] / 1e9:.0f} GB/s; swap {swap}; "
        f"huge pages {facts['transparent_huge_pages'] or 'unknown'}",
    )
    table.add_row("GPU", facts["gpu"] or "none visible to torch")
    table.add_row("torch", f"{facts['torch']} with {facts['torch_blas']}, {', '.join(facts['openmp']) or 'no OpenMP'}")
    table.add_row("compiler", facts["compiler"] or "none")
    table.add_row(
        "kernels",
        f"PyTorch operators, because {facts['kernels_problem']}" if facts["kernels"] == "torch" else facts["kernels"],
    )
    problem = facts["caching_allocator_problem"]
    caching = "on" if problem is None else f"off: {problem}"
    table.add_row("allocator", f"{facts['allocator']}; caching allocator for large tensors {caching}")
    table.add_row("governor", facts["governor"] or "unknown")
    table.add_row("cache", f"{facts['cache']}, {storage(facts['cache_free_bytes'])} free")
    console.print(table)
    for advice in facts["advice"]:
        gain = f"up to {1 + advice['gain']:.3g} times as fast: " if advice["gain"] else ""
        console.print(Text.assemble(("advice", "yellow"), f"  {gain}{advice['text']}"), soft_wrap=True)
    if not facts["advice"]:
        console.print("no recommended changes", style="dim")


def print_link_prediction(console: Console, result: Result) -> None:
    """Prints ranking metrics of held-out triples, and baselines without a model."""
    for side in ("tail", "head"):
        if side not in result:
            continue
        found = result[side]
        console.print(
            f"{side}s of {counted(found['queries'], 'triple')} among {counted(found['candidates'], 'entity')}, "
            f"filtered by known triples; {found['covered']:.1%} of the triples could be evaluated",
            highlight=False,
        )
        columns = "", "triples", "MRR", "Hits@1", "Hits@3", "Hits@10", "baseline MRR"
        table = table_of(columns, left=[""], box=None, pad_edge=False)
        for name, row in {"all": found, **found["relations"]}.items():
            hits = (f"{row[key]:.3f}" if key in row else "" for key in ("hits_at_1", "hits_at_3", "hits_at_10"))
            baseline = f"{row['relation_frequency_mrr']:.4f}" if "relation_frequency_mrr" in row else "unknown"
            table.add_row(name, f"{row['queries']:,}", f"{row['mrr']:.4f}", *hits, baseline)
        print_table(console, table)
        console.print("baseline: entities ranked by their frequency with the relation in training", highlight=False)
        console.print(f"MRR of random ranking: {found['random_mrr']:.5f}", highlight=False)


def print_mteb(console: Console, result: Result) -> None:
    """Prints the main scores of an embedding model on tasks of MTEB."""
    left = "task", "type", "metric"
    table = table_of((*left, "score"), left, box=None, pad_edge=False)
    for task in result["tasks"]:
        table.add_row(task["name"], task["type"], task["metric"], f"{task['main_score']:.4f}")
    if len(result["tasks"]) > 1:
        table.add_row("mean", "", "", f"{result['mean_main_score']:.4f}")
    print_table(console, table)


def print_harness(console: Console, result: Result) -> None:
    """Prints the metrics of each task with their standard errors."""
    left = "task", "metric"
    table = table_of((*left, "value", "stderr", "shots", "examples"), left, box=None, pad_edge=False)
    for name, task in result["tasks"].items():
        metrics = task["metrics"]
        shots, examples = ("" if task[key] is None else f"{task[key]:,}" for key in ("fewshot", "examples"))
        for key in metrics:
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr" + (f",{filtered}" if filtered else ""))
            value = "unknown" if metrics[key] is None else f"{metrics[key]:.4f}"
            table.add_row(name, key, value, "" if error is None else f"{error:.4f}", shots, examples)
    print_table(console, table)


def print_extraction(console: Console, result: Result) -> None:
    """Prints the number of extracted triples, and their precision and recall if the documents have triples."""
    console.print(
        f"{counted(result['triples'], 'triple')} from {counted(result['documents'], 'document')}", highlight=False
    )
    if "gold" in result:
        given = result["given"]
        console.print(
            f"compared to {counted(result['gold'], 'gold triple')}: precision {result['precision']:.3f}, "
            f"recall {result['recall']:.3f}, F1 {result['f1']:.3f}",
            highlight=False,
        )
        if result.get("best_min_score") is not None:
            best, score = result["best_f1"], result["best_min_score"]
            console.print(
                f"best F1 {best:.3f} with --min-score {score:.4f}, selected on these documents", highlight=False
            )
        console.print(
            f"given head and relation: {given['accuracy']:.1%} of {counted(given['pairs'], 'tail')} correct",
            highlight=False,
        )


def print_memory_options(console: Console, result: MemoryOptions) -> None:
    contexts = list(dict.fromkeys(option["context"] for option in result["options"]))
    title = f"{result['model']} in {storage(result['memory_bytes'])} of memory, by context length in tokens"
    first = "trained weights"
    table = table_of([first, *(f"{context:,}" for context in contexts)], [first], title)
    rows: dict[str, list[str]] = {}
    for option in result["options"]:
        rows.setdefault(_name(option), []).append(_cell(option))
    for name, cells in rows.items():
        table.add_row(name, *cells)
    print_table(console, table)
    console.print("*: with model.gradient_checkpointing, which is about a third slower", style="dim")


def _name(option: MemoryOption) -> str:
    if option["base_precision"] is None:
        return "all weights, fp32 AdamW"
    return f"LoRA, base {_PRECISIONS[option['base_precision']]}"


def _cell(option: MemoryOption) -> str:
    needed = storage(option["needed_bytes"])
    if not option["fits"]:
        return f"does not fit ({needed})"
    return f"{needed}*" if option["gradient_checkpointing"] else needed


def print_presets(console: Console, rows: list[PresetRow]) -> None:
    columns = "preset", "parameters", "at least", "recommended", "this machine"
    memory = table_of(columns, ("preset", "this machine"), "memory")
    for row in rows:
        memory.add_row(*memory_cells(row), "fits" if row["fits"] else "does not fit")
    print_table(console, memory)
    console.print("at least: with micro-batches of one example and gradient checkpointing", style="dim")
    title = f"tokens/s, and time for {', '.join(count(row['optimal_tokens']) for row in rows)} tokens (estimates)"
    speeds = table_of(["processor", *(row["preset"] for row in rows)], ["processor"], title)
    for cells in zip(*map(speed_cells, rows), strict=True):
        speeds.add_row(cells[0][0], *(cell for _, cell in cells))
    print_table(console, speeds)
    console.print("token counts are compute-optimal: 20 per parameter", style="dim")


def print_fitting_presets(console: Console, result: FittingPresets) -> None:
    rows, seconds = result["presets"], result["seconds"]
    where = f"in {storage(result['memory_bytes'])} of memory on {result['processor']}"
    timed = [] if seconds is None else [f"in {_time(seconds)}"]
    columns = "preset", "parameters", "context", "memory", "tokens/s", "optimal", *timed
    table = table_of(columns, ["preset"], f"training from scratch {where} (estimates)")
    for row in rows:
        needed = f"{storage(row['needed_bytes'])}{'*' if row['gradient_checkpointing'] else ''}"
        cells = [count(row["parameters"]), f"{row['context']:,}", needed if row["fits"] else f"{needed}: too much"]
        cells += [f"{row['tokens_per_second']:,.0f}", _time(row["optimal_seconds"])]
        if row["tokens"] is not None:
            cells.append(f"{count(row['tokens'])}, {row['tokens'] / row['optimal_tokens']:.1%}")
        table.add_row(row["preset"], *cells, style=None if row["fits"] else "red")
    print_table(console, table)
    optimal = "time for 20 tokens per parameter, which is about compute-optimal"
    notes = [f"optimal: {optimal}", *(["%: share of these tokens"] if timed else [])]
    notes += ["*: with model.gradient_checkpointing"] if any(row["gradient_checkpointing"] for row in rows) else []
    console.print("; ".join(notes), style="dim")
    console.print("best model for a time: sansgpu plan --hours N --data DATA", style="dim", soft_wrap=True)
    console.print("ways to fine-tune a model: sansgpu plan --memory SIZE MODEL", style="dim", soft_wrap=True)


def memory_cells(row: PresetRow) -> tuple[str, ...]:
    """Returns name, parameters, and minimum and recommended memory."""
    sizes = (row["least_memory_bytes"], row["recommended_memory_bytes"])
    return row["preset"], count(row["parameters"]), *map(storage, sizes)


def speed_cells(row: PresetRow) -> list[tuple[str, str]]:
    """Returns (processor, speed and time) of each processor."""
    return [
        (speed["processor"], f"{speed['tokens_per_second']:,.0f}/s, {_time(speed['optimal_seconds'])}")
        for speed in row["speeds"]
    ]


def _time(seconds: float) -> str:
    """Formats a long duration with two digits, e.g. 3.5 h or 12 d."""
    number, unit = (seconds / HOUR, "h") if seconds < 2 * DAY else (seconds / DAY, "d")
    return f"{number:.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"
