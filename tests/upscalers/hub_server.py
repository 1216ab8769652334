"""A hub in this process: answers to huggingface_hub's client."""

import base64
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.utils import get_session
from huggingface_hub.utils._http import hf_request_event_hook

# httpx, or httpx2 with newer versions of huggingface_hub.
http = sys.modules[type(get_session()).__module__.partition(".")[0]]
TOKEN = "hf_loopback"
# The name of the one who holds `TOKEN`.
OWNER = "me"
Files = dict[str, bytes]


@dataclass
class Repository:
    """A model: files of its main branch and tags, its commits, and who may do what with it."""

    files: Files = field(default_factory=dict)
    commits: int = 0
    private: bool = False
    gated: bool = False
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


class Hub:
    """Answers requests from the repositories that it holds."""

    address = "http://hub.test"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_objects: Files = {}
        self.requests: list[tuple[str, str]] = []  # methods and paths
        self.dies_in: str | None = None  # a part of the path of requests whose connection is cut
        self.answers_with: int | None = None  # the status of each question about a model; 0 cuts the connection

    def client(self) -> Any:
        hooks = {"request": [hf_request_event_hook]}  # which refuses requests where the client is offline
        return http.Client(transport=http.MockTransport(self._answer), event_hooks=hooks, follow_redirects=True)

    def downloaded(self, repository: str) -> set[str]:
        prefix = f"/{repository}/resolve/"
        wanted = (path for method, path in self.requests if method == "GET" and path.startswith(prefix))
        return {path.removeprefix(prefix).partition("/")[2] for path in wanted}

    def _answer(self, request: Any) -> Any:
        path = request.url.path
        self.requests.append((request.method, path))
        asked = request.method in ("GET", "HEAD") and path.startswith("/api/models/")
        if (self.dies_in is not None and self.dies_in in path) or (asked and self.answers_with == 0):
            raise http.RemoteProtocolError("the connection was cut", request=request)
        if asked and self.answers_with is not None:
            return _said(self.answers_with, {"error": "broken"})
        if path == "/api/whoami-v2" or request.method == "POST":
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return _said(401, {"error": "Invalid user token"})
            return self._change(path, request.read()) if request.method == "POST" else _said(200, {"name": OWNER})
        if request.method == "PUT":
            self.large_objects[path.rpartition("/")[2]] = request.read()
            return _said(200, {})
        for question in ("/resolve/", "/auth-check", "/tree/", "/revision/"):
            name, question, detail = path.removeprefix("/api/models").lstrip("/").partition(question)
            if question:
                break
        if (repository := self.repositories.get(name)) is None:
            return _said(404, {"error": "Repository not found"}, "RepoNotFound")
        is_owner = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository.private and not is_owner:
            return _said(401, {"error": "Repository not found"}, "RepoNotFound")
        if repository.gated and not is_owner:
            return _said(401, {"error": "Access to this model is restricted"}, "GatedRepo")
        if question == "/auth-check":
            forbidden = detail == "/write" and repository.read_only
            return _said(403, {"error": "Forbidden"}) if forbidden else _said(200, {})
        revision, _, file = detail.partition("/")
        if (state := repository.at(revision or "main")) is None:
            return _said(404, {"error": f"Invalid rev id: {revision}"}, "RevisionNotFound")
        commit, files = state
        if question == "/resolve/":
            return _content(commit, files.get(file))
        if question == "/tree/":
            return _said(200, [_entry(path, content) for path, content in sorted(files.items())])
        siblings = [{"rfilename": path} for path in sorted(files)]
        return _said(200, {"id": name, "sha": commit, "private": repository.private, "siblings": siblings})

    def _change(self, path: str, body: bytes) -> Any:
        if "/commit/" in path:
            return self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        request = json.loads(body)
        if path == "/api/repos/create":
            name = f"{request.get('organization') or OWNER}/{request['name']}"
            about = {"url": f"{self.address}/{name}", "name": name, "id": name}
            if name in self.repositories:
                return _said(409, {**about, "error": "You already created this model repo"})
            self.repositories[name] = Repository(private=request.get("visibility") == "private")
            return _said(200, about)
        if path == "/api/validate-yaml":
            return _said(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            paths = {file["path"]: file["path"].endswith(".safetensors") for file in request["files"]}
            modes = {path: "lfs" if is_large else "regular" for path, is_large in paths.items()}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return _said(200, {"files": files})
        assert path.endswith(".git/info/lfs/objects/batch"), path
        places = {wanted["oid"]: {"href": f"{self.address}/lfs/{wanted['oid']}"} for wanted in request["objects"]}
        objects = [{**wanted, "actions": {"upload": places[wanted["oid"]]}} for wanted in request["objects"]]
        return _said(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> Any:
        repository = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.large_objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                repository.files[value["path"]] = content
        repository.commits += 1
        address = f"{self.address}/{name}/commit/{repository.revision}"
        return _said(200, {"success": True, "commitOid": repository.revision, "commitUrl": address, "hookOutput": ""})


def _said(status: int, content: Any, code: str | None = None) -> Any:
    return http.Response(status, json=content, headers={} if code is None else {"X-Error-Code": code})


def _content(commit: str, content: bytes | None) -> Any:
    if content is None:
        return _said(404, {"error": "Entry not found"}, "EntryNotFound")
    tag = hashlib.sha256(content).hexdigest()
    return http.Response(200, content=content, headers={"X-Repo-Commit": commit, "ETag": f'"{tag}"'})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {**entry, "lfs": lfs} if path.endswith(".safetensors") else entry


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
