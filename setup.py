"""Adds to a wheel what a C compiler makes of the ops, where there is one; everything else is said in `pyproject.toml`."""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = runpy.run_path(str(Path(__file__).parent / "midus_hf" / "ops" / "dispatch" / "build.py"))


class WheelOfEveryPython(bdist_wheel):
    """A wheel for one platform and every Python: ctypes loads the libraries, which know nothing of an interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class BuildLibraries(build_ext):
    """A library for each set of instructions, which ctypes loads. Where it cannot be built, it is left for its first use."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:  # the source may change, and is compiled when it is used
            return
        for extension in self.extensions:
            library = Path(self.get_ext_fullpath(extension.name))
            library.parent.mkdir(parents=True, exist_ok=True)
            try:
                NATIVE["compile_library"](library, variant=extension.name.rpartition("_")[2])
            except NATIVE["NotBuilt"] as reason:
                library.unlink(missing_ok=True)
                self.warn(f"{library.name} is not in the wheel, since {reason}; it will be built at first use")

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


variants = NATIVE["VARIANTS"] if platform.machine().lower() in NATIVE["X86"] else ["baseline"]
setup(
    ext_modules=[Extension(f"midus_hf.ops.dispatch.native_{name}", sources=[], optional=True) for name in variants],
    cmdclass={"bdist_wheel": WheelOfEveryPython, "build_ext": BuildLibraries},
)
