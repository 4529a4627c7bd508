"""What a graph model takes over from its training triples: how many leaf slots, and which entities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sansgpu.config import GRAPH, MOST_LEAVES, Config, ConfigError, change_config
from sansgpu.data.graph import Entity, GraphDocument, entities_of
from sansgpu.data.mask_tokenizer import MaskTokenizer

FITTING = 0.99  # share of the tails that have a slot for every token
MOST_ENTITIES = 100_000  # in a table that is made unasked: each query is compared with all of them

Note = Callable[[str], None]


def with_leaves(documents: Sequence[GraphDocument], tokenizer: MaskTokenizer, config: Config, note: Note) -> Config:
    """The configuration with as many leaf slots as 99 % of the tails need, unless it gives their number.

    Raises ConfigError where more tails than that are too long, and the configuration does not agree to drop them.
    """
    if config.kind != GRAPH or config.model.leaves == 0:
        return config
    tokens = _tail_tokens(documents, tokenizer)
    triples = sum(tokens.values())
    if not triples:
        return change_config(config, [f"model.leaves={config.model.leaf_slots}"])
    needed = next(n for n in sorted(tokens) if _share_within(tokens, n) >= FITTING)
    given = config.model.leaves
    leaves = min(max(1, needed), MOST_LEAVES) if given is None else given
    lost = sum(count for length, count in tokens.items() if length > leaves)
    if lost > (1 - FITTING) * triples and config.data.long_tails == "refuse":
        remedy = f"raise it to {needed}, or leave it out" if needed <= MOST_LEAVES else "shorten the tails"
        raise ConfigError(
            f"model.leaves {leaves} holds too few tokens for the tails of {lost:,} of {triples:,} training triples "
            f"({lost / triples:.0%}), which would be left out; {remedy}, or set data.long_tails to drop."
        )
    if given is None:
        note(_cost(tokens, leaves, documents, tokenizer))
    return change_config(config, [f"model.leaves={leaves}"])


def _tail_tokens(documents: Sequence[GraphDocument], tokenizer: MaskTokenizer) -> Counter[int]:
    """How many training triples have a tail of each number of tokens."""
    uses = Counter(triple.tail for document in documents for triple in document.triples)
    found: Counter[int] = Counter()
    for ids, count in zip(tokenizer.encode_names(uses), uses.values(), strict=True):
        found[len(ids)] += count
    return found


def _share_within(tokens: Counter[int], most: int) -> float:
    return sum(count for length, count in tokens.items() if length <= most) / sum(tokens.values())


def _cost(tokens: Counter[int], leaves: int, documents: Sequence[GraphDocument], tokenizer: MaskTokenizer) -> str:
    """What so many slots hold, and what the tails add to the nodes of an epoch, to which memory and time are due."""
    mean = sum(length * count for length, count in tokens.items()) / sum(tokens.values())
    return (
        f"model.leaves is {leaves}: {_share_within(tokens, leaves):.1%} of the tails have no more tokens. Empty slots "
        f"cost nothing; a tail adds {mean:.1f} nodes to its window in the mean, and {leaves} at most."
    )


def table_entities(documents: Sequence[GraphDocument], config: Config, note: Note) -> tuple[Entity, ...]:
    """The entities that get a row in the model's table.

    Without a number in the configuration these are all entities of a knowledge graph, that is where every triple is
    part of an entity's own document, and none elsewhere.
    """
    asked = config.model.n_entities
    if config.kind != GRAPH or config.model.leaves == 0 or asked == 0:
        return ()
    if asked is None and any(document.triples and document.about is None for document in documents):
        return ()
    entities = tuple(entities_of(documents))
    if asked is None and len(entities) > MOST_ENTITIES:
        note(
            f"the knowledge graph has {len(entities):,} entities, so that none has a vector of its own; set "
            f"model.n_entities to {len(entities)} to give each one."
        )
        return ()
    return entities
