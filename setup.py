"""Adds to a wheel what a C compiler makes of the ops, where there is one; everything else is said in `pyproject.toml`."""

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OPS = Path(__file__).parent / "midus_hf" / "ops"
FLAGS = runpy.run_path(str(OPS / "native_flags.py"))


class BuildLibraries(build_ext):
    """A library for each set of instructions, which ctypes loads. Where it cannot be built, it is left for its first use."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:  # the source may change, and is compiled when it is used
            return
        compiler = (
            shlex.split(os.environ.get("CC", "")) or [name for name in FLAGS["COMPILERS"] if shutil.which(name)][:1]
        )
        texts = [runpy.run_path(str(OPS / f"{module}.py"))[name] for module, name in FLAGS["PARTS"].items()]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "native.c"
            source.write_text("".join(texts), encoding="utf-8")
            for extension in self.extensions:
                self._build(compiler, source, extension.name)

    def _build(self, compiler: list[str], source: Path, name: str) -> None:
        library = Path(self.get_ext_fullpath(name))
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = (*FLAGS["FLAGS"], *FLAGS["VARIANTS"][name.rpartition("_")[2]])
        try:
            subprocess.run([*compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
        except (OSError, ValueError, IndexError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            self.warn(f"{name} was not built ({error}); it will be at first use, or PyTorch computes in its place")

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


variants = FLAGS["VARIANTS"] if platform.machine().lower() in FLAGS["X86"] else ["baseline"]
setup(
    ext_modules=[Extension(f"midus_hf.ops.native_{name}", sources=[], optional=True) for name in variants],
    cmdclass={"build_ext": BuildLibraries},
)
