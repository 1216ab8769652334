"""Builds the library of compiled ops; imports only the standard library, since `setup.py` runs it."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = tuple(
    "-std=gnu11 -O3 -ffp-contract=fast -fno-strict-aliasing -fPIC -shared -fvisibility=hidden -pthread".split()
)
# Further compiler flags per instruction set. Processors other than x86-64 have only the baseline.
VARIANTS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "baseline": (),
}

X86 = ("x86_64", "amd64")  # names of x86-64, in lower case
CACHE_VARIABLE = "MIDUS_NATIVE_CACHE"  # environment variable with the folder of built libraries, or `off`
_SOURCES = Path(__file__).parents[1]
_COMPILERS = ("cc", "gcc", "clang")  # compilers that are tried in this order if `CC` is not set
_SECONDS = 120


class NotBuilt(Exception):
    """Error that says why there is no library, and what to do."""


def is_off() -> bool:
    return os.environ.get(CACHE_VARIABLE, "").lower() == "off"


def built_library(variant: str) -> Path:
    """Return the path of the library for an instruction set of `VARIANTS`; build it if it is missing.

    The file's name is a digest of all that it depends on: sources, compiler, flags and machine.

    Raises:
        NotBuilt: If there are no sources or no compiler, the compiler fails, or the folder cannot be written.
    """
    sources = sorted(_SOURCES.rglob("*.[ch]"))
    if not sources:
        raise NotBuilt(f"there are no C files in {_SOURCES}; install midus_hf again")
    compiler = _compiler()
    version = _run([*compiler, "--version"])
    dependencies = (*compiler, version, *FLAGS, *VARIANTS[variant], platform.machine(), platform.system())
    digest = hashlib.sha256("\0".join(dependencies).encode())
    for path in sources:
        digest.update(f"\0{path.relative_to(_SOURCES).as_posix()}\0".encode() + path.read_bytes())
    folder = _folder()
    library = folder / f"native-{digest.hexdigest()[:32]}.so"
    if not library.exists():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a temporary folder next to the library, so that several processes can build at once.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
                compile_library(Path(building, "native.so"), variant)
                with Path(building, "native.so").open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(Path(building, "native.so"), library)
        except OSError as error:
            raise NotBuilt(
                f"{folder} cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a folder that can"
            ) from None
    return library


def compile_library(library: Path, variant: str) -> None:
    """Compile the C files into `library`; `NotBuilt` if there is no compiler or it fails."""
    files = map(str, sorted(_SOURCES.rglob("*.c")))
    _run([*_compiler(), *FLAGS, *VARIANTS[variant], f"-I{_SOURCES / 'dispatch'}", *files, "-o", str(library), "-lm"])


def _folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "midus_hf" / "native"
    except RuntimeError:  # an account without a home folder
        raise NotBuilt(f"there is no home folder for it; set {CACHE_VARIABLE} to a folder") from None


def _compiler() -> list[str]:
    """Return the start of the compiler's command line: the program, and the arguments that `CC` adds."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise NotBuilt(f"CC is {os.environ['CC']!r} ({error}); install gcc or clang, or set CC") from None
    command = named or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        missing = f"CC is {named[0]!r}, which is not there" if named else "there is no C compiler"
        raise NotBuilt(f"{missing}; install gcc or clang")
    return command


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(
            f"{command[0]} does not run ({type(error).__name__}); install gcc or clang, or set CC"
        ) from None
    if done.returncode:
        cause = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise NotBuilt(f"{command[0]} failed ({cause.strip()}); install gcc or clang, or set CC")
    return done.stdout
