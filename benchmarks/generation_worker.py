"""Measures one contestant of `benchmarks.generation`: `python -m benchmarks.generation_worker JOB`.

Prints a JSON line. Runs in its contestant's environment, so it must not import packages of the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import islice
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
    from llama_cpp import Llama

    threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    context = max(map(len, job["prompts"])) + job["tokens"]
    model = Llama(job["model"], n_ctx=context, verbose=False, **threads)
    return lambda prompts: [list(islice(model.generate(ids, temp=0.0), job["tokens"])) for ids in prompts]


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
