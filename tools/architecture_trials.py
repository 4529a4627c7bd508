"""Tries tiny random models of all of transformers' architectures, each in a process of its own.

Each architecture computes the same losses and gradients as in transformers, is planned, trains a step, and continues
prompts as transformers does; or a command refuses it with one sentence.

python -m tools.architecture_trials [ARCHITECTURE ...] [--heads causal masked sequence] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import torch
from benchmarks.ours import overrides

from sansgpu.kernels import library
from sansgpu.models.huggingface.pretrained import AUTO_CLASSES, HeadType
from tools.family_trials import TRAINING, TrialError, rows_of, sansgpu, write_rows
from tools.outcome import json_lines
from tools.tiny_architectures import NotTinyError, architectures, is_encoder, make_architecture, tokenizer_for

HEADS: tuple[HeadType, ...] = ("causal", "masked", "sequence", "tokens", "qa")
# The task that trains a model with a head; the encoder inside a masked language model learns embeddings.
TASKS = {"causal": "sft", "masked": "embed", "none": "embed", "sequence": "classify", "tokens": "tokens", "qa": "qa"}
TRIALS = ("equal", "plan", "step", "one prompt", "prompts")
LENGTHS = (5, 40, 17)  # tokens of examples, of which one is longer than the windows of tiny models
TOLERANCE = 5e-3  # relative to the largest value; MobileBERT amplifies rounding
SECONDS = 300  # after this time a trial has failed
NEW_TOKENS = 12
PROMPTS = ("the red fox", "def add(a, b):\n    return")
FINE = "ok"
Verdicts = dict[str, str]  # trial -> "ok", "refused: ..." or what went wrong


def try_architecture(
    model_type: str, head: HeadType, home: Path, tokenizer: Any, chosen: Sequence[str] = TRIALS
) -> Verdicts:
    """Makes the `chosen` trials with an architecture and a head, in the folder `home`."""
    torch.set_num_threads(1)  # tiny models are slower with more
    library.load()
    home.mkdir(parents=True, exist_ok=True)
    try:
        model = make_architecture(home / "model", model_type, head, tokenizer)
        reference = _Reference(model, head)
    except NotTinyError as error:
        return {"tiny": f"not tiny: {error}"}
    task = TASKS[head]
    write_rows(home / "rows.jsonl", rows_of(task))
    write_rows(home / "prompts.jsonl", ({"text": prompt} for prompt in PROMPTS))
    trials: dict[str, Callable[[], object]] = {
        "equal": reference.require_equal,
        "plan": lambda: _command("plan", *_settings(task, model, home)),
        "step": lambda: _command("train", *_settings(task, model, home), "--output-dir", home / "run"),
    }
    if head == "causal":
        trials |= {"one prompt": lambda: _generates(model, home, 1), "prompts": lambda: _generates(model, home, 2)}
    return {name: _verdict(trial) for name, trial in trials.items() if name in chosen}


def _verdict(trial: Callable[[], object]) -> str:
    try:
        trial()
    except _RefusedError as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[-250:]}"
    return FINE


class _RefusedError(Exception):
    """A command refused a model with one sentence."""


def _command(*arguments: object) -> None:
    if (refusal := sansgpu(*arguments).refusal) is not None:
        raise _RefusedError(refusal)


def _settings(task: str, model: Path, home: Path) -> list[str]:
    settings: dict[str, object] = {
        **TRAINING, "task": task, "model.name_or_path": model, "data.dataset_name": home / "rows.jsonl",
        "data.max_length": 96, "data.cache_dir": home / "cache", "training.max_steps": 1,
    }  # fmt: skip
    if task == "sft":
        settings["data.chat_template"] = "simple"
    if task in ("qa", "tokens"):
        settings["data.doc_stride"] = 16
    return overrides(settings)


class _Reference:
    """A model's outputs for each of three examples, and the gradients of the sum of these outputs."""

    def __init__(self, folder: Path, head: HeadType) -> None:
        """Raises NotTinyError if transformers itself cannot load the model or run it."""
        import transformers

        self.head, self._folder, self._class = head, folder, getattr(transformers, AUTO_CLASSES[head])
        try:
            self.model = self._load()
            vocabulary = int(self.model.config.get_text_config().vocab_size)
            self.tokens = 5 + torch.arange(sum(LENGTHS)) * 7 % (vocabulary - 5)
            found = [self._outputs(self.model(input_ids=ids[None]))[0] for ids in self.tokens.split(LENGTHS)]
            self.outputs = torch.stack(found) if head == "sequence" else torch.cat(found)
            self.gradients = _gradients(self.model, self.outputs)
        except Exception as error:
            raise NotTinyError(f"transformers itself fails: {type(error).__name__}: {str(error)[:200]}") from error

    def _load(self) -> Any:
        model = self._class.from_pretrained(self._folder, dtype=torch.float32).train()
        model.config.use_cache = model.config.get_text_config().use_cache = False
        return model

    def _outputs(self, output: Any) -> torch.Tensor:
        if self.head == "qa":
            return torch.stack((output.start_logits, output.end_logits), dim=-1)
        logits: torch.Tensor = output.last_hidden_state if self.head == "none" else output.logits
        return logits

    def require_equal(self) -> None:
        """Raises TrialError unless our kernels and packing compute the same."""
        from sansgpu.models.huggingface.packed_forward import UnpaddedModel
        from sansgpu.models.huggingface.patches import patch_model

        ours = self._load()
        patch_model(ours)
        unpadded = UnpaddedModel(ours, True)
        found, expected = self._found(unpadded), (self.outputs, self.gradients)
        if not unpadded.packs and _difference(found, expected[0]) > TOLERANCE:  # padding changes some models' outputs
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.long) for n in LENGTHS], True)
            ids = torch.nn.utils.rnn.pad_sequence([*self.tokens.split(LENGTHS)], True)
            padded = self._outputs(self.model(input_ids=ids, attention_mask=mask))
            outputs = padded if self.head == "sequence" else padded[mask.bool()]
            expected = outputs, _gradients(self.model, outputs)
        _require_close(f"outputs (packed: {unpadded.packs})", found, expected[0])
        for name, gradient in _gradients(ours, found).items():
            scale = max(float(other.abs().max()) for other in expected[1].values())
            _require_close(f"the gradient of {name} (packed: {unpadded.packs})", gradient, expected[1][name], scale)

    def _found(self, unpadded: Any) -> torch.Tensor:
        lengths = torch.tensor(LENGTHS)
        match self.head:
            case "causal":
                inputs: torch.Tensor = unpadded.head_inputs(self.tokens, lengths)
                if unpadded.head is None:
                    return inputs
                logits: torch.Tensor = unpadded.head(inputs)
                return unpadded.softcap * torch.tanh(logits / unpadded.softcap) if unpadded.softcap else logits
            case "masked":
                every = torch.ones(len(self.tokens), dtype=torch.bool)
                return unpadded.masked_lm_logits(self.tokens, lengths, every)  # type: ignore[no-any-return]
            case "none":
                return unpadded.hidden_states(self.tokens, lengths)  # type: ignore[no-any-return]
            case "qa":
                return torch.stack(unpadded.qa_logits(self.tokens, lengths, None), dim=-1)
            case "tokens":
                return unpadded.token_logits(self.tokens, lengths, None)  # type: ignore[no-any-return]
            case _:
                return unpadded.sequence_logits(self.tokens, lengths, None)  # type: ignore[no-any-return]


