"""Repositories of a Hub, and what it answers about them; nothing here knows how requests travel."""

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

TOKEN = "hf_loopback"
# The name of the one who holds `TOKEN`.
OWNER = "me"
Files = dict[str, bytes]

_LARGE = re.compile(r".*\.(safetensors|parquet|bin|gguf|zst|gz|png)")
_QUESTIONS = "resolve|tree|revision|paths-info|auth-check|preupload|commit|refs|info/lfs"
_ROUTE = re.compile(
    rf"(?:/api/(?P<kind>models|datasets))?/(?P<name>(?:datasets/)?[^/]+?(?:/[^/]+?)??)(?:\.git)?"
    rf"(?:/(?P<question>{_QUESTIONS})(?:/(?P<detail>.*))?)?"
)
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_REASONS = {
    "RepoNotFound": "Repository not found",
    "GatedRepo": "Access to this repository is restricted",
    "EntryNotFound": "Entry not found",
    "RevisionNotFound": "Invalid rev id",
}


@dataclass
class Repository:
    """A model or a data set: files of its main branch and tags, its commits, and who may do what with it."""

    files: Files = field(default_factory=dict)
    commits: int = 0
    private: bool = False
    gated: bool = False
    refuses: bool = False  # gated, and whoever holds the token has no access either
    read_only: bool = False
    tags: dict[str, Files] = field(default_factory=dict)

    @property
    def revision(self) -> str:
        return _commit(self.files, self.commits)

    def at(self, revision: str) -> tuple[str, Files] | None:
        states = {"main": (self.revision, self.files), self.revision: (self.revision, self.files)}
        for tag, files in self.tags.items():
            states[tag] = states[_commit(files)] = (_commit(files), files)
        return states.get(revision)


def _commit(files: Files, commits: int = 0) -> str:
    return hashlib.sha1(f"{commits}".encode() + b"".join(files.values())).hexdigest()


@dataclass
class Fault:
    """What happens to the next requests whose path has a part: a status, a cut connection, or silence.

    `cut_after`: bytes of the answer after which the connection ends. `silent`: no answer until the client gives up.
    """

    part: str
    status: int | None = None
    cut_after: int | None = None
    silent: bool = False
    times: float = float("inf")
    method: str | None = None  # default: any


class Request(NamedTuple):
    """A request as it came, its path without the query; the answer's status, and the file that it has."""

    method: str
    path: str
    status: int
    has_token: bool
    range: str | None
    file: tuple[str, str] | None  # the repository and the path there


