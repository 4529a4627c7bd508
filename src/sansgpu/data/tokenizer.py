"""Text <-> token ids. Any Unicode text comes back as it went in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.config.plain import cut, first_line
from sansgpu.machine.hub import quiet_hub
from sansgpu.machine.inputs import read_object, read_text, require_ordinary
from sansgpu.machine.tokenizer_trial import tokenizer_errors, tokenizer_flaw

END_OF_TEXT = "<|endoftext|>"
# The split of GPT-4 and Qwen: numbers in threes, a word with its space, line ends apart from indentation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG_RUN = re.compile(r"[^\W\d_]{1000}|[^\w\s]{1000}|\s{1000}")  # of characters that SPLIT does not part
FALLBACK_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
Ids = tuple[int, ...]
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|im_end|>", "<|end_of_text|>", "[SEP]")


class Tokenizer:
    """A `tokenizers` model with the special tokens that enclose a document.

    `before` and `after` are the ids that come before and after a document's text. By default a document begins with
    the end-of-text token, which so also ends the one before it, as in the training of models from scratch.
    """

    def __init__(self, backend: Backend, end_of_text: str | None = None, around: tuple[Ids, Ids] | None = None) -> None:
        names = [end_of_text] if end_of_text else KNOWN_ENDS
        found = next((name for name in names if backend.token_to_id(name) is not None), None)
        if found is None:
            raise ConfigError(f"the tokenizer has no end-of-text token (looked for {cut(' '.join(names))}).")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # `<|endoftext|>` written in a text is text
        self.backend = backend
        self.end_of_text = found
        self.end_id = int(backend.token_to_id(found) or 0)
        self.before, self.after = around or ((self.end_id,), ())

    @property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the largest id and one."""
        return rows_needed(self.backend)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special token among them."""
        with tokenizer_errors():
            return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded in parallel."""
        with tokenizer_errors():
            return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are written out."""
        with tokenizer_errors():
            text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for in most texts, (V,) int64; `covered_bytes` counts those of a text."""
        sizes = token_bytes(self.backend)
        sizes[[*self.before, *self.after]] = 0
        return sizes

    def covered_bytes(self, texts: Sequence[str]) -> list[np.ndarray]:
        """UTF-8 bytes of each text that each of its tokens covers, (T,) int64; of a text with tokens they sum to its
        size.
        """
        with tokenizer_errors():
            encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [bytes_between(text, [stop for _, stop in e.offsets]) for text, e in zip(texts, encoded, strict=True)]

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(_settings(self.end_of_text), indent=2)
        (folder / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")


def _settings(end_of_text: Any) -> dict[str, Any]:
    """The tokenizer_config.json of a tokenizer with which a model was trained from scratch here."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
        "clean_up_tokenization_spaces": False,
    }


def rows_needed(backend: Backend) -> int:
    """Of an embedding: the largest id and one."""
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(backend: Backend) -> np.ndarray:
    """UTF-8 bytes that each id stands for, (V,) int64; 0 for special tokens.

    They sum to a text's size for byte-level BPE. Tokenizers that normalize a text, drop its spaces or have a token for
    unknown words need `bytes_between`.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    sizes = np.zeros(rows_needed(backend), dtype=np.int64)
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    byte_level, spaced = "ByteLevel" in decoder, "▁" in decoder
    for token, index in vocabulary.items():
        if token in added:  # written as it is in a text
            sizes[index] = 0 if added[token] else len(token.encode())
        elif byte_level:  # one character of the token a byte
            sizes[index] = len(token)
        elif FALLBACK_BYTE.fullmatch(token):
            sizes[index] = 1
        else:
            sizes[index] = len((token.replace("▁", " ") if spaced else token).encode())
    return sizes


def bytes_between(text: str, stops: Sequence[int]) -> np.ndarray:
    """UTF-8 bytes of `text` from each of the places `stops` (T,) back to the one before, (T,) int64.

    Places are characters, where tokens end; the first token has all before it, and the last one all after it too.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    sizes = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])  # of the text up to each character
    places = np.maximum.accumulate(np.asarray(stops, np.int64))
    places[-1:] = len(text)
    return np.diff(sizes[places], prepend=0)


def special_tokens_around(backend: Backend) -> tuple[Ids, Ids]:
    """The ids that a tokenizer puts before and after a single text."""
    backend.no_padding()
    backend.no_truncation()
    encoded = backend.encode("a")
    special = encoded.special_tokens_mask
    first = special.index(0) if 0 in special else len(special)
    last = len(special) - special[::-1].index(0) if 0 in special else len(special)
    return tuple(encoded.ids[:first]), tuple(encoded.ids[last:])


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019)."""

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)
    ) -> BPETokenizer:
        """Learn up to `vocab_size` tokens from `texts`, the 256 bytes and the special tokens among them."""
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
        return cls(backend)


