"""Every error message says what to do, not only what is wrong."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "sansgpu"
ERRORS = {"ConfigError", "SansGPUError", "BadRowError", "LostRankError", "UnreachableError"}
REMEDY = re.compile(r"; |, or |must (be|have|name|not) |requires |: add |: start |^pass ")
INSERTED = "\0"  # stands for a value that is inserted into a message, which may be a sentence with its own remedy

# Messages that need no remedy, because the reader can do nothing.
WITHOUT = ("is lost: no heartbeat",)


def _text(node: ast.expr) -> str:
    """Returns the text of a message, with `INSERTED` in place of values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id=name)) if name.endswith("REMEDY"):
            return "; "
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body, orelse=other):
            return min(_text(body), _text(other), key=lambda text: bool(REMEDY.search(text)))
    return INSERTED


def _messages() -> list[tuple[str, str]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                found.append((f"{path.relative_to(SOURCE)}:{node.lineno}", _text(node.args[0])))
    return found


def _says_what_to_do(message: str) -> bool:
    ends_with_a_sentence = re.search(rf"(^|[:;,]?\s){INSERTED}+[.?]?$", message)
    return bool(REMEDY.search(message) or ends_with_a_sentence or any(text in message for text in WITHOUT))


def test_errors_say_what_to_do() -> None:
    messages = _messages()
    assert len(messages) > 500
    assert [f"{where} {text!r}" for where, text in messages if not _says_what_to_do(text)] == []


@pytest.mark.parametrize("message", ["the file cannot be read.", f"{INSERTED} has no tokens ({INSERTED})."])
def test_a_message_without_a_remedy_is_found(message: str) -> None:
    assert not _says_what_to_do(message)
