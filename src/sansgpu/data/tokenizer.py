"""Tokenizers. Decoding the ids of any Unicode text gives the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError, DataConfig
from sansgpu.config.paths import local_path
from sansgpu.config.plain_data import read_text
from sansgpu.config.schema import MAX_VOCABULARY, MIN_VOCABULARY
from sansgpu.config.wording import first_line, truncate
from sansgpu.data.sources import open_sources
from sansgpu.files.reading import read_object, require_regular_file
from sansgpu.machine.hub import quiet_hub
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors, tokenizer_flaw

END_OF_TEXT = "<|endoftext|>"
# The pre-tokenization of GPT-4 and Qwen: up to three digits, words with their space, line ends apart from indentation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG_RUN = re.compile(r"[^\W\d_]{1000}|[^\w\s]{1000}|\s{1000}")  # characters that SPLIT keeps together
FALLBACK_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
Ids = tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R")
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|im_end|>", "<|end_of_text|>", "[SEP]")


class Tokenizer:
    """A `tokenizers` model with the special tokens around a document.

    `before` and `after` are the ids added before and after a document's text. By default a document begins with the
    end-of-text token, which also ends the previous one, as in pretraining from scratch.
    """

    def __init__(self, backend: Backend, end_of_text: str | None = None, around: tuple[Ids, Ids] | None = None) -> None:
        names = [end_of_text] if end_of_text else KNOWN_ENDS
        found = next((name for name in names if backend.token_to_id(name) is not None), None)
        if found is None:
            raise ConfigError(f"the tokenizer has no end-of-text token (searched for {truncate(' '.join(names))}).")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # `<|endoftext|>` in a text is ordinary text
        self.backend = backend
        self.end_of_text = found
        self.end_id = int(backend.token_to_id(found) or 0)
        self.prefix_ids, self.suffix_ids = around or ((self.end_id,), ())

    @property
    def vocab_size(self) -> int:
        """Returns the number of embedding rows: the largest id + 1."""
        return rows_needed(self.backend)

    def encode(self, text: str) -> list[int]:
        """Encodes a text without special tokens."""
        with tokenizer_errors():
            return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes several texts in parallel."""
        with tokenizer_errors():
            return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, including special tokens."""
        with tokenizer_errors():
            text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_bytes(self) -> np.ndarray:
        """Returns the UTF-8 bytes of each id in most texts, (V,) int64; `covered_bytes` is exact for a given text."""
        sizes = token_bytes(self.backend)
        sizes[[*self.prefix_ids, *self.suffix_ids]] = 0
        return sizes

    def covered_bytes(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the UTF-8 bytes that each token of each text covers, (T,) int64; they sum to the text's size."""
        with tokenizer_errors():
            encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [bytes_between(text, [stop for _, stop in e.offsets]) for text, e in zip(texts, encoded, strict=True)]

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer."""
        save_tokenizer(folder, self.backend, _settings(self.end_of_text))


def save_tokenizer(folder: Path, backend: Backend, settings: dict[str, Any]) -> None:
    """Writes tokenizer.json, and `settings` as tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _settings(end_of_text: Any) -> dict[str, Any]:
    """Returns the tokenizer_config.json for models pretrained with sansgpu."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
        "clean_up_tokenization_spaces": False,
    }


def rows_needed(backend: Backend) -> int:
    """Returns the number of embedding rows: the largest id + 1."""
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(backend: Backend) -> np.ndarray:
    """Returns the UTF-8 bytes of each id, (V,) int64; 0 for special tokens.

    For byte-level BPE they sum to a text's size. Tokenizers that normalize text, drop spaces or have an unknown token
    need `bytes_between`.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    sizes = np.zeros(rows_needed(backend), dtype=np.int64)
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    byte_level, spaced = "ByteLevel" in decoder, "▁" in decoder
    for token, index in vocabulary.items():
        if token in added:  # verbatim text
            sizes[index] = 0 if added[token] else len(token.encode())
        elif byte_level:  # one character per byte
            sizes[index] = len(token)
        elif FALLBACK_BYTE.fullmatch(token):
            sizes[index] = 1
        else:
            sizes[index] = len((token.replace("▁", " ") if spaced else token).encode())
    return sizes


def bytes_between(text: str, stops: Sequence[int]) -> np.ndarray:
    """Returns the UTF-8 bytes of `text` per token, (T,) int64, where `stops` (T,) are the end characters of the tokens.

    Text between two tokens counts for the later one, text after the last token for the last.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    sizes = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])  # bytes of the text before each character
    places = np.maximum.accumulate(np.asarray(stops, np.int64))
    places[-1:] = len(text)
    return np.diff(sizes[places], prepend=0)


def special_tokens_around(backend: Backend) -> tuple[Ids, Ids]:
    """Returns the ids that a tokenizer adds before and after a single text."""
    backend.no_padding()
    backend.no_truncation()
    encoded = backend.encode("a")
    special = encoded.special_tokens_mask
    first = special.index(0) if 0 in special else len(special)
    last = len(special) - special[::-1].index(0) if 0 in special else len(special)
    return tuple(encoded.ids[:first]), tuple(encoded.ids[last:])


class _OnClassOrInstance(Generic[P, R]):
    """A method that also works on the class, where it gets a new instance."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[P, R]:
        return partial(self._method, owner() if instance is None else instance)


