"""Measures one contestant of generation.py: `python -m benchmarks.serving.generation_worker JOB`.

Prints a JSON line. Runs in its contestant's environment, so it must not import packages of the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Ids = list[list[int]]


def ours(job: Job) -> Callable[[Ids], Ids]:
    import torch

    from sansgpu.models.generation.generate import complete
    from sansgpu.models.generation.sampling import Sampling
    from sansgpu.train.loading import ModelRequest, open_model

    torch.set_num_threads(job["threads"])
    loaded = open_model(ModelRequest(job["model"], precision=job["precision"]), "chat", lambda text: None)
    task_class: Any = loaded.task_class
    model = task_class.batch_model(loaded)

    def run(prompts: Ids) -> Ids:
        reader = model.open_reader(len(prompts), max(map(len, prompts)) + job["tokens"])
        return [row.ids for row in sorted(complete(reader, prompts, (), [job["tokens"]] * len(prompts), Sampling(0)))]

    return run


def transformers(job: Job) -> Callable[[Ids], Ids]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    ).eval()

    def run(prompts: Ids) -> Ids:
        found = []
        for start in range(0, len(prompts), job["batch"]):
            batch = prompts[start : start + job["batch"]]
            longest = max(map(len, batch))
            padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in batch])
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch])
            options = {"max_new_tokens": job["tokens"], "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            found += model.generate(padded, attention_mask=mask, **options)[:, longest:].tolist()
        return found

    return run


def llama_cpp(job: Job) -> Callable[[Ids], Ids]:
    """Completes all prompts together, with the functions of llama.h: its Python classes complete one at a time."""
    import llama_cpp as llama
    import numpy as np

    count, length = len(job["prompts"]), max(map(len, job["prompts"])) + job["tokens"]
    llama.llama_backend_init()
    model: Any = llama.llama_model_load_from_file(job["model"].encode(), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_seq_max, options.n_batch = count * (-(-length // 256) * 256), count, 2048
    options.n_threads = options.n_threads_batch = job["threads"]
    context: Any = llama.llama_init_from_model(model, options)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(options.n_batch, 0, 1)

    def read(pieces: list[tuple[int, int, list[int]]]) -> list[int]:
        """Adds tokens to sequences, given as (sequence, first position, tokens). Returns each next token."""
        batch.n_tokens, lasts = 0, []
        for sequence, start, tokens in pieces:
            for place, token in enumerate(tokens):
                n = batch.n_tokens
                batch.token[n], batch.pos[n] = token, start + place
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
                batch.logits[n] = place == len(tokens) - 1
                batch.n_tokens += 1
            lasts.append(batch.n_tokens - 1)
        if llama.llama_decode(context, batch):
            sys.exit("llama.cpp could not decode a batch")
        logits = (llama.llama_get_logits_ith(context, last) for last in lasts)
        return [int(np.argmax(np.ctypeslib.as_array(row, (vocabulary,)))) for row in logits]

    def run(prompts: Ids) -> Ids:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        found = [read([(n, 0, ids)]) for n, ids in enumerate(prompts)]
        for step in range(job["tokens"] - 1):
            added = [(n, len(ids) + step, found[n][-1:]) for n, ids in enumerate(prompts)]
            for row, token in zip(found, read(added), strict=True):
                row.append(token)
        return found

    return run


CONTESTANTS = {"sansgpu": ours, "transformers": transformers, "llama.cpp": llama_cpp}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    prompts = job["prompts"]
    if job.get("batch") == 1:
        prompts = prompts[: max(1, len(prompts) // 8)]
    run = CONTESTANTS[job["contestant"]](job)
    run([ids[:4] for ids in prompts[:2]])
    start, cpu = time.perf_counter(), time.process_time()
    ids = run(prompts)
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"event": "pass", "tokens": sum(map(len, ids)), **spent, "ids": ids}), flush=True)


if __name__ == "__main__":
    main()
