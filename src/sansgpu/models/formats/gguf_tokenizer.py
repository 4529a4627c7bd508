"""Converts a tokenizer to the metadata of a GGUF file and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from gguf import GGUFWriter, Keys, TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.models import families
from sansgpu.models.family import DIGITS, PUNCTUATION, THREE_DIGITS, PreTokenizer
from sansgpu.models.formats.gguf_rope import OTHER_FORMAT
from sansgpu.models.formats.tokenizers import TokenizerParts

# llama.cpp's names of kinds of tokenizers. Gemma 4's is SentencePiece's BPE with merges instead of scores.
_SENTENCE_PIECE, _BYTE_LEVEL, _WITH_MERGES = "llama", "gpt2", "gemma4"
ALL_ENDS = "tokenizer.ggml.eos_token_ids"  # Ollama reads this key; llama.cpp reads only `_END_KEYS`
_END_KEYS = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
_CHOSEN_KEYS = (  # an export chooses these, whatever the file of the base model has
    Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.PAD_ID, ALL_ENDS,
    Keys.Tokenizer.ADD_BOS, Keys.Tokenizer.CHAT_TEMPLATE,
)  # fmt: skip
_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"  # This character stands for a space in the tokens of SentencePiece and of llama.cpp's tokenizer `llama`.
_REPLACES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_ADDED_SCORE = -1000.0  # score of tokens that no merge produces, as in files of llama.cpp's converter


@cache
def _pre_tokenizers() -> dict[str, PreTokenizer]:
    """Returns the pre-tokenizers of all families by llama.cpp's names."""
    return {name: one for family in families.every() for name, one in family.pre_tokenizers.items()}


def write_tokenizer(writer: GGUFWriter, parts: TokenizerParts, rows: int) -> None:
    """Writes a tokenizer, padded to the embedding's `rows`. Raises ConfigError if llama.cpp does not support it."""
    if parts.stored is not None and len(parts.stored[Keys.Tokenizer.LIST]) == rows:
        for key, value in parts.stored.items():
            if key not in _CHOSEN_KEYS:
                add_value(writer, key, value)
    else:
        _write_vocabulary(writer, parts, rows)
    if parts.bos_id is not None:
        writer.add_bos_token_id(parts.bos_id)
    if parts.eos_id is not None:
        writer.add_eos_token_id(parts.eos_id)
    if parts.turn_end_id is not None:
        writer.add_eot_token_id(parts.turn_end_id)
    if len(parts.end_ids) > 1:
        writer.add_array(ALL_ENDS, parts.end_ids)
    if parts.pad_id is not None:
        writer.add_pad_token_id(parts.pad_id)
    writer.add_add_bos_token(parts.adds_bos)
    if parts.chat_template is not None:
        writer.add_chat_template(parts.chat_template)


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a value to the metadata, with the type in GGUF that follows from its own."""
    match value:
        case list():
            writer.add_array(key, value)
        case bool():
            writer.add_bool(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_uint32(key, value)


def _write_vocabulary(writer: GGUFWriter, parts: TokenizerParts, rows: int) -> None:
    """Writes the tokens of a tokenizer and how they are merged."""
    raw = json.loads(parts.json)
    model, added = raw["model"], {token["id"]: token for token in raw["added_tokens"]}
    is_character_level = _is_character_level(model, added, raw["normalizer"])
    ranks = {} if is_character_level else _sentence_piece_ranks(raw)
    is_sentence_piece = ranks is not None
    names = {index: name.replace(" ", _SPACE if is_sentence_piece else " ") for name, index in model["vocab"].items()}
    names |= {index: token["content"] for index, token in added.items()}

    def type_of(index: int) -> TokenType:
        if index not in names:
            return TokenType.UNUSED
        if index in added:
            return TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        return TokenType.BYTE if is_sentence_piece and _BYTE.fullmatch(names[index]) else TokenType.NORMAL

    writer.add_tokenizer_model(_SENTENCE_PIECE if is_sentence_piece else _BYTE_LEVEL)
    writer.add_tokenizer_pre("default" if is_sentence_piece else _pre_tokenizer(raw))
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(rows)])
    writer.add_token_types([type_of(index) for index in range(rows)])
    if ranks is not None:
        scores = {index: float(-ranks.get(name, -_ADDED_SCORE)) for name, index in model["vocab"].items()}
        writer.add_token_scores([0.0 if is_character_level else scores.get(i, _ADDED_SCORE) for i in range(rows)])
        writer.add_add_space_prefix(bool(_space_rule(raw)))
    else:
        writer.add_token_merges([" ".join(merge) for merge in _merges(model)])
    if model.get("unk_token") is not None:
        writer.add_unk_token_id(model["vocab"][model["unk_token"]])
    writer.add_string(Keys.Tokenizer.HF_JSON, parts.json)


def read_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Reads the tokenizer from metadata. Raises ConfigError if there is none or it is not supported."""
    bos, eos, pad = (metadata.get(k) for k in (Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID, Keys.Tokenizer.PAD_ID))
    known = _pre_tokenizers().get(str(metadata.get(Keys.Tokenizer.PRE)))
    adds_bos = bool(metadata.get(Keys.Tokenizer.ADD_BOS, known is not None and known.adds_bos))
    tokenizer_json = metadata.get(Keys.Tokenizer.HF_JSON)
    backend = Backend.from_str(tokenizer_json) if tokenizer_json else _rebuilt(metadata, bos if adds_bos else None)
    template = metadata.get(Keys.Tokenizer.CHAT_TEMPLATE)
    return TokenizerParts(backend, bos, eos, pad, adds_bos, template)


