"""C++ files and functions obey the size limits that tests/test_layers.py checks for Python."""

import re
from collections.abc import Iterator

from sansgpu.kernels.c_functions import HEADER
from tests.test_layers import MAX_FILE_LINES, MAX_FUNCTION_LINES

SOURCES = [file for file in sorted(HEADER.parent.rglob("*")) if file.suffix in (".h", ".cpp")]
_NO_CODE = re.compile(r"//[^\n]*|^ *#(?:[^\n]*\\\n)*[^\n]*|\"(?:\\.|[^\"\n])*\"|'(?:\\.|[^'\n])'", re.MULTILINE)
_NO_FUNCTION = re.compile(r"(?:template <[^(]*>\s*)?(?:namespace|struct|class)\b[^(]*")


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yields the head of each function, lambda and loop, and its number of lines, including the head."""
    text = _NO_CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    begun = []
    for place, sign in enumerate(text):
        if sign == "{":
            head = text[max(text.rfind(end, 0, place) for end in ";{}") + 1 : place].lstrip()
            begun.append((head, place - len(head)))
        elif sign == "}":
            head, start = begun.pop()
            if not _NO_FUNCTION.fullmatch(head):
                yield head, text.count("\n", start, place) + 1
    assert not begun


def test_files_and_functions_of_cpp_fit_on_a_few_screens() -> None:
    long, seen = [], 0
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        long += [source.name] if text.count("\n") > MAX_FILE_LINES else []
        for head, lines in functions(text):
            seen += 1
            long += [f"{source.name}: {head}"] if lines > MAX_FUNCTION_LINES else []
    assert long == []
    assert len(SOURCES) > 30
    assert seen > 500


def test_long_functions_are_found_and_long_classes_are_not() -> None:
    body = '  if (x) {\n    y("{");  // {\n  }\n' * 20
    function = f"template <typename T>\nvoid f(T x) {{\n{body}}}\n"
    assert max(functions(f"struct S {{\n{function}}};\n{function}"), key=lambda found: found[1])[1] == 63
    assert not [head for head, _ in functions("namespace a {\nstruct S : B {\n  int x;\n};\n}\n")]
