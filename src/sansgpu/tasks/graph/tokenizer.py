"""Tokenizers with a mask token, for masked language models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.config.wording import shown
from sansgpu.data.forms.graphs import Entity
from sansgpu.data.shards import cache_key, cached
from sansgpu.data.tokenizer import BPETokenizer, load_tokenizer, rows_needed, save_tokenizer
from sansgpu.events.progress import ReportProgress
from sansgpu.files.reading import read_json
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors


class Specials(NamedTuple):
    """Names of the special tokens."""

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
    """A tokenizer of the `tokenizers` library with a mask token. Raises ConfigError if it has none."""

    def __init__(self, backend: Backend, name: str, specials: Specials | None = None) -> None:
        given = [specials] if specials else [BERT, ROBERTA]
        found = next(
            (s for s in given if all(backend.token_to_id(t) is not None for t in (s.begin, s.end, s.mask))), None
        )
        if found is None:
            raise ConfigError(f"the tokenizer {name} has no mask token; use an encoder's tokenizer or bpe.")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "[MASK]" within a text is encoded as ordinary text
        self.backend, self.specials = backend, found
        self.begin_id, self.end_id, self.mask_id = (self._id(t) for t in (found.begin, found.end, found.mask))

    def _id(self, token: str) -> int:
        return int(self.backend.token_to_id(token) or 0)

    @property
    def vocab_size(self) -> int:
        """Returns the number of embedding rows: the largest id + 1."""
        return rows_needed(self.backend)

    def ordinary_ids(self) -> np.ndarray:
        """Returns all ids except those of special tokens, int64."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        return np.array(sorted(index for token, index in vocabulary.items() if token not in special), np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Encodes texts in parallel without special tokens. The encodings have offsets and word ids."""
        with tokenizer_errors():
            return list(self.backend.encode_batch(list(texts), add_special_tokens=False))

    def encode_names(self, names: Iterable[str]) -> list[list[int]]:
        """Encodes names as within a text, after a space."""
        texts = [f" {name.strip()}" for name in names]
        with tokenizer_errors():
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def enclosed(self, ids: np.ndarray) -> np.ndarray:
        """Adds the first and last special token ([CLS] and [SEP] in BERT) to a text's ids; returns int64."""
        return np.concatenate([[self.begin_id], ids, [self.end_id]]).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens."""
        text: str = self.backend.decode(list(ids))
        return text

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""
        named = zip(_ROLES, self.specials, strict=True)
        known = {role: token for role, token in named if self.backend.token_to_id(token) is not None}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}
        save_tokenizer(folder, self.backend, settings)


def build_mask_tokenizer(
    data: DataConfig, fingerprint: str, texts: Callable[[], Iterator[str]], cache: Path, progress: ReportProgress
) -> MaskTokenizer:
    """Loads the configured tokenizer. "bpe" is trained on `texts`, which `fingerprint` identifies in the cache."""
    if data.tokenizer == "char":
        raise ConfigError(
            "data.tokenizer char has no mask token; use bpe, a tokenizer.json or the tokenizer of an encoder."
        )
    if data.tokenizer != "bpe":
        return MaskTokenizer(load_tokenizer(data.tokenizer).backend, data.tokenizer)
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
    return MaskTokenizer(load_tokenizer(cached(cache / "tokenizers" / key, build)).backend, "bpe")


def from_pretrained(tokenizer: Any) -> MaskTokenizer:
    """Converts a transformers tokenizer. Raises ConfigError if it has no mask token."""
    named = [getattr(tokenizer, role, None) for role in _ROLES]
    if named[4] is None:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no mask token; choose a masked language model such as BERT."
        )
    begin, end = named[2] or tokenizer.bos_token, named[3] or tokenizer.eos_token
    specials = Specials(str(named[0]), str(named[1]), str(begin), str(end), str(named[4]))
    return MaskTokenizer(Backend.from_str(tokenizer.backend_tokenizer.to_str()), str(tokenizer.name_or_path), specials)


@dataclass(frozen=True)
class GraphCodec:
    """A tokenizer, the names of relations (with ids 1, 2, ...) and the entities."""

    tokenizer: MaskTokenizer
    relations: tuple[str, ...]
    entities: tuple[Entity, ...] = ()  # in the order of the model's entity table, starting at row 1

    @property
    def pad_id(self) -> int:
        """Returns the id of the padding token, or 0 if there is none."""
        return int(self.tokenizer.backend.token_to_id(self.tokenizer.specials.pad) or 0)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer, relations.json and entities.json."""
        self.tokenizer.save(folder)
        for name, values in ((RELATIONS_FILE, self.relations), (ENTITIES_FILE, self.entities)):
            if values:
                text = json.dumps(values, indent=2 if name == RELATIONS_FILE else None, ensure_ascii=False)
                (folder / name).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> GraphCodec:
        """Loads a codec that `save` wrote. Raises ConfigError if it cannot be read."""
        relations = _strings(folder / RELATIONS_FILE, 0)
        entities = tuple(Entity(*pair) for pair in _strings(folder / ENTITIES_FILE, len(Entity._fields)))
        return cls(MaskTokenizer(load_tokenizer(folder).backend, str(folder)), tuple(relations), entities)


def _strings(file: Path, columns: int) -> list[Any]:
    """Reads a list of strings or, if `columns` is not 0, of lists of `columns` strings; [] for a missing file.

    Raises ConfigError for anything else.
    """
    found = read_json(file) if file.exists() else []

    def is_valid(value: Any) -> bool:
        if not columns:
            return isinstance(value, str)
        return isinstance(value, list) and len(value) == columns and all(isinstance(part, str) for part in value)

    if not isinstance(found, list) or not all(map(is_valid, found)):
        what = f"lists of {columns} strings" if columns else "strings"
        raise ConfigError(
            f"{file} contains {shown(found)} instead of a list of {what}; train or export the model again."
        )
    return found
