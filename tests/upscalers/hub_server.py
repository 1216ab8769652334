"""A hub on loopback: as many of its endpoints as huggingface_hub's client needs to download and to upload a model."""

import base64
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
LARGE_SUFFIXES = (".safetensors",)
# The name of the one who holds `TOKEN`.
OWNER = "me"


@dataclass
class Repository:
    """A model.

    Args:
        files: Of the main branch, by path.
        commits: How often it was committed to.
        gated: Whether its terms must be accepted first.
        private: Whether others cannot see it.
        read_only: Whether `TOKEN` cannot write to it.
        tags: Files of earlier states, by the names of these.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    gated: bool = False
    private: bool = False
    read_only: bool = False
    tags: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def revision(self) -> str:
        """The commit that the main branch stands at."""
        return _commit(self.files, self.commits)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a branch, tag or commit."""
        states = {"main": (self.revision, self.files), self.revision: (self.revision, self.files)}
        for tag, files in self.tags.items():
            states[tag] = states[_commit(files)] = (_commit(files), files)
        return states.get(revision)


def _commit(files: dict[str, bytes], commits: int = 0) -> str:
    return hashlib.sha1(f"{commits}".encode() + b"".join(files.values())).hexdigest()


class LoopbackHub:
    """Serves repositories until it is closed.

    Attributes:
        repositories: By id.
        dies_in: A part of the path of those uploads whose connection is cut after half of their body.
        answers_with: The status that every question about a model is answered with; 0 cuts the connection instead.
        requests: Every request, its method and path.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_objects: dict[str, bytes] = {}
        self.dies_in: str | None = None
        self.answers_with: int | None = None
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloaded(self, repository: str) -> set[str]:
        """Paths of the files whose contents were asked for."""
        prefix = f"/{repository}/resolve/"
        wanted = [
            path.removeprefix(prefix) for method, path in self.requests if method == "GET" and path.startswith(prefix)
        ]
        return {path.partition("/")[2] for path in wanted}


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or what follows the headers waits until the client has acknowledged them, 40 ms

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def _get(self) -> None:
        path = self._path()
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self._send(200 if known else 401, {"name": OWNER} if known else {"error": "Invalid user token"})
        elif path.startswith("/api/models/") and self.hub.answers_with == 0:
            self.close_connection = True
        elif path.startswith("/api/models/") and self.hub.answers_with is not None:
            self._send(self.hub.answers_with, {"error": "broken"})
        elif path.startswith("/api/models/") and "/auth-check" in path:
            self._check_access(path.removeprefix("/api/models/"))
        elif path.startswith("/api/models/"):
            self._answer_about_model(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            repository, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._send_file(repository, revision, file)
        else:
            self._send(404, {"error": f"no such page {path}"})

    def _check_access(self, rest: str) -> None:
        name, _, kind = rest.partition("/auth-check")
        repository = self._repository(name)
        if repository is not None:
            forbidden = kind == "/write" and repository.read_only
            self._send(403 if forbidden else 200, {"error": "Forbidden"} if forbidden else {})

    def _answer_about_model(self, rest: str) -> None:
        question = "tree" if "/tree/" in rest else "revision"
        name, _, revision = rest.partition(f"/{question}/")
        result = self._state(name, revision or "main")
        if result is None:
            return
        commit, files = result
        if question == "tree":
            self._send(200, [self._entry(path, content) for path, content in sorted(files.items())])
        else:
            about = {
                "_id": name,
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": self.hub.repositories[name].private,
                "tags": [],
            }
            self._send(200, {**about, "siblings": [{"rfilename": path} for path in sorted(files)]})

    @staticmethod
    def _entry(path: str, content: bytes) -> dict:
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if path.endswith(LARGE_SUFFIXES):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def _send_file(self, name: str, revision: str, path: str) -> None:
        result = self._state(name, revision)
        if result is None:
            return
        commit, files = result
        if path not in files:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        if self.hub.repositories[name].gated:
            self._send(403, {"error": "Access to this model is restricted"}, {"X-Error-Code": "GatedRepo"})
            return
        content = files[path]
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
        }
        self._send(200, content, headers)

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if body is None:
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid user token"})
        elif path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or OWNER}/{request['name']}"
            if name in self.hub.repositories:
                self._send(409, {"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"})
            else:
                self.hub.repositories[name] = Repository(private=request.get("visibility") == "private")
                self._send(200, {"url": f"{self.hub.address}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if path.endswith(LARGE_SUFFIXES) else "regular" for path in paths]
            files = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False}
                for path, mode in zip(paths, modes, strict=True)
            ]
            self._send(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            verify = {"href": f"{self.hub.address}/lfs-verify"}
            objects = [
                {
                    **wanted,
                    "actions": {"upload": {"href": f"{self.hub.address}/lfs/{wanted['oid']}"}, "verify": verify},
                }
                for wanted in json.loads(body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif path == "/lfs-verify":
            request = json.loads(body)
            sound = len(self.hub.large_objects.get(request["oid"], b"")) == request["size"]
            self._send(200 if sound else 404, {})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._send(404, {"error": f"no such page {path}"})

    def do_PUT(self) -> None:
        oid = self._path().rpartition("/")[2]
        content = self._body()
        if content is None:
            return
        if hashlib.sha256(content).hexdigest() == oid:
            self.hub.large_objects[oid] = content
            self._send(200, {})
        else:
            self._send(400, {"error": "contents do not match their name"})

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.large_objects[value["oid"]]
        repository.commits += 1
        oid = repository.revision
        self._send(
            200,
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self.hub.address}/{name}/commit/{oid}",
                "hookOutput": "",
            },
        )

    def _repository(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return repository

    def _state(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self._repository(name)
        if repository is None:
            return None
        result = repository.at(revision)
        if result is None:
            self._send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        return result

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        return path

    def _body(self) -> bytes | None:
        """What was sent; None where the connection dies in the midst of it."""
        if self.hub.dies_in is not None and self.hub.dies_in in self.path:
            self.rfile.read(int(self.headers.get("Content-Length") or 2) // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return None
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def client_environment(hub: LoopbackHub | str, folder: Path) -> dict[str, str]:
    """Variables that make huggingface_hub's client talk to this server (or address) and to nobody else."""
    return {
        "HF_ENDPOINT": hub if isinstance(hub, str) else hub.address,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_CACHE": str(folder / "home" / "hub"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path within."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
