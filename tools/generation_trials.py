"""Compares the texts that sansgpu's commands write with those of transformers' greedy decoding.

python -m tools.generation_trials FOLDER...
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from sansgpu.events.escape import printable
from sansgpu.models.generation.prompts import text_prompt_ids
from tools.family_trials import PROMPTS, TrialError, sansgpu, write_rows
from tools.outcome import json_lines

NEW_TOKENS = 12
GREEDY = ("--temperature", 0, "--max-new-tokens", NEW_TOKENS, "--precision", "fp32")


def greedy_equal(folder: Path, prompts: tuple[str, ...] = PROMPTS) -> str | None:
    """Generates texts for each prompt alone and for all of them in one command, and compares them with transformers'.

    Returns None if all are equal, or a sentence that says what differs or was refused.
    """
    expected = transformers_texts(folder, prompts)
    try:
        found = {"one prompt": [_alone(folder, prompt) for prompt in prompts]}
        found["several prompts"] = [printable(text) for text in _together(folder, prompts)]
    except TrialError as error:
        return str(error)
    for name, texts in found.items():
        for prompt, text, wanted in zip(prompts, texts, map(printable, expected), strict=True):
            if text != wanted:
                return f"{name}: sansgpu continues {prompt!r} with {text!r}, transformers with {wanted!r}"
    return None


@torch.no_grad()
def transformers_texts(folder: Path, prompts: tuple[str, ...]) -> list[str]:
    """Returns transformers' greedy continuation of each prompt, one at a time, without padding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    eos: Any = model.generation_config.eos_token_id
    ends = [end for end in (*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id) if end is not None]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": ends, "forced_eos_token_id": None}
    texts = []
    for prompt in prompts:
        ids = torch.tensor([text_prompt_ids(tokenizer, prompt)])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        tokens = row[ids.shape[1] :].tolist()
        if tokens[-1] in ends:  # an end token may be an ordinary one, which decoding would print
            tokens.pop()
        texts.append(str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return texts


def _alone(folder: Path, prompt: str) -> str:
    """Returns the continuation of a prompt, in which control characters are escaped."""
    outcome = sansgpu("generate", folder, "--prompt", prompt, *GREEDY)
    if outcome.refusal:
        raise TrialError(f"one prompt is refused: {outcome.refusal}")
    return outcome.out.removeprefix(prompt).removesuffix("\n")


def _together(folder: Path, prompts: tuple[str, ...]) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="sansgpu-generation-") as home:
        data, output = Path(home) / "prompts.jsonl", Path(home) / "texts.jsonl"
        write_rows(data, ({"text": prompt} for prompt in prompts))
        outcome = sansgpu("generate", folder, "--data", data, "--output", output, *GREEDY)
        if outcome.refusal:
            raise TrialError(f"several prompts are refused: {outcome.refusal}")
        return [row["completion"] for row in json_lines(output)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for folder in parser.parse_args().folders:
        print(f"{folder}: {greedy_equal(folder) or 'equal'}", flush=True)


if __name__ == "__main__":
    main()
