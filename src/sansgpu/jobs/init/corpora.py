"""Large corpora on the Hugging Face Hub that `init` offers by a short name."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HubCorpus:
    """A dataset on the Hub whose rows have a text, in an order that is as good as random."""

    dataset: str
    subset: str | None
    title: str


CORPORA = {
    "fineweb-edu": HubCorpus("karpathy/fineweb-edu-100b-shuffle", None, "FineWeb-Edu, educational web pages"),
    "climbmix": HubCorpus("karpathy/climbmix-400b-shuffle", None, "ClimbMix, a mixture of web pages"),
    "tinystories": HubCorpus("roneneldan/TinyStories", None, "TinyStories, stories in the words of small children"),
}
_WIKIPEDIA = re.compile(r"wikipedia-([a-z][a-z-]{1,15})")
SHORT_NAMES = (*CORPORA, "wikipedia-LANGUAGE")


def corpus_named(text: str) -> HubCorpus | None:
    """Returns the corpus with a short name, such as fineweb-edu or wikipedia-de, or None."""
    if match := _WIKIPEDIA.fullmatch(text):
        return HubCorpus("wikimedia/wikipedia", f"20231101.{match[1]}", f"Wikipedia in language {match[1]}")
    return CORPORA.get(text)
