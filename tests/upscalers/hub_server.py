"""A hub on loopback: as many of its endpoints as huggingface_hub's client needs to download and to upload a model."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
LARGE_SUFFIXES = (".safetensors",)


@dataclass
class Repository:
    """A model: its files by path, how often it was committed to, and whether its terms must be accepted first."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    gated: bool = False

    @property
    def revision(self) -> str:
        return hashlib.sha1(f"{self.commits}".encode() + b"".join(self.files.values())).hexdigest()


class LoopbackHub:
    """Serves repositories until it is closed.

    Args:
        repositories: By id, their files by path.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories = {name: Repository(dict(files)) for name, files in repositories.items()}
        self.large_objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

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

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def _get(self) -> None:
        path = self._path()
        if path.startswith("/api/models/"):
            self._answer_about_model(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            repository, _, rest = path.lstrip("/").partition("/resolve/")
            self._send_file(repository, rest.partition("/")[2])
        else:
            self._send(404, {"error": f"no such page {path}"})

    def _answer_about_model(self, rest: str) -> None:
        name, _, question = rest.partition("/tree/")
        name = name.partition("/revision/")[0]
        repository = self._repository(name)
        if repository is None:
            return
        if question:
            self._send(200, [self._entry(path, content) for path, content in sorted(repository.files.items())])
        else:
            about = {
                "_id": name,
                "id": name,
                "modelId": name,
                "sha": repository.revision,
                "private": False,
                "tags": [],
            }
            self._send(200, {**about, "siblings": [{"rfilename": path} for path in sorted(repository.files)]})

    @staticmethod
    def _entry(path: str, content: bytes) -> dict:
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if path.endswith(LARGE_SUFFIXES):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def _send_file(self, name: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if path not in repository.files:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        if repository.gated:
            self._send(403, {"error": "Access to this model is restricted"}, {"X-Error-Code": "GatedRepo"})
            return
        content = repository.files[path]
        headers = {
            "X-Repo-Commit": repository.revision,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        self._send(200, content, headers)

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid user token"})
        elif path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(part for part in (request.get("organization"), request["name"]) if part)
            if name in self.hub.repositories:
                self._send(409, {"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"})
            else:
                self.hub.repositories[name] = Repository()
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
        content = self._body()
        oid = self._path().rpartition("/")[2]
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

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        return path

    def _body(self) -> bytes:
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
