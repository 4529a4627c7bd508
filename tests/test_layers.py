"""Packages import only lower layers, few files may print or read the environment, and files and functions are short."""

import ast
import builtins
import importlib
import importlib.util
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from sansgpu.config.schema import Config
from sansgpu.config.section import all_keys
from sansgpu.models import families
from sansgpu.tasks.configuration import SCHEMA, TASK_FOLDERS
from tests.processes import environment, options, settings, write_corpus

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sansgpu"
FLOORS = [
    {"cli", "api"},
    {"studio"},
    {"jobs"},
    {"views"},
    {"planning"},
    {"train"},
    {"tasks"},
    {"data", "models"},
    {"kernels"},
    {"machine"},
    {"events"},
    {"files"},
    {"config"},
]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_FILES = 400, 60, 7, 22
MAX_MODULES_OF_A_RUN = 214  # modules of sansgpu that a run in task pretrain has loaded at its end, reports included
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# The families that other files may name, because they are names of something else, too.
NAMED_FAMILIES = {
    "models/architectures.py": {"gpt2", "llama", "qwen3", "apertus", "qwen3_5_text"},  # are trained from scratch
    "config/remedies.py": {"mamba"},  # starts keys of other programs' configurations
    "models/formats/gguf_tokenizer.py": {"gpt2", "llama"},  # llama.cpp's kinds of tokenizers
    "tasks/graph/folder.py": {"bert"},  # is what task graph exports
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}


@dataclass(frozen=True, eq=False)
class Module:
    """A module of the package: its dotted name, file and syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @property
    def room(self) -> str:
        return room_of(self.name)


class Import(NamedTuple):
    """One imported name: where an import statement finds it, and the module that defines it."""

    local: str
    source: str
    origin: str


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def modules() -> list[Module]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if room_of(name) in FLOOR:
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found


@cache
def imports(module: Module) -> list[Import]:
    """Returns all imports of a module, including those in functions and those for type checkers."""
    found = []
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                whole = alias.name if alias.asname else local
                found.append(Import(local, whole, alias.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}: imports are absolute"
            for alias in node.names:
                source = f"{node.module}.{alias.name}"
                origin = origin_of(node.module or "", alias.name)
                found.append(Import(alias.asname or alias.name, source, origin))
    return found


def origin_of(module: str, name: str) -> str:
    """Returns the module that defines `name`, which `module` may re-export. Resolves only sansgpu's own modules."""
    if module.partition(".")[0] != "sansgpu":
        return module
    try:
        value = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("sansgpu"):
            raise
        return module  # it needs a package that is not installed
    if value is None:
        submodule = importlib.util.find_spec(f"{module}.{name}")
        assert submodule is not None, f"{module} has no {name}"
        return submodule.name
    if isinstance(value, ModuleType):
        return value.__name__
    defined = getattr(value, "__module__", None)
    return defined if isinstance(defined, str) and defined.startswith("sansgpu.") else module


def used_names(module: Module, called: bool = False) -> Iterator[str]:
    """Yields the dotted names that a module uses, or only those it calls, resolved through the module's imports."""
    known = {found.local: found.source for found in imports(module)}
    for node in module.nodes:
        if called and not isinstance(node, ast.Call):
            continue
        node = node.func if isinstance(node, ast.Call) else node
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            root = known.get(node.id, f"builtins.{node.id}" if hasattr(builtins, node.id) else node.id)
            yield ".".join([root, *parts])


def test_packages_import_only_lower_layers() -> None:
    """Imports in functions, for type checkers and by importlib count, too."""
    seen = 0
    for module in modules():
        names = {*imported_names(module), *(found.origin for found in imports(module))}
        for name in names:
            if name.startswith("sansgpu.") and (other := room_of(name)) in FLOOR:
                seen += 1
                assert other == module.room or FLOOR[other] > FLOOR[module.room], f"{module.name}: {name}"
    assert seen > 500


def test_the_configuration_declares_only_keys_of_several_tasks() -> None:
    """A key of one task is declared in its folder, or by the part of data or models that has it."""
    acting = {key: {settings.task for settings in SCHEMA.tasks.with_key(key)} for key, _ in all_keys(Config)}
    assert [key for key, tasks in acting.items() if len(tasks) < 2] == []
    assert len(acting) < len([*all_keys(SCHEMA)]) - 60


