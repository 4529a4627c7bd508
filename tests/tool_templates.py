"""Chat templates that write tool calls in different forms."""

from __future__ import annotations

TURNS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}CALLS{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HERMES = TURNS.replace("CALLS", "{{ '\\n<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}")
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
