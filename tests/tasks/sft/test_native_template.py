"""Base models without a chat template get that of the special tokens in their vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.data.forms.chats import CONVERSATIONS, PROMPTS
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.models.generation.answer_end import end_tokens
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of, native_template
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.sft.template import with_native_template
from tests.processes import write_rows

GEMMA, CHATML = ("<start_of_turn>", "<end_of_turn>"), ("<|im_start|>", "<|im_end|>")
LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ASKED = [{"role": "user", "content": " Open? "}, {"role": "assistant", "content": "Yes. "}]
AGAIN = [*ASKED, {"role": "user", "content": "Now?"}]


def base_tokenizer(*marks: str) -> Any:
    backend = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", *marks])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")


@pytest.mark.parametrize(
    ("marks", "text", "prompt"),
    [
        (
            GEMMA,
            "<bos><start_of_turn>user\nBe brief.\n\nOpen?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
            "<start_of_turn>user\nNow?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            CHATML,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Open? <|im_end|>\n"
            "<|im_start|>assistant\nYes. <|im_end|>\n",
            "<|im_start|>user\nNow?<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["gemma", "chatml"],
)
def test_the_form_of_the_family_is_written_and_ends_answers(marks: tuple[str, ...], text: str, prompt: str) -> None:
    tokenizer = base_tokenizer(*marks)
    tokenizer.chat_template = native_template(tokenizer)
    turns = [{"role": "system", "content": "Be brief."}, *AGAIN]
    assert tokenizer.apply_chat_template(turns[:3], tokenize=False) == text
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == text + prompt
    ends = end_tokens(tokenizer)
    assert ends.eos == ends.turn == tokenizer.convert_tokens_to_ids(marks[1])


PREFERRED = {"prompt": AGAIN, "chosen": ASKED[1:], "rejected": [{"role": "assistant", "content": "No."}]}


@pytest.mark.parametrize(
    ("task", "forms", "row", "is_chosen"),
    [
        ("sft", CONVERSATIONS, {"messages": ASKED}, True),
        ("sft", CONVERSATIONS, {"prompt": "Open?", "completion": "Yes."}, False),
        ("sft", CONVERSATIONS, {"text": "We are open."}, False),
        ("sft", CONVERSATIONS, {"messages": 7}, False),
        ("preference", PREFERENCES, PREFERRED, True),
        ("preference", PREFERENCES, {"prompt": "Open?", "chosen": "Yes.", "rejected": "No."}, False),
        ("grpo", PROMPTS, {"messages": AGAIN, "answer": "Yes."}, True),
        ("grpo", PROMPTS, {"prompt": "Open?", "answer": "Yes."}, False),
    ],
)
def test_only_conversations_need_it(
    task: str, forms: Any, row: dict[str, Any], is_chosen: bool, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [row])
    model = {"name_or_path": "base"}
    config = as_config({"task": task, "model": model, "data": {"dataset_name": str(data)}})
    for marks in (GEMMA, CHATML, LLAMA_3):
        tokenizer = base_tokenizer(*marks)
        changed = with_native_template(config, tokenizer, forms)
        expected = is_chosen and marks != LLAMA_3
        assert (changed.data.chat_template == "native") == (tokenizer.chat_template is not None) == expected
        assert with_native_template(changed, tokenizer, forms) == changed
    tokenizer.chat_template = "own"
    assert with_native_template(config, tokenizer, forms).data.chat_template is None


def test_it_is_refused_without_such_tokens(tmp_path: Path) -> None:
    base_tokenizer(*LLAMA_3).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"no special tokens for turns, such as <start_of_turn> or <\|im_start\|>"):
        load_tokenizer_of(ModelConfig(name_or_path=str(tmp_path)), "native")
