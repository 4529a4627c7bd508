"""Chooses the number of leaf slots and the entity table of a graph model from its training triples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sansgpu.config import MAX_LEAVES, Config, ConfigError, change_config
from sansgpu.data.graph import Entity, GraphDocument, entities_of
from sansgpu.data.mask_tokenizer import MaskTokenizer

FITTING = 0.99  # share of tails whose tokens all get a slot
MAX_ENTITIES = 100_000  # in the default table, because each query is compared with all entities

Note = Callable[[str], None]


def with_leaves(documents: Sequence[GraphDocument], tokenizer: MaskTokenizer, config: Config, note: Note) -> Config:
    """Sets model.leaves to fit a share FITTING of the tails, unless it is configured.

    Raises ConfigError if a configured value fits fewer tails and data.long_tails is "refuse".
    """
    if not config.leaf_slots:
        return config
    tokens = _tail_tokens(documents, tokenizer)
    triples = sum(tokens.values())
    if not triples:
        return change_config(config, [f"model.leaves={config.model.leaf_slots}"])
    needed = next(n for n in sorted(tokens) if _share_within(tokens, n) >= FITTING)
    configured = config.model.leaves
    leaves = min(max(1, needed), MAX_LEAVES) if configured is None else configured
    lost = sum(count for length, count in tokens.items() if length > leaves)
    if lost > (1 - FITTING) * triples and config.data.long_tails == "refuse":
        remedy = f"raise it to {needed}, or leave it out" if needed <= MAX_LEAVES else "shorten the tails"
        raise ConfigError(
            f"model.leaves {leaves} has too few slots for the tails of {lost:,} of {triples:,} training triples "
            f"({lost / triples:.0%}), which would be dropped; {remedy}, or set data.long_tails to drop."
        )
    if configured is None:
        note(_cost_note(tokens, leaves, documents, tokenizer))
    return change_config(config, [f"model.leaves={leaves}"])


def _tail_tokens(documents: Sequence[GraphDocument], tokenizer: MaskTokenizer) -> Counter[int]:
    """Counts training triples by the number of tokens in their tail."""
    uses = Counter(triple.tail for document in documents for triple in document.triples)
    found: Counter[int] = Counter()
    for ids, count in zip(tokenizer.encode_names(uses), uses.values(), strict=True):
        found[len(ids)] += count
    return found


def _share_within(tokens: Counter[int], max_length: int) -> float:
    return sum(count for length, count in tokens.items() if length <= max_length) / sum(tokens.values())


def _cost_note(tokens: Counter[int], leaves: int, documents: Sequence[GraphDocument], tokenizer: MaskTokenizer) -> str:
    """Describes how many tails fit and how many nodes they add, because nodes take memory and time."""
    mean = sum(length * count for length, count in tokens.items()) / sum(tokens.values())
    return (
        f"model.leaves is {leaves}, enough for {_share_within(tokens, leaves):.1%} of the tails. Empty slots cost "
        f"nothing; a tail adds {mean:.1f} nodes to its window on average, and {leaves} at most."
    )


def table_entities(documents: Sequence[GraphDocument], config: Config, note: Note) -> tuple[Entity, ...]:
    """Returns the entities that get a row in the model's entity table.

    If model.n_entities is not set, these are all entities of a knowledge graph, that is, of data in which every triple
    belongs to the document of an entity. Other data gets no table.
    """
    configured = config.model.n_entities
    if not config.leaf_slots or configured == 0:
        return ()
    if configured is None and any(document.triples and document.about is None for document in documents):
        return ()
    entities = tuple(entities_of(documents))
    if configured is None and len(entities) > MAX_ENTITIES:
        note(
            f"the knowledge graph has {len(entities):,} entities, too many for an entity table by default; set "
            f"model.n_entities to {len(entities)} to give each its own vector."
        )
        return ()
    return entities
