"""Sends chats to servers of OpenAI's interface from several clients at once, and measures tokens per second.

    python -m benchmarks.serving.servers --url sansgpu=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8001
        [--clients 1 4 16] [--requests 16] [--tokens 64] [--rounds 2] [--system-words 0] [--json FILE]

Start the servers first, e.g. `sansgpu serve MODEL`, `llama-server -m FILE --parallel 16` or `python -m llama_cpp.server
--model FILE`. They take turns, so that the load of the machine affects them equally. With 1 client, the requests follow
one another. Every request has a different question and streams its answer, so that the time to the first token is
measured, too. With `--system-words`, all begin with the same system message of so many words. Tokens are those that the
server counts.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contest import Row, print_table, say, write_json

SUBJECTS = [
    "rivers", "bread", "trains", "winter", "bees", "paper", "islands", "clocks", "maps", "wool", "ferns", "radio",
    "glass", "bridges", "salt", "owls",
]  # fmt: skip
COLUMNS = {
    "server": ("server", "s"),
    "clients": ("clients", "d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "s": ("seconds", ".1f"),
    "s to first token, median": ("first_seconds", ".2f"),
}


@dataclass(frozen=True)
class Served:
    """A model on a server, and the requests to it."""

    name: str
    client: Any
    model: str
    tokens: int
    system: str


def ask(served: Served, number: int) -> tuple[float, int]:
    """Streams one answer; returns the seconds until its first text, and the number of its tokens."""
    question = f"Tell me about {SUBJECTS[number % len(SUBJECTS)]}, part {number}, in a long paragraph."
    begun, first, count = time.perf_counter(), None, 0
    system = [{"role": "system", "content": served.system}] if served.system else []
    stream = served.client.chat.completions.create(
        model=served.model,
        messages=[*system, {"role": "user", "content": question}],
        max_tokens=served.tokens,
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


def measure(served: Served, clients: int, requests: int, first: int) -> Row:
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda number: ask(served, number), range(first, first + requests)))
    seconds = time.perf_counter() - begun
    return {
        "server": served.name,
        "clients": clients,
        "seconds": seconds,
        "tokens": sum(count for _, count in answers),
        "tokens_per_second": sum(count for _, count in answers) / seconds,
        "first_seconds": median(first for first, _ in answers),
    }


def connect(url: str, tokens: int, system: str) -> Served:
    """Connects to a server `NAME=URL`, and waits for one answer."""
    import openai

    name, _, address = url.rpartition("=")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", timeout=600)
    served = Served(name or address, client, client.models.list().data[0].id, tokens, system)
    ask(served, 0)
    return served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", nargs="+", default=["http://127.0.0.1:8000"], help="addresses, each as NAME=URL")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--system-words", type=int, default=0, help="words of a system message that all chats share")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    system = " ".join(SUBJECTS[number % len(SUBJECTS)] for number in range(args.system_words))
    servers = [connect(url, args.tokens, system) for url in args.url]
    passes: dict[tuple[int, str], list[Row]] = {}
    for number in range(args.rounds):
        for clients in args.clients:
            for served in servers:
                say(f"round {number + 1} of {args.rounds}: {clients} clients, {served.name}")
                first = (number * len(args.clients) + args.clients.index(clients) + 1) * args.requests
                row = measure(served, clients, args.requests, first)
                passes.setdefault((clients, served.name), []).append(row)
    rows = [max(found, key=lambda row: float(row["tokens_per_second"])) for found in passes.values()]
    print_table(f"{args.requests} chats, up to {args.tokens} tokens each", COLUMNS, rows)
    write_json(args.json, "serving", vars(args), rows)


if __name__ == "__main__":
    main()
