"""Validates tokenizer files in a child process, because the tokenizers library may abort or panic on bad ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.machine.untrusted.sandbox import Sandbox, SandboxError, is_panic

CPU_SECONDS = 5  # the largest tokenizers take two
MAX_EMBEDDING_ROWS = 1 << 24  # an embedding needs a row for each id up to the largest; 262,144 is the most in use
MAX_GROWTH = 256  # factor by which replacements may lengthen a text
MAX_REPLACEMENTS = 64
MAX_PREPENDED_CHARS = 100  # maximum number that a normalizer may add to the start of a text
MAX_WORD_CHARS = 10_000  # limit of a WordPiece word, whose time is quadratic in its length
# Inputs that make normalizers, patterns and vocabularies fail: empty, long runs, rare characters, special tokens.
TEXTS = (
    "",
    "Hello, world! It's 12345.67\n\n\tdef main():",
    "a" * 40 + "!",
    "x" * 5000,
    " " * 2000 + "9" * 2000,
    "naïve 世界 🎉 e\u0301\u200b\ufeff\0 \u2028 ﷺ",
    "<|endoftext|></s>[MASK]<s>",
)

_valid: set[bytes] = set()  # hashes of the files that passed in this process


def tokenizer_flaw(text: str) -> str | None:
    """Returns a clause about why a tokenizer.json cannot be used, or None if it can."""
    content = text.encode(errors="surrogatepass")
    digest = hashlib.sha256(content).digest()
    if digest in _valid:
        return None
    child = Sandbox(_try, CPU_SECONDS)
    try:
        flaw = child.call(content).decode()
    except SandboxError as error:
        flaw = f"it {error}"
    finally:
        child.close()
    if not flaw:
        _valid.add(digest)
    return flaw or None


@contextmanager
def tokenizer_errors(where: str = "") -> Iterator[None]:
    """Converts errors of the tokenizers library to ConfigErrors whose message begins with `where`."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):  # the library raises bare Exception or panics
            raise
        place = f"{where}: " if where else ""
        raise ConfigError(
            f"{place}the tokenizer fails on this text ({first_line(error)}); remove the text, or use a different "
            "tokenizer."
        ) from None


def _try(content: bytes) -> bytes:
    try:
        backend = Backend.from_str(content.decode())
        flaw = _resource_flaw(backend)
        if flaw is None:
            _encode_probes(backend)
    except BaseException as error:
        if isinstance(error, MemoryError):
            raise
        flaw = first_line(error)
    return (flaw or "").encode()


def _encode_probes(backend: Backend) -> None:
    backend.no_padding()
    backend.no_truncation()
    for special in (False, True):
        backend.encode_special_tokens = special
        for text in TEXTS:
            try:
                ids = backend.encode(text).ids
                backend.decode(ids, skip_special_tokens=False)
            except Exception:  # a tokenizer without an unknown token cannot encode every text
                continue


def _resource_flaw(backend: Backend) -> str | None:
    """Returns a clause about settings that need too much memory or time on some texts, or None."""
    rows = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if rows > MAX_EMBEDDING_ROWS:
        return f"its largest token id is {rows - 1:,}, for which an embedding would need {rows:,} rows"
    if getattr(backend.model, "max_input_chars_per_word", 0) > MAX_WORD_CHARS:
        return f"its max_input_chars_per_word is larger than {MAX_WORD_CHARS:,}"
    for part in (backend.normalizer, backend.decoder):
        steps = list(_steps(json.loads(part.__getstate__()))) if part is not None else []
        growth = 1.0
        for step in steps:
            growth *= _growth(step)
        if growth > MAX_GROWTH or sum(step.get("type") == "Replace" for step in steps) > MAX_REPLACEMENTS:
            return "its replacements could lengthen a text without limit"
    return None


def _steps(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = component.get("normalizers", component.get("decoders"))
    if inner is None:
        yield component
    else:
        for part in inner:
            yield from _steps(part)


def _growth(step: dict[str, Any]) -> float:
    """Returns the factor by which a normalizer or decoder step can lengthen a text."""
    if step.get("type") == "Prepend":
        return 1.0 if len(step["prepend"]) <= MAX_PREPENDED_CHARS else float("inf")
    if step.get("type") != "Replace":
        return 1.0
    replaced = step["pattern"].get("String")  # a regular expression replaces one character at least
    return max(1.0, len(step["content"]) / max(1, len(replaced or "")))
