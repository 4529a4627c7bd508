"""Tries all features with each family of models, and updates the tables of docs/reference/models.md.

python -m tools.supported_models --write
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from tools.family_trials import TRIALS, Family, Support, try_family

PAGE = Path(__file__).parent.parent / "docs/reference/models.md"
FAMILIES = (
    Family("Llama", "llama"),
    Family("Qwen2", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("SmolLM3", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    Family("Mistral", "mistral", {"sliding_window": None}, gguf="llama"),
    Family("Gemma", "gemma"),
    Family("Gemma 2", "gemma2"),
    Family("Gemma 3", "gemma3_text", gguf="gemma3"),
    Family("Phi", "phi", gguf="phi2"),
    Family("Phi-3", "phi3"),
    Family("OLMo 2", "olmo2"),
    Family("Granite", "granite"),
    Family("Apertus", "apertus"),
    Family("GPT-2", "gpt2"),
    Family("GPT-Neo", "gpt_neo"),
    Family("GPT-NeoX", "gpt_neox", gguf="gptneox"),
    Family("Falcon", "falcon"),
    Family("Mixtral", "mixtral", gguf="llama"),
    Family("OLMoE", "olmoe"),
    Family("Qwen2-MoE", "qwen2_moe", gguf="qwen2moe"),
    Family("Qwen3-MoE", "qwen3_moe", gguf="qwen3moe"),
    Family("Granite-MoE", "granitemoe"),
    Family("Mamba", "mamba"),
    Family("Falcon-Mamba", "falcon_mamba", gguf="mamba"),
    Family("LFM2", "lfm2"),
    Family("BERT", "bert"),
    Family("RoBERTa", "roberta", gguf="bert"),
    Family("XLM-RoBERTa", "xlm-roberta", gguf="bert"),
    Family("DistilBERT", "distilbert", gguf="bert"),
    Family("ModernBERT", "modernbert", gguf="modern-bert"),
    Family("EuroBERT", "eurobert"),
    Family("NomicBERT", "nomic_bert", gguf="nomic-bert"),
    Family("GTE", "gte"),
    Family("Jina Embeddings v3", "jina_embeddings_v3"),
    Family("ELECTRA", "electra"),
    Family("MPNet", "mpnet"),
    Family("ALBERT", "albert"),
    Family("DeBERTa-v2, -v3", "deberta-v2"),
)


def row_of(family: Family, support: Support) -> str:
    """Formats a row of the table of families."""
    answers = support.packed, support.batched, support.gguf_export, support.gguf_import, support.onnx
    packed, *others = ("yes" if answer else "no" for answer in answers)
    return _table_row([family.name, f"`{family.model_type}`", ", ".join(support.tasks), packed, support.fused, *others])


def refusals_of(support: Support) -> set[str]:
    """Formats the rows of the table of refusals, one per trial and sentence."""
    return {_table_row([trial, f"`{sentence}`"]) for trial, sentence in support.refusals.items()}


def _table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written_rows(heading: str) -> list[str]:
    """Returns the rows of the page's table whose first column has this heading."""
    found = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, heading
    return found[1].splitlines()


def with_rows(page: str, heading: str, rows: Iterable[str]) -> str:
    """Replaces the rows of the table whose first column has this heading."""
    text = "".join(f"{row}\n" for row in rows)
    return re.sub(
        rf"(^\| {heading} \|.*\n\|[-|]+\n)(?:\|.*\n)*", lambda found: found[1] + text, page, flags=re.MULTILINE
    )


def in_order(supports: Iterable[Support]) -> list[str]:
    """Returns all rows of the table of refusals, in the order of the trials."""
    rows = {row for support in supports for row in refusals_of(support)}
    return sorted(rows, key=lambda row: (TRIALS.index(row.split(" | ")[0].removeprefix("| ")), row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to try, e.g. Llama; default: all")
    parser.add_argument("--write", action="store_true", help="update the page; requires all families")
    arguments = parser.parse_args()
    chosen = [family for family in FAMILIES if family.name in (arguments.families or [family.name])]
    if arguments.write and len(chosen) < len(FAMILIES):
        parser.error("--write needs all families")
    torch.set_num_threads(1)  # tiny models are slower with more
    found: dict[str, Support] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-families-") as home:
        for family in chosen:
            found[family.name] = try_family(family, Path(home) / family.name)
            print(row_of(family, found[family.name]), flush=True)
    print(*in_order(found.values()), sep="\n")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        page = with_rows(page, "family", [row_of(family, found[family.name]) for family in FAMILIES])
        PAGE.write_text(with_rows(page, "trial", in_order(found.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
