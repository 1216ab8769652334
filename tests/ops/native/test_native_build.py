"""The library of compiled ops: found, built, or missing with one warning."""

import multiprocessing
import os
import platform
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from processes.warm import run_warm

from midus_hf.ops import headwise_memory
from midus_hf.ops.dispatch import build, library
from midus_hf.ops.dispatch.build import CACHE_VARIABLE, VARIANTS, NotBuilt, built_library
from midus_hf.ops.dispatch.library import variant

SOURCES = build._SOURCES


@pytest.fixture
def unloaded(monkeypatch):
    """As in a process that has not looked for the library yet."""
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_missing", None)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A folder for libraries that is empty, or rather, not there."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "new" / "libraries"))
    return tmp_path / "new" / "libraries"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a shell script in the place of the compiler; `$out` is the file that it is to write."""

    def install(script: str) -> Path:
        path = tmp_path / "compiler"
        parts = (
            "#!/bin/sh",
            'case " $* " in *" --version "*) echo "compiler 1"; exit;; esac',
            'while [ "$1" != -o ]; do shift; done; out=$2',
            f"echo run >> '{tmp_path}/runs'",
            script,
        )
        path.write_text("\n".join(parts) + "\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return tmp_path / "runs"

    return install


def memory(**options):
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 2, 8), (2, 6, 4), (2, 6, 4), (36, 5))
    arguments = [torch.randn(shape, generator=generator) for shape in shapes]
    return headwise_memory(*arguments, None, 3, **options)


def test_library_is_built_once(cache, compiler):
    runs = compiler('echo code > "$out"')
    path = built_library("baseline")
    assert path == built_library("baseline")
    assert path.parent == cache
    assert runs.read_text().splitlines() == ["run"]
    assert path.read_bytes().startswith(b"code\n")
    assert list(cache.iterdir()) == [path]
    assert cache.stat().st_mode & 0o077 == 0


def test_library_name_depends_on_all_inputs(cache, compiler, monkeypatch, tmp_path):
    compiler('echo code > "$out"')
    paths = [built_library(variant) for variant in VARIANTS]
    sources = shutil.copytree(SOURCES, tmp_path / "sources")
    with monkeypatch.context() as changed:
        changed.setattr(build, "_SOURCES", sources)
        assert built_library("baseline") == paths[-1]  # wherever they lie
        for name in ("gather/native.c", "dispatch/vectors.h"):
            with (sources / name).open("a") as file:
                file.write("\n")
            paths.append(built_library("baseline"))
    with monkeypatch.context() as changed:
        changed.setattr(platform, "machine", lambda: "abacus")
        paths.append(built_library("baseline"))
    with monkeypatch.context() as changed:
        changed.setenv("CC", os.environ["CC"] + " -g")
        paths.append(built_library("baseline"))
    path = Path(os.environ["CC"])
    path.write_text(path.read_text().replace("compiler 1", "compiler 2"))
    paths.append(built_library("baseline"))
    assert len(set(paths)) == len(paths) == 8


def test_concurrent_builds_all_get_a_complete_library(cache, compiler):
    runs = compiler('echo half > "$out"; sleep 0.3; echo rest >> "$out"')
    fork = multiprocessing.get_context("fork")
    together, result = fork.Barrier(3), fork.SimpleQueue()

    def build():
        together.wait(30)
        result.put((str(built_library("baseline")), built_library("baseline").read_bytes()))

    processes = [fork.Process(target=build) for _ in range(3)]
    for process in processes:
        process.start()
    results = [result.get() for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert len(set(results)) == 1
    assert results[0][1].startswith(b"half\nrest\n")
    assert len(runs.read_text().splitlines()) == 3
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("echo 'native.c:1: error: no such instruction' >&2; exit 1", r"compiler failed \(native.c:1: error: no such instruction\)"),
        ("exit 3", r"compiler failed \(status 3\); install gcc or clang, or set CC"),
        ({"CC": "no-such-compiler -m32"}, "CC is 'no-such-compiler', which is not there; install gcc or clang"),
        ({"CC": "gcc '"}, r"CC is \"gcc '\" \(No closing quotation\); install gcc or clang, or set CC"),
        ({"CC": None, "PATH": "/nowhere"}, "there is no C compiler; install gcc or clang"),
        ({CACHE_VARIABLE: f"{__file__}/libraries"}, rf"written \(Not a directory\); set {CACHE_VARIABLE} to a folder that can"),
        (b"\x7fELF of another machine", r"compiler does not run \(OSError\); install gcc or clang, or set CC"),
    ],
    ids=["says-why", "silent", "missing", "unquoted", "none", "folder", "broken"],
)  # fmt: skip
def test_failed_build_is_reported(change, reason, cache, compiler, monkeypatch, tmp_path):
    compiler(change if isinstance(change, str) else 'echo code > "$out"')
    if isinstance(change, bytes):
        (tmp_path / "compiler").write_bytes(change)
    for name, value in change.items() if isinstance(change, dict) else ():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(NotBuilt, match=reason):
        built_library("baseline")
    assert not cache.exists() or list(cache.iterdir()) == []


def test_first_compiler_on_the_path_is_used(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang", "gcc", "cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert build._compiler() == [name]
    monkeypatch.setenv("CC", "gcc -m64")
    assert build._compiler() == ["gcc", "-m64"]


def test_library_folder_is_the_user_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._folder() == tmp_path / "midus_hf" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert build._folder() == tmp_path / ".cache" / "midus_hf" / "native"
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    with pytest.raises(NotBuilt, match=f"there is no home folder for it; set {CACHE_VARIABLE} to a folder"):
        build._folder()


@pytest.mark.parametrize(
    "capability, machine, expected",
    [("AVX512", "x86_64", "avx512"), ("AVX2", "AMD64", "avx2"), ("SVE256", "aarch64", "baseline")],
)
def test_instruction_set_is_that_of_pytorch(capability, machine, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert variant() == expected


@pytest.mark.usefixtures("unloaded", "cache")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", r"compiler failed \(status 1\); install gcc or clang, or set CC"),
        ('echo "no library at all" > "$out"', rf"it does not load \(.*\); set {CACHE_VARIABLE} to another folder"),
        (None, "there are no C files in .*; install midus_hf again"),
    ],
    ids=["compiler", "library", "sources"],
)
def test_missing_library_warns_once_and_pytorch_computes(script, reason, compiler, monkeypatch, tmp_path):
    compiler(script or "exit 1")
    if script is None:
        monkeypatch.setattr(build, "_SOURCES", tmp_path / "none")
    message = rf"computed by PyTorch on this CPU, .* two to seven times .*{reason}, or set {CACHE_VARIABLE}=off to do without"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        assert torch.equal(memory(), memory())
    assert len(warned) == 1
    assert torch.equal(memory(), memory(backend="torch"))
    with pytest.raises(ValueError, match=f"backend is 'native', but .*{reason}, or choose 'torch'"):
        memory(backend="native")


@pytest.mark.usefixtures("unloaded")
def test_library_can_be_switched_off_silently(monkeypatch, compiler):
    runs = compiler("exit 1")
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(memory(), memory(backend="torch"))
    with pytest.raises(ValueError, match=f"'native', but {CACHE_VARIABLE} is off; unset it, or choose 'torch'"):
        memory(backend="native")
    assert not runs.exists()


@pytest.mark.usefixtures("unloaded")
def test_tracing_a_graph_builds_nothing(cache, compiler):
    runs = compiler("exit 1")
    seen = []

    def look(graph, inputs):
        seen.append(runs.exists())
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: headwise_memory(*tensors, None, 3), fullgraph=True, backend=look)
    arguments = [torch.randn(shape) for shape in ((4, 2, 8), (2, 6, 4), (2, 6, 4), (36, 5))]
    with pytest.warns(RuntimeWarning, match="memory is computed by PyTorch"):
        output = compiled(*arguments)
    torch._dynamo.reset()
    assert seen == [False]
    assert runs.exists()
    assert torch.equal(output, headwise_memory(*arguments, None, 3, backend="torch"))


@pytest.mark.usefixtures("unloaded")
def test_packaged_library_comes_first(cache, compiler, monkeypatch, tmp_path):
    runs = compiler('echo code > "$out"')
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr(library, "_open", lambda path: path)
    assert library.native_library().parent == cache
    assert runs.exists()
    monkeypatch.setattr(library, "_library", None)
    (tmp_path / f"native_{variant()}.so").write_text("")
    assert library.native_library() == tmp_path / f"native_{variant()}.so"


def test_import_builds_nothing(tmp_path):
    code = (
        "import warnings; warnings.simplefilter('error', RuntimeWarning)\n"
        "import midus_hf.models.families, midus_hf.ops.dispatch.library as n\n"
        "assert n._library is n._missing is None"
    )
    done = run_warm(code, **{CACHE_VARIABLE: str(tmp_path / "none"), "CC": "no-such-compiler"})
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "none").exists()