def read_end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end a text, starting with eos_token_id."""
    more = metadata.get(ALL_ENDS)
    found = [*(metadata.get(key) for key in _END_KEYS), *(more if isinstance(more, list) else [])]
    return [index for index in dict.fromkeys(found) if isinstance(index, int)]


def _rebuilt(metadata: Mapping[str, Any], bos: int | None) -> Backend:
    """Builds a tokenizer from tokens and merges. Unless `bos` is None, it adds that id to the start of a text."""
    names, types = metadata[Keys.Tokenizer.LIST], metadata[Keys.Tokenizer.TOKEN_TYPE]
    vocabulary = {name: index for index, name in enumerate(names)}
    is_sentence_piece = metadata.get(Keys.Tokenizer.MODEL) in (_SENTENCE_PIECE, _WITH_MERGES)
    build = _sentence_piece if is_sentence_piece else _byte_level
    backend = build(metadata, vocabulary)
    added = {token_type: [n for n, t in zip(names, types, strict=True) if t == token_type] for token_type in _ADDED}
    backend.add_special_tokens(added[TokenType.CONTROL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in added[TokenType.USER_DEFINED]])
    if bos is not None:
        first = names[bos]
        backend.post_processor = processors.TemplateProcessing(f"{first} $A", None, [(first, bos)])
    return backend


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Backend:
    pre = metadata.get(Keys.Tokenizer.PRE)
    known = _pre_tokenizers().get(str(pre))
    if metadata.get(Keys.Tokenizer.MODEL) != _BYTE_LEVEL or known is None:
        raise ConfigError(
            f"its tokenizer ({pre}) is not supported, and the file contains no tokenizer.json; {OTHER_FORMAT}."
        )
    merges = _stored_merges(metadata)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=known.ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in known.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*steps, as_bytes]), decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Backend:
    """Builds BPE with a file's merges, or with those that follow from the scores of SentencePiece's tokens."""
    has_merges = metadata.get(Keys.Tokenizer.MODEL) == _WITH_MERGES
    merges = _stored_merges(metadata) if has_merges else _merges_of_scores(metadata, vocabulary)
    unknown = metadata.get(Keys.Tokenizer.UNK_ID)
    names = metadata[Keys.Tokenizer.LIST]
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else names[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(metadata.get(Keys.Tokenizer.ADD_PREFIX, True))
    replaced = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefixed else replaced
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) for merge in metadata[Keys.Tokenizer.MERGES])
    return [(left, right) for left, right in pairs]


def _merges_of_scores(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    scores, types = metadata[Keys.Tokenizer.SCORES], metadata[Keys.Tokenizer.TOKEN_TYPE]
    normal = (index for index in vocabulary.values() if types[index] == TokenType.NORMAL)
    names = metadata[Keys.Tokenizer.LIST]
    return _splits((names[index] for index in sorted(normal, key=scores.__getitem__, reverse=True)), vocabulary)


def _splits(names: Iterable[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make up each of the tokens `names`, of which there may be 262,144."""
    return [
        (left, right)
        for name in names
        for place in range(1, len(name))
        if (left := name[:place]) in vocabulary and (right := name[place:]) in vocabulary
    ]


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the merges of a tokenizer.json, which may be pairs or strings."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def _sentence_piece_ranks(raw: Mapping[str, Any]) -> dict[str, int] | None:
    """Returns the merge ranks of tokens; None if llama.cpp's SentencePiece would merge in a different order.

    llama.cpp merges any two neighbors whose text is a token, first the token with the highest score. So the merges must
    contain all splits of each token, and those of one token must follow each other.
    """
    model = raw["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or not model["merges"] or _space_rule(raw) is None:
        return None
    vocabulary, merges, ranks, last = model["vocab"], _merges(model), dict[str, int](), ""
    for left, right in merges:
        name = left + right
        if name == last:
            continue
        if name in ranks:
            return None
        ranks[name], last = len(ranks), name
    complete = set(merges) == set(_splits(ranks, vocabulary))
    added = {token["content"] for token in raw["added_tokens"]}
    unmerged = (name for name in vocabulary if name not in ranks and name not in added and not _BYTE.fullmatch(name))
    return ranks if complete and not _splits(unmerged, vocabulary) else None


def _space_rule(raw: Mapping[str, Any]) -> bool | None:
    """Returns whether a tokenizer adds a space at the start of a text; None if its spaces are not SentencePiece's."""
    normalizer, pre_tokenizer = raw["normalizer"], raw["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    prefix = {"type": "Prepend", "prepend": _SPACE}
    match pre_tokenizer:
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first" | "never" as scheme, "split": False}:
            return scheme == "first" if not steps else None
        case None | {"type": "Split", "pattern": {"String": " "}}:  # the normalizer has replaced all spaces
            if steps in ([_REPLACES_SPACES], [prefix, _REPLACES_SPACES]):
                return len(steps) == 2
    return None


def _is_character_level(model: Mapping[str, Any], added: Mapping[int, Any], normalizer: Any) -> bool:
    """Returns True if all tokens are characters or bytes. llama.cpp's SentencePiece then gives the same ids."""
    regular = [name for name, index in model["vocab"].items() if index not in added]
    return (
        model["type"] == "BPE"
        and not model["merges"]
        and bool(model.get("byte_fallback"))
        and normalizer is None
        and all(len(name) == 1 or _BYTE.fullmatch(name) for name in regular)
        and _SPACE not in regular
    )


def _pre_tokenizer(raw: Mapping[str, Any]) -> str:
    model, split = raw["model"], _split(raw["pre_tokenizer"])
    if model["type"] == "BPE" and split is not None and model["merges"] and _is_nfc_or_none(raw["normalizer"]):
        affixed = any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
        wanted = (split, bool(model.get("ignore_merges")))
        known = {name: one for name, one in _pre_tokenizers().items() if not one.is_alias}
        name = next((name for name, one in known.items() if (one.patterns, one.ignore_merges) == wanted), None)
        if name is not None and not affixed:
            return name
    raise ConfigError(
        "llama.cpp does not support this tokenizer; --format gguf supports byte-level BPE with the pre-tokenizers of "
        "GPT-2, GPT-4, GPT-4o, Llama 3, Mistral Nemo, Qwen and sansgpu, SentencePiece's BPE, and character tokenizers; "
        "use --format hf."
    )


def _is_nfc_or_none(normalizer: Any) -> bool:
    """Accepts NFC although llama.cpp does not apply it, as for Qwen, because most text is in NFC already."""
    return normalizer is None or normalizer["type"] == "NFC"


def _split(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """Returns the split patterns of a byte-level pre-tokenizer; None for other pre-tokenizers."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    known = _pre_tokenizers()
    patterns: list[str] = []
    before: int | None = None  # how many patterns divide characters; the others divide bytes
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}:
                if pattern == THREE_DIGITS or not any(pattern == one.patterns[-1] for one in known.values()):
                    return None  # the pattern may leave out text between matches
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": individual}:
                patterns.append(r"\p{N}" if individual else DIGITS)
            case {"type": "Punctuation", "behavior": "Contiguous"}:
                patterns.append(PUNCTUATION)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex} if before is None:
                patterns += known["gpt-2"].patterns if use_regex else ()
                before = len(patterns)
            case _:
                return None
    is_alike = before is not None and all(one in (DIGITS, THREE_DIGITS) for one in patterns[before:])
    return tuple(patterns) if is_alike else None