def test_users_find_the_keys_of_all_tasks_in_sansgpu_config() -> None:
    """Inside the package, that would be an import upwards; its modules import the sections of `config` themselves."""
    program = (
        "from sansgpu.config import Config, DataConfig, ModelConfig, TrainingConfig, load_config;"
        "config = Config(task='embed', model=ModelConfig(name_or_path='base', pooling='cls'),"
        "data=DataConfig(dataset_name='rows', score_scale=5), training=TrainingConfig(embedding_loss='cosine'));"
        "print(config.data.score_scale, config.training.embedding_loss, type(load_config()[0]) is Config)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "5.0 cosine True\n"
    doors = {"Config", "DataConfig", "ModelConfig", "TrainingConfig", "load_config"}
    found = [name for module in modules() for name in imports(module) if name.source.startswith("sansgpu.config.")]
    assert [name for name in found if name.source.removeprefix("sansgpu.config.") in doors] == []


def test_a_new_task_needs_no_change_of_other_files() -> None:
    """The newest task is named only in its folder and in the table of tasks."""
    naming = [module.path for module in modules() if "grpo" in module.path.read_text(encoding="utf-8").lower()]
    others = {str(path.relative_to(SOURCE)) for path in naming if path.parent.name != "grpo"}
    assert others == {"tasks/configuration.py"}


def test_a_task_imports_only_the_tasks_that_the_table_names() -> None:
    for module in modules():
        if module.room == "tasks":
            task = folder_of(module.name)
            others = {folder_of(found.source) for found in imports(module)} - {"", task}
            assert others <= set(TASK_FOLDERS.get(task, ())), module.name


def folder_of(module: str) -> str:
    """Returns the task in whose folder a module is, or an empty string."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["sansgpu", "tasks"] and len(parts) > 3 and parts[2] in TASK_FOLDERS else ""


def test_there_are_no_circular_imports() -> None:
    """Imports in functions and imports for type checkers count, too."""
    names = {module.name for module in modules()}
    graph = {}
    for module in modules():
        sources = [found.source for found in imports(module)]
        needed = {source if source in names else source.rpartition(".")[0] for source in sources}
        graph[module.name] = (needed & names) - {module.name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_folders_import_each_other_in_one_direction() -> None:
    """Imports in functions, for type checkers and by importlib count, too."""
    needed: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        folder = home_of(module.name)
        for other in {home_of(name) for name in imported_names(module)} - {"", folder}:
            needed[folder].add(other)
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def imported_names(module: Module) -> Iterator[str]:
    """Yields the dotted names that a module imports, with statements or by importlib."""
    for found in imports(module):
        yield found.source
    for node in module.nodes:
        if isinstance(node, ast.Call) and node.args and "import_module" in vars(node.func).values():
            given = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(given, ast.Constant):
                yield str(given.value).rstrip(".")


def home_of(name: str) -> str:
    """Returns the folder in which a module or a name in it is; an empty string for other packages and the top one."""
    parts = name.split(".")[1:] if name.startswith("sansgpu.") else []
    while parts and not SOURCE.joinpath(*parts).is_dir():
        parts.pop()
    return "/".join(parts)


def test_no_other_file_names_a_family_of_models() -> None:
    """Rules for a family are in its file."""
    named = {family.model_type for family in families.every()}
    for module in modules():
        if module.name.startswith("sansgpu.models.families."):
            continue
        texts = {node.value for node in module.nodes if isinstance(node, ast.Constant) and node.value in named}
        assert texts <= NAMED_FAMILIES.get(str(module.path.relative_to(SOURCE)), set()), module.path


def test_families_and_tasks_are_found_without_what_they_do_not_need() -> None:
    """`sansgpu generate` and `chat` load all tasks to find the model's; torchmetrics would import scipy."""
    program = (
        "import sys; from sansgpu.models import families; families.find('deberta-v2');"
        "print('transformers' in sys.modules, [n for n in sys.modules if n.startswith(families.__name__ + '.')]);"
        "from sansgpu.tasks.registry import TASKS; list(TASKS.values()); print('torchmetrics' in sys.modules)"
    )
    family, tasks = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert family == "False ['sansgpu.models.families.deberta_v2']"
    assert tasks == "False"


def test_no_two_classes_share_a_name() -> None:
    found = defaultdict(list)
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{module.name}.{node.name}")
    assert [names for names in found.values() if len(names) > 1] == []


def test_files_and_functions_fit_on_a_few_screens() -> None:
    sizes = {}
    for module in modules():
        sizes[module.name] = len(module.path.read_text(encoding="utf-8").splitlines()) / MAX_FILE_LINES
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                sizes[f"{module.name}.{node.name}"] = lines / MAX_FUNCTION_LINES
    assert [name for name, size in sizes.items() if size > 1] == []


def test_folders_contain_few_files() -> None:
    """`families` has a file for each family of models, so that adding one touches no other file."""
    roots = (SOURCE, ROOT / "benchmarks", ROOT / "tools")
    folders = {path.parent for root in roots for path in root.rglob("*.py")}
    assert [folder.name for folder in folders if len(list(folder.glob("*.py"))) > MAX_FILES] == ["families"]


def test_functions_have_few_parameters() -> None:
    """Transformers dictates the signature of attention_forward; the others are used once each."""
    found = set()
    for module in modules():
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([one for one in given if one.arg not in ("self", "cls")]) > MAX_PARAMETERS:
                    found.add(node.name)
    assert found <= {"attention_forward", "compute_reference", "_add"}


def test_only_one_file_prints_and_only_one_creates_consoles() -> None:
    """Both files escape control characters, whatever the source of a text."""
    doors = {"builtins.print": "cli/options.py", "rich.console.Console": "views/terminal.py"}
    for module in modules():
        for name in {*used_names(module, called=True)} & doors.keys():
            assert str(module.path.relative_to(SOURCE)) == doors[name], f"{module.path} calls {name}"


def test_only_one_file_expands_home_folders() -> None:
    """That file reports a home folder that does not exist; pathlib raises a RuntimeError."""
    names = ("expanduser", "Path.home")
    found = {m.path.relative_to(SOURCE).as_posix() for m in modules() if any(n in m.path.read_text() for n in names)}
    assert found == {"config/paths.py"}


def test_only_machine_reads_the_environment() -> None:
    for module in modules():
        reads = {name for name in used_names(module) for read in ENVIRONMENT if f"{name}.".startswith(f"{read}.")}
        assert not reads or module.room == "machine", f"{module.path} reads the environment"


def test_the_configuration_imports_no_torch() -> None:
    for module in modules():
        if module.room == "config" or module.name.endswith(".settings"):
            assert not [found for found in imports(module) if found.source.partition(".")[0] == "torch"], module.path
    program = "import sys, sansgpu.config as c; c.load_config(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_there_are_no_utility_modules() -> None:
    assert not list(SOURCE.rglob("util*.py"))


def test_every_key_of_the_schema_is_read_somewhere() -> None:
    nodes = [node for module in modules() for node in module.nodes]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {variant.key.rpartition(".")[2] for found in SCHEMA.tasks.kinds.values() for variant in found.variants}
    gets = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "get"]
    read |= {argument.value for node in gets for argument in node.args if isinstance(argument, ast.Constant)}
    assert [key for key, _ in all_keys(SCHEMA) if key.rpartition(".")[2] not in read] == []