def _gradients(model: torch.nn.Module, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (torch.arange(outputs.numel()).view(outputs.shape).sin() * outputs).sum().backward()
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def _difference(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    largest = max(float(expected.abs().max()), scale, 1e-12)
    return float((found - expected).abs().max()) / largest if found.shape == expected.shape else float("inf")


def _require_close(what: str, found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> None:
    if not (difference := _difference(found, expected, scale)) <= TOLERANCE:
        raise TrialError(f"{what} differ by {difference:.2g} of the largest value")


def _generates(model: Path, home: Path, prompts: int) -> None:
    """Continues prompts greedily, and requires the same texts as transformers generates for each alone."""
    import transformers

    rows, file = home / f"{prompts}.jsonl", home / f"{prompts}-completed.jsonl"
    write_rows(rows, ({"text": prompt} for prompt in PROMPTS[:prompts]))
    options = ("--temperature", 0, "--max-new-tokens", NEW_TOKENS, "--precision", "fp32", "--output", file)
    _command("generate", model, "--data", rows, *options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, row in zip(PROMPTS, json_lines(file), strict=False):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():  # full passes, because the caches of some models are wrong
            new: list[int] = []
            ends = {tokenizer.eos_token_id, plain.config.get_text_config().eos_token_id}
            while len(new) < NEW_TOKENS and not {*new} & ends:
                new.append(int(plain(input_ids=torch.cat((ids, torch.tensor([new]).long()), 1)).logits[0, -1].argmax()))
        kept = [token for token in new if token not in ends]
        expected = str(tokenizer.decode(kept, skip_special_tokens=True))
        if row["completion"].strip() != expected.strip():
            raise TrialError(f"{prompt!r} is continued by {row['completion']!r}, with transformers by {expected!r}")


def try_apart(model_type: str, head: HeadType, home: Path, tokenizer: Any, chosen: Sequence[str]) -> Verdicts:
    """Runs `try_architecture` in a process of its own, which may crash or hang."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(sender, model_type, head, home, tokenizer, chosen), daemon=True
    )
    process.start()
    sender.close()
    try:
        verdicts: Verdicts = receiver.recv() if receiver.poll(SECONDS) else {"all": f"took more than {SECONDS} seconds"}
        return verdicts
    except EOFError:
        process.join()
        return {"all": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        shutil.rmtree(home, ignore_errors=True)


def _send(sender: Connection, *case: Any) -> None:
    torch.set_num_threads(1)
    sender.send(try_architecture(*case))


def cases(heads: list[HeadType], chosen: list[str]) -> Iterator[tuple[str, HeadType]]:
    for head in heads:
        for model_type in sorted(architectures(head)):
            if not chosen or model_type in chosen:
                yield model_type, head


def failures(verdicts: Verdicts) -> Verdicts:
    """Returns the trials that neither worked nor were refused."""
    accepted = (FINE, "refused: ", "not tiny: ")
    return {trial: said for trial, said in verdicts.items() if not said.startswith(accepted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="model types; default: all")
    parser.add_argument("--heads", nargs="+", choices=get_args(HeadType), default=[*HEADS[:3]], help="heads to try")
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=TRIALS, help="default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file for all verdicts")
    arguments = parser.parse_args()
    import peft  # noqa: F401  which takes a second in each process otherwise

    tokenizers = {encoder: tokenizer_for("bert" if encoder else "llama") for encoder in (True, False)}
    found: dict[str, Verdicts] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-architectures-") as home:

        def run(case: tuple[str, HeadType]) -> None:
            start = time.perf_counter()
            name, tokenizer = " ".join(case), tokenizers[is_encoder(case[0])]
            found[name] = try_apart(*case, Path(home) / name.replace(" ", "-"), tokenizer, arguments.trials)
            print(f"{name} ({time.perf_counter() - start:.0f} s): {found[name]}", flush=True)

        with ThreadPoolExecutor(arguments.processes) as pool:
            list(pool.map(run, cases(arguments.heads, arguments.architectures)))
    failed = {name: wrong for name, verdicts in found.items() if (wrong := failures(verdicts))}
    print(json.dumps(failed, indent=2))
    print(f"{len(found)} models: {sum('tiny' in v for v in found.values())} not made, {len(failed)} failed")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
