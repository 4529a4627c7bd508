"""Reads, splits and tokenizes texts and triples for task graph."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sansgpu.config import ConfigError, change_config
from sansgpu.config.schema import Config
from sansgpu.data.forms.graphs import Entity, GraphDocument
from sansgpu.data.split import describe_split, split_examples
from sansgpu.events.progress import ReportProgress
from sansgpu.tasks.evaluation import VariableLengthCorpus
from sansgpu.tasks.graph.leafy import LeafyDataset, LeafyRules, build_leafy, relations_of
from sansgpu.tasks.graph.settings import MAX_LEAVES, GraphDataConfig, GraphModelConfig, MaskedDataConfig
from sansgpu.tasks.graph.sources import GraphSource, GraphSources, open_graphs
from sansgpu.tasks.graph.tokenizer import GraphCodec, MaskTokenizer, build_mask_tokenizer
from sansgpu.tasks.graph.triples import KnownFacts, entities_of

FITTING = 0.99  # share of tails for which a root has enough leaf slots by default
MAX_ENTITIES = 100_000  # limit for an entity table by default, because each query is compared with all entities

Note = Callable[[str], None]


def with_leaves(documents: Sequence[GraphDocument], tokenizer: MaskTokenizer, config: Config, note: Note) -> Config:
    """Sets model.leaves, unless it is configured, so that a share FITTING of the tails fit into the leaf slots.

    Raises ConfigError if a configured value fits fewer tails and data.long_tails is "refuse".
    """
    if not config.leaf_slots:
        return config
    tokens = _tail_tokens(documents, tokenizer)
    triples = sum(tokens.values())
    if not triples:
        return change_config(config, [f"model.leaves={GraphModelConfig.of(config).leaf_slots}"])
    needed = next(n for n in sorted(tokens) if _share_within(tokens, n) >= FITTING)
    configured = GraphModelConfig.of(config).leaves
    leaves = min(max(1, needed), MAX_LEAVES) if configured is None else configured
    lost = sum(count for length, count in tokens.items() if length > leaves)
    if lost > (1 - FITTING) * triples and GraphDataConfig.of(config).long_tails == "refuse":
        remedy = f"raise it to {needed}, or remove it" if needed <= MAX_LEAVES else "shorten the tails"
        raise ConfigError(
            f"model.leaves {leaves} is too small for the tails of {lost:,} of {triples:,} training triples "
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
    """Returns a message on how many tails fit, and how many nodes they add, because nodes take memory and time."""
    mean = sum(length * count for length, count in tokens.items()) / sum(tokens.values())
    return (
        f"model.leaves is {leaves}, enough for {_share_within(tokens, leaves):.1%} of the tails. A tail adds "
        f"{mean:.1f} nodes to its window on average and at most {leaves}; empty slots add none."
    )


def table_entities(documents: Sequence[GraphDocument], config: Config, note: Note) -> tuple[Entity, ...]:
    """Returns the entities for the model's entity table, which may be none.

    If model.n_entities is not set, only a knowledge graph gets a table, that is, data in which every triple belongs to
    a document about an entity, and only if it has at most MAX_ENTITIES.
    """
    configured = GraphModelConfig.of(config).n_entities
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


@dataclass(frozen=True)
class HeldOutTriples:
    """The validation documents with only those triples that are not in the training data, and all known facts."""

    documents: Sequence[GraphDocument]
    known: KnownFacts


@dataclass(frozen=True)
class GraphCorpus(VariableLengthCorpus[LeafyDataset]):
    """Windows with their triples, for training and validation."""

    codec: GraphCodec
    train_targets: float  # expected number of masked tokens and entity queries per epoch
    leaves: int  # leaf slots per root
    entity_names: Sequence[Sequence[int]]  # token ids of the names of the codec's entities
    held: HeldOutTriples | None  # None if no triples are held out

    def preview(self) -> str | None:
        """Returns the text of the first example with a triple, followed by its triples in brackets."""
        number = next((n for n, (_, placed) in enumerate(self.train.examples) if placed), 0)
        example = self.train.example(number)
        shown = [f"⟦{t.head} · {t.relation} · {t.tail}⟧" for t in (placed.triple for placed in example.placed)]
        return " ".join([self.codec.tokenizer.decode(example.tokens.tolist()), *shown])


def graph_corpus(config: Config, cache: Path, progress: ReportProgress, codec: GraphCodec | None = None) -> GraphCorpus:
    """Reads, splits and tokenizes the data. Builds a codec from it if `codec` is None. Raises ConfigError."""
    notes: list[str] = []
    data, given_codec = GraphDataConfig.of(config), codec
    sources = open_graphs(data, notes.append, data.inverse_relations)
    documents = read_graphs(sources.train, config, progress)
    if codec is None:
        read = f"{sources.train.fingerprint}-{'with triples' if config.leaf_slots else 'texts'}"
        tokenizer = build_mask_tokenizer(data, read, lambda: _texts(documents), cache, progress)
        codec = GraphCodec(tokenizer, tuple(relations_of(documents)))
    split = None
    if sources.validation is not None:
        train, held = documents, read_graphs(sources.validation, config, progress)
    else:
        train, held = split_by_group(documents, data.validation_split)
        split = describe_split(len(train), len(held), "document", data.validation_split)
    if given_codec is None:
        codec = replace(codec, entities=table_entities(train, config, notes.append))
        config = with_leaves(train, codec.tokenizer, config, notes.append)
    known = frozenset(triple.fact for document in train for triple in document.triples)
    rules = leafy_rules(config)
    parts = (
        build_leafy(train, codec.tokenizer, codec.relations, rules, entities=codec.entities),
        build_leafy(held, codec.tokenizer, codec.relations, rules, known, codec.entities),
    )
    target_counts = [count_targets(part, config) for part in parts]
    for name, part, masked in zip(("training", "validation"), parts, target_counts, strict=True):
        if not len(part):
            raise ConfigError(
                f"the {name} split of {sources.train.name} is empty; add more documents or set data.validation_name."
            )
        if note := part.note():
            notes.append(f"{name} split: {note}.")
        if not masked:
            raise ConfigError(
                f"no token of the {name} split of {sources.train.name} would be masked: its documents are too short "
                "for data.mask_ratio, and no triples are masked; raise data.mask_ratio or data.leaf_mask_ratio."
            )
    fingerprint = _fingerprint(config, sources, codec, parts)
    names, triples = names_of(codec), None
    held_out = without_facts(held, known)
    if any(document.triples for document in held_out):
        test = read_graphs(sources.test, config, progress) if sources.test else []
        triples = HeldOutTriples(held_out, KnownFacts(train, [*held, *test]))
    counts = target_counts[0], config.leaf_slots
    return GraphCorpus(*parts, notes, fingerprint, codec, *counts, names, triples, split=split)


def without_facts(documents: Iterable[GraphDocument], known: frozenset[tuple[str, str, str]]) -> list[GraphDocument]:
    """Removes triples whose facts are `known` from the documents."""
    return [
        document._replace(triples=tuple(triple for triple in document.triples if triple.fact not in known))
        for document in documents
    ]


def names_of(codec: GraphCodec) -> list[list[int]]:
    """Returns the token ids of each entity's name."""
    return codec.tokenizer.encode_names(entity.name for entity in codec.entities)


