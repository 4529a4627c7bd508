"""Tokenizers. Those trained here are lossless: decoding the ids of any Unicode text gives the same text."""

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

from sansgpu.config import ConfigError
from sansgpu.config.data import MAX_VOCABULARY, MIN_VOCABULARY, DataConfig
from sansgpu.config.paths import local_path
from sansgpu.config.plain_data import read_text
from sansgpu.config.wording import truncate
from sansgpu.data.sources import open_sources
from sansgpu.files.reading import read_object, require_regular_file
from sansgpu.machine.hub import failure, quiet_hub
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors, tokenizer_flaw

END_OF_TEXT = "<|endoftext|>"
# The split pattern of GPT-4 and Qwen: up to three digits; words with a leading space; line ends without indentation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG_RUN = re.compile(r"[^\W\d_]{1000}|[^\w\s]{1000}|\s{1000}")  # characters that SPLIT would not separate
# Text without white space, such as DNA, base64 or minified code, or one endless word in another script.
UNSPACED_RUN = re.compile(r"[!-~]{2000,}|[^\W\d_]{1000,}|[^\w\s]{1000,}|\s{1000,}")
MAX_UNSPACED = 4 << 20  # characters of such runs in BPE training, which needs 100 bytes and a microsecond for each
FALLBACK_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
Ids = tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R")
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|im_end|>", "<|end_of_text|>", "[SEP]")


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the special tokens to add around a document.

    `before` and `after` are the ids to add before and after a document's text. By default a document starts with the
    end-of-text token, which also ends the previous document, as in pretraining from scratch.
    """

    def __init__(self, backend: Backend, end_of_text: str | None = None, around: tuple[Ids, Ids] | None = None) -> None:
        names = [end_of_text] if end_of_text else KNOWN_ENDS
        found = next((name for name in names if backend.token_to_id(name) is not None), None)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no end-of-text token, i.e. none of {truncate(' '.join(names))}; add one, or use a "
                "different tokenizer."
            )
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "<|endoftext|>" within a text is encoded as ordinary text
        self.backend = backend
        self.end_of_text = found
        self.end_id = int(backend.token_to_id(found) or 0)
        self.prefix_ids, self.suffix_ids = around or ((self.end_id,), ())
        self.other_end_ids: Ids = ()  # more tokens at which the model ends a text
        self.stops: tuple[str, ...] = ()  # texts at which it ends one
        self.left_out = 0  # characters of runs without white space that it was not trained on

    @property
    def vocab_size(self) -> int:
        """Returns the number of embedding rows: the largest id + 1."""
        return rows_needed(self.backend)

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without adding special tokens."""
        return self.encode_batch([text])[0]  # unlike `encode`, it lets other threads run

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes several texts in parallel."""
        with tokenizer_errors():
            return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Converts ids to text, including special tokens."""
        with tokenizer_errors():
            text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_bytes(self) -> np.ndarray:
        """Returns the number of UTF-8 bytes that each id usually covers, (V,) int64; see `covered_bytes`."""
        sizes = token_bytes(self.backend)
        sizes[[*self.prefix_ids, *self.suffix_ids]] = 0
        return sizes

    def covered_bytes(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns, for each text, the number of UTF-8 bytes covered by each token, (T,) int64.

        They sum to the size of the text.
        """
        with tokenizer_errors():
            encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [bytes_between(text, [stop for _, stop in e.offsets]) for text, e in zip(texts, encoded, strict=True)]

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""
        save_tokenizer(folder, self.backend, _settings(self.end_of_text))


def save_tokenizer(folder: Path, backend: Backend, settings: dict[str, Any]) -> None:
    """Writes tokenizer.json and, from `settings`, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


_INPUTS = {"model_input_names": ["input_ids", "attention_mask"]}  # transformers 4 would add token_type_ids


def _settings(end_of_text: Any) -> dict[str, Any]:
    """Returns the tokenizer_config.json for models pretrained with sansgpu."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        **_INPUTS,
    }


def rows_needed(backend: Backend) -> int:
    """Returns the number of embedding rows: the largest id + 1."""
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(backend: Backend) -> np.ndarray:
    """Returns the number of UTF-8 bytes of each id, (V,) int64; 0 for special tokens.

    With byte-level BPE, the numbers of a text's tokens sum to its size. Tokenizers that normalize text, drop spaces or
    have an unknown token need `bytes_between`.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    sizes = np.zeros(rows_needed(backend), dtype=np.int64)
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    byte_level, spaced = "ByteLevel" in decoder, "▁" in decoder
    for token, index in vocabulary.items():
        if token in added:  # stored as plain text, not as byte-level characters
            sizes[index] = 0 if added[token] else len(token.encode())
        elif byte_level:  # one character per byte
            sizes[index] = len(token)
        elif FALLBACK_BYTE.fullmatch(token):
            sizes[index] = 1
        else:
            sizes[index] = len((token.replace("▁", " ") if spaced else token).encode())
    return sizes


def bytes_between(text: str, stops: Sequence[int]) -> np.ndarray:
    """Returns the number of UTF-8 bytes of `text` per token, (T,) int64.

    `stops` (T,) are the character offsets at which the tokens end. Text between two tokens counts for the later one,
    and text after the last token for the last.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    sizes = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])  # byte offset of each character
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
    """Decorates a method that can also be called on the class: it then gets a new instance as `self`."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[P, R]:
        return partial(self._method, owner() if instance is None else instance)


def require_vocabulary_size(size: int, name: str) -> None:
    """Raises ConfigError unless `size` is valid for a new byte-level BPE tokenizer; the message calls it `name`."""
    if not MIN_VOCABULARY <= size <= MAX_VOCABULARY:
        raise ConfigError(
            f"{name} {size} is too {'small' if size < MIN_VOCABULARY else 'large'}; it must be from {MIN_VOCABULARY} "
            f"(256 bytes and the end-of-text token) to {MAX_VOCABULARY:,}."
        )


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019).

    Before training, its vocabulary has the 256 bytes and the end-of-text token.
    """

    def __init__(
        self, backend: Backend | None = None, end_of_text: str | None = None, around: tuple[Ids, Ids] | None = None
    ) -> None:
        super().__init__(backend or _trained_bpe((), MIN_VOCABULARY, (END_OF_TEXT,)), end_of_text, around)

    @_OnClassOrInstance
    def train(
        self, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)
    ) -> BPETokenizer:
        """Trains a vocabulary of up to `vocab_size` tokens, including the 256 bytes and the special tokens.

        Called on an instance, it replaces the vocabulary and returns the instance. Called on the class, as in
        `BPETokenizer.train(texts, 512)`, it returns a new tokenizer. Raises ConfigError if the size is out of range.
        """
        require_vocabulary_size(vocab_size, "vocab_size")
        bounded = BoundedRuns(texts)
        super().__init__(_trained_bpe(bounded, vocab_size, special_tokens))
        self.left_out = bounded.left_out
        return self

    def train_from_dataset(
        self, dataset_name: str, dataset_config: str | None = None, *, vocab_size: int, max_samples: int | None = None
    ) -> BPETokenizer:
        """Trains like `train`, on the training split of a dataset or on its first `max_samples` documents.

        The dataset is named as in `data.dataset_name`. Raises ConfigError if it cannot be read.
        """
        source = open_sources(DataConfig(dataset_name=dataset_name, dataset_config=dataset_config)).train
        return self.train((piece.text for piece in islice(source.read(), max_samples)), vocab_size)

    def save_pretrained(self, folder: str | Path) -> None:
        """Does the same as `save`; the name follows transformers."""
        self.save(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> BPETokenizer:
        """Loads a tokenizer that `save` wrote. Raises ConfigError if there is none."""
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


class BoundedRuns:
    """Texts in which runs without white space are left out after the first `MAX_UNSPACED` characters of them.

    Nearly all of their words are different, so that BPE training on all of them would take hours and many gigabytes.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.left_out = 0  # characters

    def __iter__(self) -> Iterator[str]:
        room = MAX_UNSPACED
        for text in self._texts:
            start = 0
            for run in UNSPACED_RUN.finditer(text):
                size = run.end() - run.start()
                if size <= room:
                    room -= size
                    continue
                yield text[start : run.start() + room]
                self.left_out += size - room
                start, room = run.end(), 0
            yield text[start:] if start else text