def _with_short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut after every 1,000 characters of a word: the trainer takes the square of a word's length."""
    for text in texts:
        start = 0
        for run in LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


class CharTokenizer(Tokenizer):
    """One token a character that the training text has; any other character is its UTF-8 bytes."""

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """Collect the characters of `texts`."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        names = [END_OF_TEXT, *sorted(characters), *(f"<0x{byte:02X}>" for byte in range(256))]
        vocabulary = {name: index for index, name in enumerate(names)}
        backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]*\n|[^\n]+"), "isolated")  # lines: quick to encode
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        backend.add_special_tokens([END_OF_TEXT])
        return cls(backend)


def parsed_tokenizer(text: str, end_of_text: str | None, source: Path) -> Tokenizer:
    """A tokenizer.json that was read from `source`. Raises ConfigError where it is none, or has no end of text."""
    if (flaw := tokenizer_flaw(text)) is not None:
        raise ConfigError(f"{source} is not a usable tokenizer: {flaw}.")
    try:
        return Tokenizer(Backend.from_str(text), end_of_text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, UnicodeEncodeError):  # the latter of half a surrogate pair
        raise ConfigError(f"{source}: eos_token in tokenizer_config.json is no text.") from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """A tokenizer.json, a folder with one, or the tokenizer of a Hugging Face model.

    Raises ConfigError where there is none or where it has no end-of-text token.
    """
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        settings = file.parent / "tokenizer_config.json"
        end = read_object(settings).get("eos_token") if settings.exists() else None
        return parsed_tokenizer(read_text(file), end.get("content") if isinstance(end, dict) else end, file)
    require_ordinary(file)
    if path.is_absolute() or path.suffix == ".json" or str(name).startswith((".", "~")):
        raise ConfigError(f"{name} does not exist; data.tokenizer is bpe, char, a tokenizer.json or a model's name.")
    return Tokenizer(*_loaded_by_transformers(name))


def load_tokenizer_of_model(name: str | Path, remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a Hugging Face model, which encloses a text in the special tokens that `tokenizer(text)` of
    transformers sets. `remote_code` allows Python code that comes with the model to run.

    A model that was trained from scratch here reads a text as it did in training, after the end-of-text token.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        own, settings = load_tokenizer(path), path / "tokenizer_config.json"  # which refuses a file that is unsound
        if settings.exists() and read_object(settings) == _settings(own.end_of_text):
            return own
    backend, end_of_text = _loaded_by_transformers(path if path.is_dir() else name, remote_code)
    return Tokenizer(backend, end_of_text, special_tokens_around(backend))


def _loaded_by_transformers(name: str | Path, remote_code: bool = False) -> tuple[Backend, str | None]:
    """The tokenizer and the name of its end-of-text token."""
    import transformers  # a second of imports that a local tokenizer never needs

    quiet_hub()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(name), trust_remote_code=remote_code)
    except Exception as error:
        raise ConfigError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}.") from None
    if not getattr(loaded, "is_fast", False):
        raise ConfigError(f"{name} has no tokenizer.json; convert it with transformers first.")
    return Backend.from_str(loaded.backend_tokenizer.to_str()), loaded.eos_token
