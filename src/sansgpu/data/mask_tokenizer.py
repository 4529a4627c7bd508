"""Tokenizers with a mask: text -> ids with the place and the word of each, for models that fill gaps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError, DataConfig
from sansgpu.config.plain import shown
from sansgpu.data.graph import Entity
from sansgpu.data.shards import Progress, cache_key, cached
from sansgpu.data.tokenizer import BPETokenizer, Tokenizer, load_tokenizer, rows_needed
from sansgpu.machine.inputs import read_json
from sansgpu.machine.tokenizer_trial import tokenizer_errors


class Specials(NamedTuple):
    """Names of the tokens that stand for no text: padding, unknown, what begins and ends a text, a gap."""

    pad: str
    unknown: str
    begin: str
    end: str
    mask: str


BERT = Specials("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = Specials("<pad>", "<unk>", "<s>", "</s>", "<mask>")
_ROLES = Specials("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")  # transformers' names


RELATIONS_FILE, ENTITIES_FILE = "relations.json", "entities.json"


class MaskTokenizer:
    """A `tokenizers` model with a mask token. Raises ConfigError where it has none."""

    def __init__(self, backend: Backend, name: str, specials: Specials | None = None) -> None:
        given = [specials] if specials else [BERT, ROBERTA]
        found = next(
            (s for s in given if all(backend.token_to_id(t) is not None for t in (s.begin, s.end, s.mask))), None
        )
        if found is None:
            raise ConfigError(f"the tokenizer {name} has no mask token; take one of an encoder, or bpe.")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # `[MASK]` written in a text is text
        self.backend, self.specials = backend, found
        self.begin_id, self.end_id, self.mask_id = (self._id(t) for t in (found.begin, found.end, found.mask))

    def _id(self, token: str) -> int:
        return int(self.backend.token_to_id(token) or 0)

    @property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the largest id and one."""
        return rows_needed(self.backend)

    def ordinary_ids(self) -> np.ndarray:
        """Ids that stand for text, int64."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        return np.array(sorted(index for token, index in vocabulary.items() if token not in special), np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokens of each text with their offsets and words, no special one among them; in parallel."""
        with tokenizer_errors():
            return list(self.backend.encode_batch(list(texts), add_special_tokens=False))

    def encode_names(self, names: Iterable[str]) -> list[list[int]]:
        """Ids of names as they would stand within a text, behind a space."""
        texts = [f" {name.strip()}" for name in names]
        with tokenizer_errors():
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def enclosed(self, ids: np.ndarray) -> np.ndarray:
        """A text's ids with those that begin and end it, int64."""
        return np.concatenate([[self.begin_id], ids, [self.end_id]]).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out."""
        text: str = self.backend.decode(list(ids))
        return text

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        named = zip(_ROLES, self.specials, strict=True)
        known = {role: token for role, token in named if self.backend.token_to_id(token) is not None}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}
        (folder / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def build_mask_tokenizer(
    data: DataConfig, fingerprint: str, texts: Callable[[], Iterator[str]], cache: Path, progress: Progress
) -> MaskTokenizer:
    """The tokenizer the configuration names; bpe is made from `texts`, which `fingerprint` names, once."""
    if data.tokenizer == "char":
        raise ConfigError("data.tokenizer char has no mask token; take bpe, a tokenizer.json or an encoder's.")
    if data.tokenizer != "bpe":
        return of_tokenizer(load_tokenizer(data.tokenizer), data.tokenizer)
    limit = data.tokenizer_sample_mb * 1_000_000

    def sample() -> Iterator[str]:
        taken = 0
        for text in texts():
            taken += len(text)
            progress("training the tokenizer", taken, taken)
            yield text
            if taken >= limit:
                return

    def build(folder: Path) -> None:
        MaskTokenizer(BPETokenizer.train(sample(), data.vocab_size, BERT).backend, "bpe").save(folder)

    key = cache_key("mask tokenizer", fingerprint, data.vocab_size, limit)
    return of_tokenizer(load_tokenizer(cached(cache / "tokenizers" / key, build)), "bpe")


def of_tokenizer(tokenizer: Tokenizer, name: str) -> MaskTokenizer:
    """Of any tokenizer that has a mask token in BERT's or RoBERTa's spelling."""
    return MaskTokenizer(tokenizer.backend, name)


def of_pretrained(tokenizer: Any) -> MaskTokenizer:
    """Of a tokenizer of transformers. Raises ConfigError where it has no mask token."""
    named = [getattr(tokenizer, role, None) for role in _ROLES]
    if named[4] is None:
        raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} has no mask token: the model fills no gaps.")
    begin, end = named[2] or tokenizer.bos_token, named[3] or tokenizer.eos_token
    specials = Specials(str(named[0]), str(named[1]), str(begin), str(end), str(named[4]))
    return MaskTokenizer(Backend.from_str(tokenizer.backend_tokenizer.to_str()), str(tokenizer.name_or_path), specials)


@dataclass(frozen=True)
class GraphCodec:
    """What turns texts and triples into inputs: a tokenizer, and the relations that are numbered 1, 2, ..."""

    tokenizer: MaskTokenizer
    relations: tuple[str, ...]
    entities: tuple[Entity, ...] = ()  # in the order of the model's entity table, from row 1 on

    @property
    def pad_id(self) -> int:
        """What stands for nothing; 0 where no token does."""
        return int(self.tokenizer.backend.token_to_id(self.tokenizer.specials.pad) or 0)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, with relations.json and entities.json beside it."""
        self.tokenizer.save(folder)
        for name, values in ((RELATIONS_FILE, self.relations), (ENTITIES_FILE, self.entities)):
            if values:
                text = json.dumps(values, indent=2 if name == RELATIONS_FILE else None, ensure_ascii=False)
                (folder / name).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> GraphCodec:
        """What `save` wrote. Raises ConfigError where it cannot be read."""
        relations = _strings(folder / RELATIONS_FILE, 0)
        entities = tuple(Entity(*pair) for pair in _strings(folder / ENTITIES_FILE, len(Entity._fields)))
        return cls(of_tokenizer(load_tokenizer(folder), str(folder)), tuple(relations), entities)


def _strings(file: Path, columns: int) -> list[Any]:
    """A list of strings, or of lists of so many strings; empty without a file. Raises ConfigError for anything else."""
    found = read_json(file) if file.exists() else []

    def right(value: Any) -> bool:
        if not columns:
            return isinstance(value, str)
        return isinstance(value, list) and len(value) == columns and all(isinstance(part, str) for part in value)

    if not isinstance(found, list) or not all(map(right, found)):
        what = f"lists of {columns} strings" if columns else "strings"
        raise ConfigError(f"{file} holds {shown(found)}, not a list of {what}; train or export the model again.")
    return found
