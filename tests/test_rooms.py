"""Imports between the rooms of `upscalers` point one way, and no modules import one another in a circle."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each may import those before it.
ROOMS = (
    "request",
    "architecture",
    "checkpoint",
    "plan",
    "tensors",
    "solvers",
    "methods",
    "record",
    "runs",
    "edits",
)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path, package: str, everywhere: bool) -> set[str]:
    """Modules of a package that a file imports; `everywhere` includes what is imported inside functions and for types."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else tree.body
    results = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            results |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names if alias.name.split(".")[0] == package}
    return results


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


# Rooms of `midus_hf`; each may import those before it.
ROOMS_OF_MODELS = (
    "config",
    "files",
    "ops",
    "banks",
    "memories",
    "carried",
    "models",
    "topics",
    "evaluation",
    "training",
    "look",
    "compare",
    "cli",
)

# Rooms of `midus_hf` that may import `upscalers`, which may not import them.
ON_UPSCALERS = ("compare", "cli")


@pytest.mark.parametrize("package", ["upscalers", "midus_hf"])
def test_a_folder_has_at_most_eighteen_files_side_by_side(package):
    for folder in {file.parent for file in files_of(package)}:
        assert len(list(folder.glob("*.py"))) <= 18, folder


def test_every_room_is_known():
    assert {file.parent.name for file in (ROOT / "upscalers").glob("*/*.py")} == set(ROOMS)
    assert {file.parent.name for file in (ROOT / "midus_hf").glob("*/__init__.py")} == set(ROOMS_OF_MODELS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_those_before_it_alone(room):
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for file in (ROOT / "upscalers" / room).glob("*.py"):
        for name in imports_of(file, "upscalers", everywhere=True):
            assert name.split(".")[1:2] == [] or name.split(".")[1] not in later, f"{file.name} imports {name}"


@pytest.mark.parametrize("room", ROOMS_OF_MODELS)
def test_a_room_of_models_imports_those_before_it_alone(room):
    later = set(ROOMS_OF_MODELS[ROOMS_OF_MODELS.index(room) + 1 :])
    files = list((ROOT / "midus_hf" / room).rglob("*.py"))
    assert files
    for file in files:
        for name in imports_of(file, "midus_hf", everywhere=True):
            assert name.split(".")[1:2] == [] or name.split(".")[1] not in later, f"{file.name} imports {name}"


@pytest.mark.parametrize("package", ["upscalers", "midus_hf", "benchmarks", "demo", "material", "scripts"])
def test_no_modules_import_one_another_in_a_circle(package):
    files = {module_of(file): file for file in files_of(package)}
    graph = {name: imports_of(file, package, everywhere=True) & set(files) - {name} for name, file in files.items()}
    while graph:
        free = {name for name, needed in graph.items() if not needed & set(graph)}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


def test_rooms_of_models_and_upscalers_import_one_another_one_way():
    for room in ROOMS_OF_MODELS:
        for file in files_of(f"midus_hf/{room}"):
            assert room in ON_UPSCALERS or not imports_of(file, "upscalers", everywhere=True), (
                f"{file} imports upscalers"
            )
    for file in files_of("upscalers"):
        for name in imports_of(file, "midus_hf", everywhere=True):
            assert name.split(".")[1:2] == [] or name.split(".")[1] not in ON_UPSCALERS, f"{file} imports {name}"


def test_topics_import_their_own_room_and_what_reads_and_writes_files_alone():
    rooms = ("topics", "config", "files", "saved_models", "model_names", "library_bars")
    for file in files_of("midus_hf/topics"):
        for name in imports_of(file, "midus_hf", everywhere=True):
            assert name.split(".")[1] in rooms, f"{file.name} imports {name}"


# What finds the path of a text, which a user needs who builds no tree.
RETRIEVAL = ("embedding", "memory_retriever", "tree")


def test_retrieval_needs_what_the_core_needs():
    allowed = {
        *sys.stdlib_module_names,
        "torch",
        "transformers",
        "safetensors",
        "numpy",
        "midus_hf",
        "midus_hf.config",
    }
    for file in (ROOT / "midus_hf" / "topics" / f"{name}.py" for name in RETRIEVAL):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in named} <= allowed, f"{file.name} imports {named}"


@pytest.mark.parametrize("package", ["demo", "material", "scripts"])
def test_nobody_but_commands_and_benchmarks_builds_trees(package):
    for file in files_of(package):
        assert not any(
            name.startswith("midus_hf.topics.building") for name in imports_of(file, "midus_hf", everywhere=True)
        ), f"{file} builds trees"