def _with_short_words(texts: Iterable[str]) -> Iterator[str]:
    """Cuts words every 1,000 characters, because BPE training time is quadratic in the length of a word."""
    for text in texts:
        start = 0
        for run in LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


class CharTokenizer(Tokenizer):
    """A character tokenizer. Encodes characters that were not in the training text as UTF-8 bytes."""

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
    """Parses a tokenizer.json. Raises ConfigError if it is invalid or has no end-of-text token."""
    if (flaw := tokenizer_flaw(text)) is not None:
        raise ConfigError(f"{source} is not a usable tokenizer: {flaw}; download or save it again.")
    return tokenizer_of_model(Backend.from_str(text), end_of_text, source)


def tokenizer_of_model(backend: Backend, end_of_text: str | None, source: Path) -> Tokenizer:
    """Returns the tokenizer of a pretrained model. Raises ConfigError if it has no end-of-text token."""
    try:
        return Tokenizer(backend, end_of_text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, UnicodeEncodeError):  # UnicodeEncodeError: an unpaired surrogate
        raise ConfigError(
            f"{source}: eos_token in tokenizer_config.json is not a string; set it to the text of a token."
        ) from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Loads a tokenizer from a tokenizer.json, a folder with one, or a Hugging Face model.

    Raises ConfigError if there is none or it has no end-of-text token.
    """
    path = local_path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    require_regular_file(file)
    if file.is_file():
        settings = file.parent / "tokenizer_config.json"
        end = read_object(settings).get("eos_token") if settings.exists() else None
        return parsed_tokenizer(read_text(file), end.get("content") if isinstance(end, dict) else end, file)
    if path.is_absolute() or path.suffix == ".json" or str(name).startswith((".", "~")):
        raise ConfigError(
            f"{name} does not exist; set data.tokenizer to bpe, char, a tokenizer.json or the name of a model."
        )
    return Tokenizer(*_loaded_by_transformers(name))


def load_tokenizer_of_model(name: str | Path, remote_code: bool = False) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face model, with the special tokens that transformers adds around a text.

    For a model pretrained with sansgpu, this is an end-of-text token before the text, as in training. `remote_code`
    allows running Python code from the model's repository.
    """
    path = local_path(name)
    if path.is_dir():
        own, settings = load_tokenizer(path), path / "tokenizer_config.json"  # raises if the file is invalid
        if settings.exists() and {**read_object(settings), **_INPUTS} == _settings(own.end_of_text):
            return own
    backend, end_of_text = _loaded_by_transformers(path if path.is_dir() else name, remote_code)
    return Tokenizer(backend, end_of_text, special_tokens_around(backend))


def _loaded_by_transformers(name: str | Path, remote_code: bool = False) -> tuple[Backend, str | None]:
    import transformers  # slow to import, and local tokenizers do not need it

    quiet_hub()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(name), trust_remote_code=remote_code)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the tokenizer of {name} cannot be loaded ({failure(error)}); set data.tokenizer to bpe, char or a "
            "tokenizer.json."
        ) from None
    if not getattr(loaded, "is_fast", False):
        raise ConfigError(f"{name} has no tokenizer.json; convert it with transformers first.")
    return Backend.from_str(loaded.backend_tokenizer.to_str()), loaded.eos_token