class Answer(NamedTuple):
    """A status, a body and headers; of a cut or silent one, what the client sees of it."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    file: tuple[str, str] | None = None
    fault: Fault | None = None


class Hub:
    """Answers requests from the repositories that it holds: models by their names, data sets by `datasets/NAME`."""

    address = "http://hub.test"
    storage_address = "http://storage.hub.test"  # of large files, which answers redirect to

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_objects: Files = {}  # by digest
        self._places: dict[str, tuple[str, str]] = {}  # of large objects that were asked for, by digest
        self.log: list[Request] = []
        self.faults: list[Fault] = []

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Methods and paths of all requests."""
        return [(request.method, request.path) for request in self.log]

    def downloaded(self, repository: str) -> set[str]:
        """Files of a repository whose contents were asked for."""
        files = [request.file for request in self.log if request.method == "GET" and request.file is not None]
        return {path for name, path in files if name == repository}

    def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answer a request; names of headers are in lower case."""
        fault = next((each for each in self.faults if each.times and each.part in path), None)
        if fault is not None and fault.method not in (None, method):
            fault = None
        may_write = headers.get("authorization") == f"Bearer {TOKEN}"
        if fault is not None:
            fault.times -= 1
        if fault is not None and fault.status is not None:
            retry = {"Retry-After": "1"} if fault.status == 429 else {}
            answer = _said(fault.status, {"error": "broken"}, headers=retry)
        else:
            asked = _Asked(method, path, query, headers, body, may_write)
            answer = self._answer(asked)._replace(fault=fault)
        self.log.append(Request(method, path, answer.status, may_write, headers.get("range"), answer.file))
        return answer

    def _answer(self, asked: "_Asked") -> Answer:
        if asked.path == "/api/validate-yaml":
            return _said(200, {"errors": [], "warnings": []})
        if asked.method == "PUT":
            self.large_objects[asked.path.rpartition("/")[2]] = asked.body
            return _said(200, {})
        if asked.path.startswith("/large/"):
            digest = asked.path.rpartition("/")[2]
            answer = _content("", self.large_objects.get(digest), asked.headers)
            return answer._replace(file=self._places.get(digest))
        is_owners = asked.path in ("/api/whoami-v2", "/api/repos/create")
        if is_owners and not asked.may_write:
            return _said(401, {"error": "Invalid user token"})
        if asked.path == "/api/whoami-v2":
            return _said(200, {"type": "user", "name": OWNER, "orgs": []})
        if asked.path == "/api/repos/create":
            return self._create(json.loads(asked.body))
        route = _ROUTE.fullmatch(asked.path)
        name = "" if route is None else route["name"]
        if route is not None and route["kind"] == "datasets":
            name = f"datasets/{name}"
        repository = self.repositories.get(name)
        if route is None or repository is None or (repository.private and not asked.may_write):
            return _refused("RepoNotFound", 404 if asked.may_write else 401)
        return self._of_repository(name, repository, route["question"] or "revision", route["detail"] or "main", asked)

    def _of_repository(self, name: str, repository: Repository, question: str, detail: str, asked: "_Asked") -> Answer:
        if question == "auth-check":
            forbidden = detail == "write" and repository.read_only
            return _said(403, {"error": "Forbidden"}) if forbidden else _said(200, {})
        if question in ("preupload", "commit", "info/lfs"):
            if not asked.may_write:
                return _said(401, {"error": "Invalid user token"})
            receive = {"preupload": self._ways_to_upload, "commit": self._commit, "info/lfs": self._places_of_large}
            return receive[question](name, repository, asked.body)
        if question == "refs":
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.revision}
            return _said(200, {"branches": [branch], "tags": [], "converts": []})
        revision, _, inner = detail.partition("/")
        state = repository.at(revision)
        if state is None:
            return _refused("RevisionNotFound", 404)
        commit, files = state
        if question == "revision":
            return _said(200, _about(name.removeprefix("datasets/"), repository, commit, files))
        if repository.gated and (repository.refuses or not asked.may_write):
            return _refused("GatedRepo", 403 if asked.may_write else 401)
        if question == "tree":
            return _tree(files, inner, is_deep="recursive=true" in asked.query.lower())
        if question == "paths-info":
            return _paths_info(files, asked.body)
        content = files.get(inner)
        if content is not None and _LARGE.fullmatch(inner):
            return self._redirect(name, commit, inner, content)
        return _content(commit, content, asked.headers)._replace(file=(name, inner))

    def _redirect(self, name: str, commit: str, path: str, content: bytes) -> Answer:
        """Answer with the address of a large file in the storage, signed as those of the real one are."""
        digest = hashlib.sha256(content).hexdigest()
        self.large_objects[digest], self._places[digest] = content, (name, path)
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
        return Answer(302, headers={**linked, "Location": f"{self.storage_address}/large/{digest}?Signature=signed"})

    def _create(self, wanted: dict[str, Any]) -> Answer:
        name = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        key = f"datasets/{name}" if wanted.get("type") == "dataset" else name
        about = {"url": f"{self.address}/{key}", "name": name, "id": name}
        if key in self.repositories:
            return _said(409, {**about, "error": "You already created this repo"})
        is_private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.repositories[key] = Repository(private=is_private)
        return _said(200, about)

    def _ways_to_upload(self, name: str, repository: Repository, body: bytes) -> Answer:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if _LARGE.fullmatch(path) else "regular" for path in paths}
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        return _said(200, {"files": files})

    def _places_of_large(self, name: str, repository: Repository, body: bytes) -> Answer:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.address}/lfs/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        return _said(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, body: bytes) -> Answer:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                repository.files.pop(value["path"], None)
            elif line["key"] == "lfsFile":
                content = self.large_objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                repository.files[value["path"]] = content
        repository.commits += 1
        address = f"{self.address}/{name}/commit/{repository.revision}"
        return _said(200, {"success": True, "commitOid": repository.revision, "commitUrl": address, "hookOutput": ""})


class _Asked(NamedTuple):
    """A request, and whether it has the token."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    may_write: bool


def _said(status: int, content: Any, code: str | None = None, headers: Mapping[str, str] | None = None) -> Answer:
    coded = {} if code is None else {"X-Error-Code": code, "X-Error-Message": _REASONS[code]}
    described = {"Content-Type": "application/json", **coded, **(headers or {})}
    return Answer(status, json.dumps(content).encode(), described)


def _refused(code: str, status: int) -> Answer:
    return _said(status, {"error": _REASONS[code]}, code)


def _content(commit: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
    if content is None:
        return _refused("EntryNotFound", 404)
    digest = hashlib.sha256(content).hexdigest()
    described = {"ETag": f'"{digest}"', "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    if commit:
        described["X-Repo-Commit"] = commit
    wanted = _RANGE.fullmatch(headers.get("range", ""))
    if wanted is None:
        return Answer(200, content, described)
    begin, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
    described["Content-Range"] = f"bytes {begin}-{last}/{len(content)}"
    return Answer(206, content[begin : last + 1], described)


def _about(name: str, repository: Repository, commit: str, files: Files) -> dict[str, Any]:
    facts = {"id": name, "sha": commit, "private": repository.private, "disabled": False, "tags": []}
    counts = {"downloads": 0, "likes": 0, "gated": "manual" if repository.gated else False}
    return {**facts, **counts, "siblings": [{"rfilename": path} for path in sorted(files)]}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {**entry, "lfs": lfs} if _LARGE.fullmatch(path) else entry


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def _folders_above(path: str) -> list[str]:
    above = posixpath.dirname(path)
    return [above, *_folders_above(above)] if above else []


def _tree(files: Files, under: str, *, is_deep: bool) -> Answer:
    found = [path for path in sorted(files) if not under or path.startswith(f"{under}/")]
    if under and not found:
        return _refused("EntryNotFound", 404)
    folders = sorted({folder for path in found for folder in _folders_above(path) if len(folder) > len(under)})
    entries = [*(_folder(path) for path in folders), *(_entry(path, files[path]) for path in found)]
    return _said(200, [entry for entry in entries if is_deep or posixpath.dirname(entry["path"]) == under])


def _paths_info(files: Files, body: bytes) -> Answer:
    wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
    folders = {folder for path in files for folder in _folders_above(path)}
    known = [_entry(path, files[path]) for path in wanted if path in files]
    return _said(200, [*known, *(_folder(path) for path in wanted if path in folders)])


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
