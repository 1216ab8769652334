"""Build the compiled bodies of ops by a C compiler, into a folder of the user: whole, or not there at all."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from midus_hf.ops.native_base_c import BASE
from midus_hf.ops.native_depth_c import DEPTH
from midus_hf.ops.native_flags import COMPILERS, FLAGS, VARIANTS, X86
from midus_hf.ops.native_gradients_c import GRADIENTS
from midus_hf.ops.native_lookup_c import LOOKUP
from midus_hf.ops.native_products_c import PRODUCTS
from midus_hf.ops.native_sums_c import SUMS

SOURCE = BASE + PRODUCTS + LOOKUP + GRADIENTS + SUMS + DEPTH
"""All of it, as one file of C."""

CACHE_VARIABLE = "MIDUS_NATIVE_CACHE"
"""Names the folder of libraries in the environment, or says `off`."""

_SECONDS = 120
_DIGEST_BYTES = hashlib.sha256().digest_size


class NotBuilt(Exception):
    """There is no library; says why, and what to do."""


def variant() -> str:
    """The widest set of instructions that this processor has, as PyTorch tells it."""
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() not in X86:
        return "baseline"
    return "avx512" if capability.startswith("AVX512") else "avx2" if capability == "AVX2" else "baseline"


def is_off() -> bool:
    """Whether the environment says to do without."""
    return os.environ.get(CACHE_VARIABLE, "").lower() == "off"


def built_library() -> Path:
    """The library for this machine, built if it is not there.

    Its name is a digest of all that it depends on. Behind its code lies a digest of that, so that a file that was cut short, on
    which the operating system's loader may crash, is found out and built anew.

    Raises:
        NotBuilt: If there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = _compiler()
    flags = (*FLAGS, *VARIANTS[variant()])
    told = "\0".join((SOURCE, *compiler, _version(compiler), *flags, platform.machine(), platform.system()))
    folder = _folder()
    path = folder / f"native-{hashlib.sha256(told.encode()).hexdigest()[:32]}.so"
    if not _is_whole(path):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _build(path, [*compiler, *flags])
        except OSError as error:
            raise NotBuilt(
                f"{folder} cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a folder that can"
            ) from None
    return path


def _folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "midus_hf" / "native"
    except RuntimeError:  # an account without a home
        raise NotBuilt(f"there is no home folder for it; set {CACHE_VARIABLE} to a folder") from None


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    found = named[:1] or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found or shutil.which(found[0]) is None:
        missing = f"CC is {named[0]!r}, which is not there" if named else "there is no C compiler"
        raise NotBuilt(f"{missing}; install gcc or clang")
    return named or found


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _build(path: Path, command: list[str]) -> None:
    """Compile in a folder of its own beside the path, so that processes that do so at once do not meet."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
        source, library = Path(folder) / "native.c", Path(folder) / "native.so"
        source.write_text(SOURCE, encoding="utf-8")
        _run([*command, str(source), "-o", str(library), "-lm"])
        code = library.read_bytes()
        with library.open("ab") as file:
            file.write(hashlib.sha256(code).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(library, path)


def _run(command: list[str]) -> str:
    """What a compiler says.

    Raises:
        NotBuilt: If it fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(
            f"{command[0]} does not run ({type(error).__name__}); install gcc or clang, or set CC"
        ) from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise NotBuilt(f"{command[0]} failed ({said.strip()}); install gcc or clang, or set CC")
    return done.stdout


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