def count_targets(graphs: LeafyDataset, config: Config) -> float:
    """Computes the expected number of masked tokens and entity queries per epoch."""
    ratio, least = (
        GraphDataConfig.of(config).leaf_mask_ratio if config.leaf_slots else 0.0,
        GraphDataConfig.of(config).min_leaf_groups,
    )
    targets = 0.0
    for window, placed in graphs.examples:
        targets += int(MaskedDataConfig.of(config).mask_ratio * (len(graphs.windows[window][0]) - 2))
        if placed:
            groups = len(placed) * ratio + ((1 - ratio) ** len(placed) if least else 0.0)
            queries = GraphDataConfig.of(config).entity_query_ratio * sum(p.entities[1] > 0 for p in placed)
            tokens = sum(len(p.tail) for p in placed) / len(placed)
            targets += queries + groups * (1 - queries / len(placed)) * tokens
    return targets


def _fingerprint(config: Config, sources: GraphSources, codec: GraphCodec, parts: tuple[LeafyDataset, ...]) -> str:
    """Identifies the examples of both splits."""
    validation = sources.validation.fingerprint if sources.validation else ""
    inputs = (validation, codec.tokenizer.backend.to_str(), codec.relations, config.data.validation_split)
    counts = f"{len(parts[0])}-{int(parts[0].lengths.sum())}-{config.window}"
    return f"{sources.train.fingerprint[:16]}-{counts}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:8]}"


def leafy_rules(config: Config) -> LeafyRules:
    """Returns the window settings of a configuration."""
    return LeafyRules(config.roots, config.leaf_slots, config.data.doc_stride, GraphDataConfig.of(config).triples)


def read_graphs(source: GraphSource, config: Config, progress: ReportProgress) -> list[GraphDocument]:
    """Reads all documents of a source. Removes their triples if the model has no leaves."""
    documents, done = [], 0
    for document in source.documents():
        done += len(document.text)
        progress("reading", done, done)
        documents.append(document if config.leaf_slots else document._replace(triples=()))
    return documents


def _texts(documents: Sequence[GraphDocument]) -> Iterator[str]:
    """Yields the texts on which to train a tokenizer: documents, and tails after a space, as they are on leaves."""
    for document in documents:
        yield document.text
        if document.triples:
            yield " ".join(["", *(triple.tail for triple in document.triples)])


def split_by_group(documents: Sequence[GraphDocument], share: float) -> tuple[list[GraphDocument], list[GraphDocument]]:
    """Splits documents into training and validation by the hash of their group's name. Does not split groups."""
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.group] = sizes.get(document.group, 0) + len(document.text)
    names = list(sizes)
    if len(names) < 2:
        return list(documents), []
    _, held_out = split_examples([name.encode() for name in names], np.array(list(sizes.values())), share)
    chosen = frozenset(names[number] for number in held_out)
    return [d for d in documents if d.group not in chosen], [d for d in documents if d.group in chosen]
