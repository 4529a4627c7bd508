"""Sends chats to a server of OpenAI's interface from several clients at once, and measures tokens per second.

    python -m benchmarks.serving --url http://127.0.0.1:8000 [--clients 1 4 16] [--requests 16] [--tokens 64]
        [--rounds 2] [--json FILE]

Start the server first, e.g. `sansgpu serve MODEL` or `python -m llama_cpp.server --model FILE`. With 1 client, the
requests follow one another. Every request has a different prompt and streams its answer, so that the time to the
first token is measured, too. Tokens are those that the server counts.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contest import Row, print_table, say, write_json

SUBJECTS = [
    "rivers", "bread", "trains", "winter", "bees", "paper", "islands", "clocks", "maps", "wool", "ferns", "radio",
    "glass", "bridges", "salt", "owls",
]  # fmt: skip
COLUMNS = {
    "clients": ("clients", "d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "s": ("seconds", ".1f"),
    "s to first token, median": ("first_seconds", ".2f"),
}


def ask(client: Any, model: str, number: int, tokens: int) -> tuple[float, int]:
    """Streams one answer; returns the seconds until its first text, and the number of its tokens."""
    question = f"Tell me about {SUBJECTS[number % len(SUBJECTS)]}, part {number}, in a long paragraph."
    begun, first, count = time.perf_counter(), None, 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            pieces += 1
            first = first or time.perf_counter() - begun
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    return first or 0.0, count or pieces  # llama-cpp-python counts no tokens of a stream, but sends one in each chunk


def measure(client: Any, model: str, clients: int, requests: int, tokens: int) -> Row:
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda number: ask(client, model, number, tokens), range(requests)))
    seconds = time.perf_counter() - begun
    return {
        "clients": clients,
        "seconds": seconds,
        "tokens": sum(count for _, count in answers),
        "tokens_per_second": sum(count for _, count in answers) / seconds,
        "first_seconds": median(first for first, _ in answers),
    }


def main() -> None:
    import openai

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="unused", timeout=600)
    model = client.models.list().data[0].id
    ask(client, model, 0, 8)
    passes: dict[int, list[Row]] = {clients: [] for clients in args.clients}
    for number in range(args.rounds):
        for clients, rows in passes.items():
            say(f"round {number + 1} of {args.rounds}: {clients} clients")
            rows.append(measure(client, model, clients, args.requests, args.tokens))
    rows = [max(found, key=lambda row: float(row["tokens_per_second"])) for found in passes.values()]
    print_table(f"{args.requests} chats, up to {args.tokens} tokens each, of {model}", COLUMNS, rows)
    write_json(args.json, "serving", vars(args), rows)


if __name__ == "__main__":
    main()
