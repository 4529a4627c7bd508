"""The house stands: imports point downwards, and each room keeps to its own."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sansgpu.config.load import describe
from tests.processes import environment, settings, write_corpus

SOURCE = Path(__file__).parent.parent / "src" / "sansgpu"
FLOORS = [
    {"cli", "api"},
    {"jobs"},
    {"planning"},
    {"train"},
    {"tasks"},
    {"data", "models"},
    {"kernels"},
    {"machine", "reporting"},
    {"config"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in FLOOR:
            yield path, room, ast.parse(path.read_text(encoding="utf-8"))


def imported_rooms(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):  # function-local imports included
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = (
                [node.module or ""] if (node.module or "") != "sansgpu" else [f"sansgpu.{a.name}" for a in node.names]
            )
        for name in names:
            parts = name.split(".")
            if parts[0] == "sansgpu" and len(parts) > 1 and parts[1] in FLOOR:
                yield parts[1]


def test_imports_point_downwards_only_and_siblings_never() -> None:
    seen = 0
    for path, room, tree in modules():
        for other in imported_rooms(tree):
            seen += 1
            assert other == room or FLOOR[other] > FLOOR[room], f"{path.name} of {room} imports {other}"
    assert seen > 50


def test_one_file_prints_and_one_makes_consoles() -> None:
    """Both write control characters out, wherever a text comes from."""
    doors = {"print": "cli/options.py", "Console": "reporting/terminal.py"}
    for path, _, tree in modules():
        calls = {getattr(n.func, "id", "") for n in ast.walk(tree) if isinstance(n, ast.Call)}
        for name in calls & doors.keys():
            assert str(path.relative_to(SOURCE)) == doors[name], f"{path} calls {name}"


def test_only_machine_reads_the_environment() -> None:
    for path, room, tree in modules():
        reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert not reads or room == "machine", f"{path} reads the environment"


def test_there_is_no_room_for_odds_and_ends() -> None:
    assert not list(SOURCE.rglob("util*.py"))


def test_every_key_of_the_schema_is_read_somewhere() -> None:
    read = {n.attr for _, _, tree in modules() for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert [key for key, _, _ in describe() if key.rpartition(".")[2] not in read] == []


def loaded(arguments: list[str], heavy: set[str], cache: Path) -> str:
    """The exit code of a command, and which of the `heavy` modules it has imported."""
    program = (
        f"import sys; from sansgpu.cli import run; code = run({arguments!r});"
        f"print(code, sorted(set({sorted(heavy)!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment(cache)
    )
    return done.stdout.splitlines()[-1]


def test_help_loads_nothing_of_weight(tmp_path: Path) -> None:
    assert loaded(["--help"], {"torch", "pydantic", "transformers", "datasets", "numpy"}, tmp_path) == "0 []"


def test_a_run_loads_nothing_of_weight_that_it_does_not_need(tmp_path: Path) -> None:
    """Each of these takes half a second to three, at every start."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=20)
    chosen = settings(data__dataset_name=corpus, training__max_steps=1)
    heavy = {"transformers", "datasets", "peft", "sympy", "torch._dynamo", "torch.distributed.tensor"}
    assert loaded(["train", *chosen, "--output-dir", str(tmp_path / "r")], heavy, tmp_path / "cache") == "0 []"
