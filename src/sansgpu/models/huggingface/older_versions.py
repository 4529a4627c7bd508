"""Adds what transformers 4 needs to the files that transformers 5 writes.

Version 4 ignores keys that it does not know and uses defaults instead, so without its own keys it would compute a
different model. Version 5 reads its keys, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sansgpu.files.reading import read_object
from sansgpu.models import families
from sansgpu.models.family import Family, OlderRope

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_FULL, _LOCAL = "full_attention", "sliding_attention"  # keys of `rope_parameters` if these layers differ
_ADD_BOS_BY_DEFAULT = ("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer")


def complete_config(folder: Path) -> None:
    """Adds version 4's keys to the config.json in a folder."""
    _write(folder / CONFIG, _with_older_keys(read_object(folder / CONFIG)))


def complete_tokenizer_config(tokenizer: Any, folder: Path) -> None:
    """Changes a folder's tokenizer_config.json, written by version 5, so that version 4 loads the same tokenizer."""
    settings = read_object(folder / TOKENIZER_CONFIG)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["model_input_names"] = list(tokenizer.model_input_names)  # by default it would return token_type_ids
    if settings.get("tokenizer_class") in _ADD_BOS_BY_DEFAULT:
        ids, bos, eos = tokenizer("a").input_ids, tokenizer.bos_token_id, tokenizer.eos_token_id
        settings |= {"add_bos_token": ids[0] == bos, "add_eos_token": ids[-1] == eos}
    if isinstance(settings.get("extra_special_tokens"), list):  # version 4 expects an object
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if isinstance(named := settings.get("model_specific_special_tokens"), dict):
        settings["extra_special_tokens"] = named
    _write(folder / TOKENIZER_CONFIG, settings)


def _with_older_keys(settings: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _with_older_keys(value) for key, value in settings.items() if isinstance(value, dict)}
    found, family = {**settings, **nested}, families.find(settings.get("model_type")) or Family()
    if "dtype" in settings:
        found.setdefault("torch_dtype", settings["dtype"])  # the key before version 4.56
    if isinstance(rope := settings.get("rope_parameters"), dict):
        found |= _older_rope(family.older_rope, rope)
    return {**found, **family.older_settings(settings)}


def _older_rope(known: OlderRope | None, rope: dict[str, Any]) -> dict[str, Any]:
    if _FULL in rope and known is None:
        return {}  # version 4 does not have such a model
    keys, full, local = known or OlderRope(), rope.get(_FULL, rope), rope.get(_LOCAL) or {}
    named = {keys.theta: full.get("rope_theta"), keys.partial: full.get("partial_rotary_factor")}
    if keys.local_theta is not None:
        named[keys.local_theta] = local.get("rope_theta")
    found = {key: value for key, value in named.items() if value is not None}
    is_scaled = full.get("rope_type", "default") != "default"
    scaling = {k: v for k, v in full.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return {**found, "rope_scaling": scaling if is_scaled else None}  # null, because Apertus' default has scaling


def _write(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