def loaded(arguments: list[str], heavy: set[str], cache: Path) -> tuple[str, list[str]]:
    """Runs a command; returns its exit code with the `heavy` modules that it imported, and the names of all modules."""
    program = (
        f"import sys; from sansgpu.cli import run; code = run({arguments!r});"
        f"print(code, sorted(set({sorted(heavy)!r}) & set(sys.modules))); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment(cache)
    )
    *_, found, names = done.stdout.splitlines()
    return found, names.split()


def test_help_imports_no_heavy_packages(tmp_path: Path) -> None:
    assert loaded(["--help"], {"torch", "pydantic", "transformers", "datasets", "numpy"}, tmp_path)[0] == "0 []"


def test_a_run_imports_no_modules_that_it_does_not_need(tmp_path: Path) -> None:
    """Importing any of these packages takes half a second to three seconds at every start."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=20)
    chosen = settings(data__dataset_name=corpus, training__max_steps=1)
    heavy = {"transformers", "datasets", "peft", "sympy", "torch._dynamo", "torch.distributed.tensor"}
    found, names = loaded(["train", *chosen, "--output-dir", str(tmp_path / "r")], heavy, tmp_path / "cache")
    assert found == "0 []"
    assert len([name for name in names if name.partition(".")[0] == "sansgpu"]) <= MAX_MODULES_OF_A_RUN


@pytest.mark.parametrize(
    ("command", "task"),
    [
        ("train", "classify"),
        ("plan", "graph"),
        *(pytest.param("train", task, marks=pytest.mark.long) for task in ("tokens", "graph", "embed", "static")),
        *(pytest.param(command, "classify", marks=pytest.mark.long) for command in ("plan", "bench", "tune")),
    ],
)
def test_a_table_whose_columns_are_unclear_is_refused_before_torch_is_loaded(
    tmp_path: Path, command: str, task: str
) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text("1\ta good film\tpos\n2\ta bad film\tneg\n")
    chosen = {"task": task, "data.dataset_name": table} | ({} if task == "graph" else {"model.name_or_path": "x"})
    assert loaded([command, *options(chosen)], {"torch"}, tmp_path / "cache")[0] == "2 []"