def require_vocabulary_size(size: int, name: str) -> None:
    """Raises ConfigError, calling the size `name`, unless a new byte-level BPE tokenizer may have it."""
    if not MIN_VOCABULARY <= size <= MAX_VOCABULARY:
        raise ConfigError(
            f"{name} {size} is too {'small' if size < MIN_VOCABULARY else 'large'}; it must be at least "
            f"{MIN_VOCABULARY}, which are 256 bytes and the end of text, and at most {MAX_VOCABULARY:,}."
        )


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019).

    A new one has a token per byte, until it is trained.
    """

    def __init__(
        self, backend: Backend | None = None, end_of_text: str | None = None, around: tuple[Ids, Ids] | None = None
    ) -> None:
        super().__init__(backend or _trained_bpe((), MIN_VOCABULARY, (END_OF_TEXT,)), end_of_text, around)

    @_OnClassOrInstance
    def train(
        self, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)
    ) -> BPETokenizer:
        """Trains up to `vocab_size` tokens on `texts`, including the 256 bytes and the special tokens.

        Replaces the vocabulary and returns the tokenizer. `BPETokenizer.train(texts, 512)` returns a new one. Raises
        ConfigError if the size is out of range.
        """
        require_vocabulary_size(vocab_size, "vocab_size")
        super().__init__(_trained_bpe(texts, vocab_size, special_tokens))
        return self

    def train_from_dataset(
        self, dataset_name: str, dataset_config: str | None = None, *, vocab_size: int, max_samples: int | None = None
    ) -> BPETokenizer:
        """Trains on the training split of a dataset, named as in `data.dataset_name`, or its first `max_samples` texts.

        Replaces the vocabulary and returns the tokenizer. Raises ConfigError if the dataset cannot be read.
        """
        source = open_sources(DataConfig(dataset_name=dataset_name, dataset_config=dataset_config)).train
        return self.train((piece.text for piece in islice(source.read(), max_samples)), vocab_size)

    def save_pretrained(self, folder: str | Path) -> None:
        """Does what `save` does, by transformers' name."""
        self.save(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> BPETokenizer:
        """Loads what `save` wrote. Raises ConfigError if there is no tokenizer."""
        loaded = load_tokenizer(folder)
        return cls(loaded.backend, loaded.end_of_text)


def _trained_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_with_short_words(texts), trainer)
    return backend


def _with_short_words(texts: Iterable[str]) -> Iterator[str]:
    """Cuts words every 1,000 characters: training time is quadratic in the length of a word."""
    for text in texts:
        start = 0
        for run in LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


class CharTokenizer(Tokenizer):
    """A character tokenizer. Characters that are not in the training text are encoded as UTF-8 bytes."""

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """Builds the vocabulary from the characters of `texts`."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        names = [END_OF_TEXT, *sorted(characters), *(f"<0x{byte:02X}>" for byte in range(256))]
        vocabulary = {name: index for index, name in enumerate(names)}
        backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Split(
            Regex(r"[^\n]*\n|[^\n]+"), "isolated"
        )  # BPE is slow on long inputs, so encode line by line
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        backend.add_special_tokens([END_OF_TEXT])
        return cls(backend)


def parsed_tokenizer(text: str, end_of_text: str | None, source: Path) -> Tokenizer:
    """Parses the content of a tokenizer.json. Raises ConfigError if it is invalid or has no end-of-text token."""
    if (flaw := tokenizer_flaw(text)) is not None:
        raise ConfigError(f"{source} is not a usable tokenizer: {flaw}.")
    try:
        return Tokenizer(Backend.from_str(text), end_of_text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, UnicodeEncodeError):  # UnicodeEncodeError: an unpaired surrogate
        raise ConfigError(f"{source}: eos_token in tokenizer_config.json is not text.") from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Loads a tokenizer.json, a folder with one, or the tokenizer of a Hugging Face model.

    Raises ConfigError if there is none or it has no end-of-text token.
    """
    path = local_path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        settings = file.parent / "tokenizer_config.json"
        end = read_object(settings).get("eos_token") if settings.exists() else None
        return parsed_tokenizer(read_text(file), end.get("content") if isinstance(end, dict) else end, file)
    require_regular_file(file)
    if path.is_absolute() or path.suffix == ".json" or str(name).startswith((".", "~")):
        raise ConfigError(
            f"{name} does not exist; set data.tokenizer to bpe, char, a tokenizer.json or the name of a model."
        )
    return Tokenizer(*_loaded_by_transformers(name))


def load_tokenizer_of_model(name: str | Path, remote_code: bool = False) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face model, with the special tokens that transformers adds around a text.

    For a model pretrained with sansgpu that is one end-of-text token before the text, as in training. `remote_code`
    allows Python code in the model's repository to run.
    """
    path = local_path(name)
    if path.is_dir():
        own, settings = load_tokenizer(path), path / "tokenizer_config.json"  # raises if the file is invalid
        if settings.exists() and read_object(settings) == _settings(own.end_of_text):
            return own
    backend, end_of_text = _loaded_by_transformers(path if path.is_dir() else name, remote_code)
    return Tokenizer(backend, end_of_text, special_tokens_around(backend))


def _loaded_by_transformers(name: str | Path, remote_code: bool = False) -> tuple[Backend, str | None]:
    import transformers  # a slow import that a local tokenizer never needs

    quiet_hub()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(name), trust_remote_code=remote_code)
    except Exception as error:
        raise ConfigError(f"cannot load the tokenizer of {name}: {first_line(error)}.") from None
    if not getattr(loaded, "is_fast", False):
        raise ConfigError(f"{name} has no tokenizer.json; convert it with transformers first.")
    return Backend.from_str(loaded.backend_tokenizer.to_str()), loaded.eos_token
