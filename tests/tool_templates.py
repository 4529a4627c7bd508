"""Chat templates that write tool calls in different forms, in the style of well-known model families."""

from __future__ import annotations

TURNS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}CALLS{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def between_all(opening: str, call: str, separator: str, closing: str) -> str:
    """Returns a template that writes one section with all calls of an answer."""
    return TURNS.replace(
        "CALLS",
        f"{{{{ {opening!r} if loop.first else {separator!r} }}}}{call}{{{{ {closing!r} if loop.last else '' }}}}",
    )


def around_each(opening: str, call: str, closing: str) -> str:
    """Returns a template that writes a section for each call."""
    return TURNS.replace("CALLS", f"{{{{ {opening!r} }}}}{call}{{{{ {closing!r} }}}}")


JSON_CALL = "{{ c.function | tojson }}"
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


def each_argument(before: str, between: str, after: str) -> str:
    """Returns the part of a template that writes arguments between texts, where only strings are not JSON."""
    return (
        "{% for k, v in c.function.arguments.items() %}"
        f"{{{{ {before!r} + k + {between!r} + (v if v is string else v | tojson) + {after!r} }}}}{{% endfor %}}"
    )


PYTHON = (
    NAME
    + "({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)
BARE_KEYS = (
    "{% macro bare(v) %}{% if v is string %}<escape>{{ v }}<escape>"
    "{% elif v is mapping %}{{ '{' }}{% for k, one in v.items() %}{{ k }}:{{ bare(one) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for one in v %}{{ bare(one) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)

HERMES = around_each("\n<tool_call>\n", JSON_CALL, "\n</tool_call>")
LLAMA = TURNS.replace(
    "CALLS",
    """{{ '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}""",
)
# The special token [CLS] has the role of Mistral's [TOOL_CALLS].
MISTRAL = TURNS.replace(
    "CALLS",
    "{% if loop.first %}{{ '[CLS][' }}{% endif %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids must have nine characters') }}{% endif %}"
    """{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{ ']' if loop.last else ', ' }}""",
)
XML = NAME + ">\n" + each_argument("<parameter=", ">\n", "\n</parameter>\n")
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>"
FAMILIES = {
    "hermes, qwen2.5, qwen3, smollm3": HERMES,
    "llama 3": LLAMA,
    "mistral": MISTRAL,
    "mistral small 3.2": around_each("[TOOL_CALLS]", NAME + "[ARGS]" + JSON, ""),
    "qwen3-coder, qwen3.5, nemotron 3": around_each("\n<tool_call>\n<function=", XML, "</function>\n</tool_call>"),
    "seed-oss": around_each("\n<seed:tool_call>\n<function=", XML, "</function>\n</seed:tool_call>"),
    "glm-4.5": around_each(
        "\n<tool_call>",
        NAME + each_argument("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        "\n</tool_call>",
    ),
    "minimax-m2": between_all(
        '\n<minimax:tool_call>\n<invoke name="',
        NAME + '">' + each_argument('\n<parameter name="', '">', "</parameter>") + "\n</invoke>",
        '\n<invoke name="',
        "\n</minimax:tool_call>",
    ),
    "gpt-oss": around_each(" to=functions.", NAME + "<|channel|>commentary json<|message|>" + JSON, "<|call|>"),
    "functiongemma": BARE_KEYS
    + around_each("<start_function_call>call:", NAME + "{{ bare(c.function.arguments) }}", "<end_function_call>"),
    "gemma 4": BARE_KEYS.replace("<escape>", '<|"|>')
    + around_each("<|tool_call>call:", NAME + "{{ bare(c.function.arguments) }}", "<tool_call|>"),
    "granite": between_all("<|tool_call|>[", JSON_CALL, ", ", "]"),
    "deepseek-v3": between_all(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "{{ c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": between_all(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        NAME + "<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi k2": between_all(
        SECTION,
        "{{ c.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
        "<|tool_call_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "phi-4-mini": between_all("<|tool_call|>[", JSON_CALL, ", ", "]<|/tool_call|>"),
    "command r": between_all(
        "Action: ```json\n[\n    ",
        '{\n        "tool_name": "{{ c.function.name }}",\n        "parameters": ' + JSON + "\n    }",
        ",\n    ",
        "\n]```",
    ),
    "command r7b": between_all(
        "<|START_ACTION|>[\n    ",
        """{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": """ + JSON + "}",
        ",\n    ",
        "\n]<|END_ACTION|>",
    ),
    "llama 4": between_all("[", PYTHON, ", ", "]"),
    "lfm2": between_all("<|tool_call_start|>[", PYTHON, ", ", "]<|tool_call_end|>"),
    "olmo 3": between_all("<function_calls>\n", PYTHON, "\n", "\n</function_calls>"),
    "xlam": between_all("[", JSON_CALL, ", ", "]"),
    "hunyuan": between_all(
        "<tool_calls>\n<tool_call>",
        NAME + "\n```json\n" + JSON + "\n```\n</tool_call>",
        "\n<tool_call>",
        "\n</tool_calls>",
    ),
}
# Special tokens in these templates, which decoding drops unless they are kept for a reader of calls.
MARKS = [
    "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|tool_call|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_calls_section_begin|>",
]  # fmt: skip
