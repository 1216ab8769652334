"""Write the ops of head-wise and product-key memory as a package for Hugging Face's `kernels`.

    python scripts/build_kernels.py OUTPUT

OUTPUT gets `build/torch-BACKEND` for each backend, all with the same files: `midus_hf.ops` and what it imports, copied with relative
imports, and `layers.py`. `kernels.get_local_kernel(Path("OUTPUT"))` loads it; `kernels upload OUTPUT` would publish it.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from midus_hf import ops  # noqa: E402

PACKAGE = "midus_hf"
NAME = "midus-memory"
# Version of the functions' signatures, which users of the package ask for.
VERSION = 1
BACKENDS = ("cpu", "cuda", "rocm")
# Other files of `midus_hf.ops` that modules read. C files of all ops are compiled into one library.
DATA = ("*.json", "*.[ch]")
LAYERS = Path(__file__).with_name("kernel_layers.py")
# Name of the layers in the package, as if the file lay in `midus_hf`.
_LAYERS_MODULE = f"{PACKAGE}.layers"


def imported_modules(source: str) -> set[str]:
    """Return the modules of `midus_hf` that a module imports from, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == PACKAGE for alias in node.names):
            raise ValueError(f"line {node.lineno} has {ast.unparse(node)!r}; expected 'from {PACKAGE}... import ...'.")
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == PACKAGE:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {node.module, *(name for name in submodules if _is_module(name))}
    return modules


def _is_module(name: str) -> bool:
    parent = importlib.util.find_spec(name.rpartition(".")[0])
    return (
        parent is not None and bool(parent.submodule_search_locations) and importlib.util.find_spec(name) is not None
    )


def with_relative_imports(source: str, package: str) -> str:
    """Return a module's text, in which imports of `midus_hf` are relative."""
    return re.sub(
        rf"^(\s*from )({PACKAGE}[\w.]*)(?= import )",
        lambda match: match[1] + _relative(match[2], package),
        source,
        flags=re.MULTILINE,
    )


def _relative(module: str, package: str) -> str:
    """Return the relative name of a module, such as `..gather.reference`, for modules of a package."""
    target, here = module.split("."), package.split(".")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(target, here, strict=False)))
    return "." * (len(here) - shared + 1) + ".".join(target[shared:])


def package_files() -> dict[str, bytes]:
    """Return the files of the package, by their path in a folder of `build`."""
    sources = {_LAYERS_MODULE: LAYERS}
    waiting = [_LAYERS_MODULE, ops.__name__]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            sources[name] = Path(spec.origin)
        waiting += imported_modules(sources[name].read_text(encoding="utf-8")) - sources.keys()
    files = {}
    for name, path in sources.items():
        is_package = path.name == "__init__.py"
        text = with_relative_imports(path.read_text(encoding="utf-8"), name if is_package else name.rpartition(".")[0])
        files[_path_of(name, is_package)] = text.encode()
    for data in (file for pattern in DATA for file in sources[ops.__name__].parent.rglob(pattern)):
        files[data.relative_to(ROOT / PACKAGE).as_posix()] = data.read_bytes()
    names = sorted(ops.__all__)
    listed = "".join(f"    {name},\n" for name in names)
    exported = "".join(f'    "{name}",\n' for name in ["layers", *names])
    files["__init__.py"] = (
        f'"""Ops of head-wise and product-key memory."""\n\nfrom . import layers\nfrom .ops import (\n{listed})\n\n'
        f"__all__ = [\n{exported}]\n"
    ).encode()
    for folder in {parent for path in files for parent in Path(path).parents} - {Path()}:
        files.setdefault(f"{folder.as_posix()}/__init__.py", b"")
    return files


def _path_of(module: str, is_package: bool) -> str:
    path = module.removeprefix(PACKAGE).replace(".", "/").lstrip("/")
    return f"{path}/__init__.py" if is_package else f"{path}.py"


def build(output: Path) -> None:
    """Write the package into a folder, which appears whole or not at all."""
    if output.exists():
        raise ValueError(f"{output} exists; expected a folder that does not. Remove it, or choose another.")
    files = package_files()
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as workplace:
        made = Path(workplace) / "kernel"
        for backend in BACKENDS:
            metadata = {
                "name": NAME,
                "id": f"_{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:7]}",
                "version": VERSION,
                "license": "Apache-2.0",
                "python-depends": [],
                "backend": {"type": backend},
            }
            text = json.dumps(metadata, indent=2) + "\n"
            for path, content in {**files, "metadata.json": text.encode()}.items():
                file = made / "build" / f"torch-{backend}" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        made.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to write, which must not exist")
    try:
        build(parser.parse_args().output)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
