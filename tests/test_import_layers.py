"""Imports between the rooms of a package point one way, and no modules import one another in a circle."""

import sys
from pathlib import Path

import pytest

from scripts.imports import ROOT, files_of, imports_of, module_of

# Rooms of each package: folders, or a module for a small one. A room may import those before it.
ROOMS = {
    "upscalers": "request architecture checkpoint plan tensors methods upscaling record runs edits".split(),
    "midus_hf": "config anatomy files sources ops memories carried models data topics evaluation training look compare cli".split(),
}
# Rooms of `midus_hf` that may import `upscalers`, which may not import them.
ON_UPSCALERS = ("compare", "cli")


def rooms_imported(file: Path, package: str) -> set[str]:
    """Rooms of a package that a file imports."""
    names = (name.split(".") for name in imports_of(file))
    return {room for first, room, *_ in (name for name in names if len(name) > 1) if first == package}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_rooms_before_them(package):
    for folder in {file.parent for file in files_of(package)}:
        assert len(list(folder.glob("*.py"))) <= 18, folder
    rooms = ROOMS[package]
    assert {file.parent.name for file in (ROOT / package).glob("*/__init__.py")} <= set(rooms)
    for number, room in enumerate(rooms):
        module = ROOT / package / f"{room}.py"
        for file in [module] if module.exists() else files_of(f"{package}/{room}"):
            assert not rooms_imported(file, package) & set(rooms[number + 1 :]), file


def test_packages_import_one_another_one_way():
    for room in set(ROOMS["midus_hf"]) - set(ON_UPSCALERS):
        for file in files_of(f"midus_hf/{room}"):
            assert not any(name.partition(".")[0] == "upscalers" for name in imports_of(file)), file
    for file in files_of("upscalers"):
        assert not rooms_imported(file, "midus_hf") & set(ON_UPSCALERS), file


@pytest.mark.parametrize("package", ["upscalers", "midus_hf", "benchmarks", "demo", "material", "scripts"])
def test_modules_import_without_circles(package):
    files = {module_of(file): file for file in files_of(package)}
    graph = {name: imports_of(file) & set(files) - {name} for name, file in files.items()}
    while graph:
        free = {name for name, needed in graph.items() if not needed & set(graph)}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


def test_topics_import_only_what_they_need():
    rooms = {"topics", "data", "config", "files", "sources", "models"}
    for file in files_of("midus_hf/topics"):
        assert rooms_imported(file, "midus_hf") <= rooms, file
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "safetensors", "numpy", "midus_hf"}
    for name in ("memory_retriever", "tree"):  # for a user who builds no tree
        imported = imports_of(ROOT / "midus_hf" / "topics" / f"{name}.py")
        assert {name.split(".")[0] for name in imported} <= allowed, name
    for file in (file for package in ("demo", "material", "scripts") for file in files_of(package)):
        assert "midus_hf.topics.building" not in imports_of(file), file
