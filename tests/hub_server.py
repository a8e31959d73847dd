"""The Hub on loopback: its HTTP API as huggingface_hub asks it, with a history per repository, and failures on request.

    with HubServer() as hub:
        hub.fail("POST", "/commit/", 503)          # once
        hub.fail("PUT", "/lfs/", "cut", times=2)   # the connection closes halfway

What is spoken: create, info, tree, preupload, LFS batch, upload and verify, commit, resolve. Large files are those that
end in .safetensors. A commit is made whole or not at all, and refused where its parent is no longer the newest.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from base64 import b64decode
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_TestTokenThatNobodyMayReadAnywhere"
OWNER = "me"


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> the files in it."""
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]

    def commit(self, files: dict[str, bytes], message: str) -> str:
        made = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[made] = files
        self.refs["main"] = made
        self.messages.append(message)
        return made


class RefusedError(Exception):
    def __init__(self, status: int, text: str, code: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        """sha256 -> bytes, of large files that have arrived."""
        self.log: list[tuple[str, str, int]] = []
        """(method, path, bytes of the body)"""
        self.failures: list[list[Any]] = []
        self.echo = False
        """Whether refusals repeat the Authorization header, as no server should."""
        hub = self

        class Handler(_Handler):
            server_state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = f"http://localhost:{self.server.server_port}"
        """Where large files are, which is another host than the hub."""
        self.tokens_astray = 0
        """Requests to the storage with a token."""

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, part: str, how: int | str, times: int = 1, text: str = "no luck") -> None:
        """Fail the next `times` requests whose path holds `part`, with a status or "cut"."""
        self.failures.append([method, part, how, times, text])

    def failure(self, method: str, path: str) -> tuple[int | str, str] | None:
        for failure in self.failures:
            if failure[3] and failure[0] == method and failure[1] in path:
                failure[3] -= 1
                return failure[2], failure[4]
        return None

    def create(self, name: str, files: dict[str, bytes], private: bool = False) -> Repo:
        repo = self.repos[name] = Repo(private)
        repo.commit(files, "initial commit")
        return repo

    def asked(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path, _ in self.log)


class _Handler(BaseHTTPRequestHandler):
    server_state: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.serve("GET")

    def do_HEAD(self) -> None:
        self.serve("HEAD")

    def do_POST(self) -> None:
        self.serve("POST")

    def do_PUT(self) -> None:
        self.serve("PUT")

    def serve(self, method: str) -> None:
        hub, path = self.server_state, unquote(urlsplit(self.path).path)
        failure = hub.failure(method, path)
        if failure and failure[0] == "cut" and method == "PUT":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.log.append((method, path, len(body)))
        try:
            if failure and failure[0] != "cut":
                raise RefusedError(int(failure[0]), failure[1])
            answer = self.answer(method, path, body)
        except RefusedError as e:
            text = f"{e.text} {self.headers.get('Authorization')}" if hub.echo else e.text
            self.send(e.status, json.dumps({"error": text}).encode(), {"X-Error-Code": e.code, "X-Error-Message": text})
            return
        status, content, headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode(), {})
        self.send(status, content, headers, cut=bool(failure))

    def send(self, status: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def answer(self, method: str, path: str, body: bytes) -> Any:
        hub = self.server_state
        given = self.headers.get("Authorization")
        hub.tokens_astray += given is not None and self.headers["Host"].startswith("localhost")
        if given is not None and given != f"Bearer {TOKEN}":
            raise RefusedError(401, "Invalid credentials in Authorization header")
        for route, pattern, call in ROUTES:
            found = re.fullmatch(pattern, path)
            if method in route and found:
                data = body if method == "PUT" or "/commit/" in path else json.loads(body or b"{}")
                return call(self, hub, data, *found.groups())
        raise RefusedError(404, f"no {method} {path}")

    def user(self) -> None:
        if self.headers.get("Authorization") is None:
            raise RefusedError(401, "Invalid username or password.")

    def repo(self, name: str, write: bool = False) -> Repo:
        signed_in = self.headers.get("Authorization") is not None
        repo = self.server_state.repos.get(name)
        if repo is None or (repo.private and not signed_in):
            raise RefusedError(404 if signed_in else 401, "Repository not found", "RepoNotFound")
        if write:
            self.user()
            if not name.startswith(f"{OWNER}/"):
                raise RefusedError(403, "You don't have the required permissions to perform this action")
        return repo

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repo = self.repo(name)
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repo.commits[commit]

    def create(self, hub: HubServer, data: Any) -> Any:
        self.user()
        owner = data.get("organization") or OWNER
        name = f"{owner}/{data['name']}"
        if owner != OWNER:
            raise RefusedError(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        if name in hub.repos:
            raise RefusedError(409, "You already created this model repo")
        hub.create(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, data.get("visibility") == "private")
        return {"url": f"{hub.url}/{name}", "name": name, "id": name}

    def validate(self, hub: HubServer, data: Any) -> Any:
        front = re.match(r"---\n(.*?)\n---\n", data["content"], re.DOTALL)
        if front and not isinstance(yaml.safe_load(front[1]), dict):
            raise RefusedError(400, "no mapping")
        return {"errors": [], "warnings": []}

    def info(self, hub: HubServer, data: Any, name: str, revision: str | None = None) -> Any:
        commit, files = self.files(name, revision or "main")
        front = re.match(rb"---\n(.*?)\n---\n", files.get("README.md", b""), re.DOTALL)
        return {
            "_id": "0",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": self.repo(name).private,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "cardData": yaml.safe_load(front[1]) if front else None,
            "siblings": [{"rfilename": path} for path in files],
        }

    def tree(self, hub: HubServer, data: Any, name: str, revision: str) -> Any:
        return [_entry(path, content) for path, content in self.files(name, revision)[1].items()]

    def preupload(self, hub: HubServer, data: Any, name: str, revision: str) -> Any:
        self.repo(name, write=True)
        files = self.files(name, revision)[1]
        ignored = files.get(".gitignore", b"").decode().split()
        return {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if _is_large(path) else "regular",
                    "shouldIgnore": path in ignored,
                    "oid": _oid(path, files[path]) if path in files else None,
                }
                for path in (file["path"] for file in data["files"])
            ]
        }

    def batch(self, hub: HubServer, data: Any, name: str) -> Any:
        self.repo(name, write=True)
        objects = []
        for wanted in data["objects"]:
            oid = wanted["oid"]
            upload = {
                "upload": {"href": f"{hub.storage}/lfs/{oid}?X-Amz-Signature=secretsignature"},
                "verify": {"href": f"{hub.url}/lfs/{oid}/verify"},
            }
            objects.append(wanted if oid in hub.large else {**wanted, "actions": upload})
        return {"transfer": "basic", "objects": objects}

    def upload(self, hub: HubServer, data: bytes, oid: str) -> Any:
        if hashlib.sha256(data).hexdigest() != oid:
            raise RefusedError(400, "the bytes are not those of the hash")
        hub.large[oid] = data
        return 200, b"", {"ETag": f'"{oid}"'}

    def verify(self, hub: HubServer, data: Any, oid: str) -> Any:
        self.user()
        if len(hub.large.get(oid, b"")) != data["size"]:
            raise RefusedError(404, "the object has not arrived")
        return {}

    def commit(self, hub: HubServer, data: bytes, name: str, revision: str) -> Any:
        repo = self.repo(name, write=True)
        header, *operations = (json.loads(line) for line in data.splitlines())
        if header["value"].get("parentCommit", repo.refs["main"]) != repo.refs["main"]:
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.files)
        for operation in operations:
            key, value = operation["key"], operation["value"]
            if key == "file":
                files[value["path"]] = b64decode(value["content"])
            elif key == "lfsFile" and value["oid"] in hub.large:
                files[value["path"]] = hub.large[value["oid"]]
            elif key == "deletedFile" and value["path"] in files:
                del files[value["path"]]
            else:
                raise RefusedError(400, f"cannot {key} {value['path']}")
        made = repo.commit(files, header["value"]["summary"])
        return {"commitUrl": f"{hub.url}/{name}/commit/{made}", "commitOid": made, "success": True, "hookOutput": ""}

    def resolve(self, hub: HubServer, data: Any, name: str, revision: str, path: str) -> Any:
        commit, files = self.files(name, revision)
        if path not in files:
            raise RefusedError(404, "Entry not found", "EntryNotFound")
        content, headers = files[path], {"X-Repo-Commit": commit}
        if not _is_large(path):
            return 200, content, {**headers, "ETag": f'"{_oid(path, content)}"'}
        oid = _oid(path, content)
        headers |= {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(content)), "ETag": '"of the pointer"'}
        return 302, b"", {**headers, "Location": f"{hub.storage}/cdn/{oid}?X-Amz-Signature=secretsignature"}

    def cdn(self, hub: HubServer, data: Any, oid: str) -> Any:
        content, asked = hub.large[oid], re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked:
            begin = int(asked[1])
            span = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            return 206, content[begin:], {"ETag": f'"{oid}"', "Content-Range": span}
        return 200, content, {"ETag": f'"{oid}"'}


_NAME = r"([\w.-]+/[\w.-]+)"
_MODEL = rf"/api/models/{_NAME}"
ROUTES = (
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("GET", _MODEL, _Handler.info),
    ("GET", rf"{_MODEL}/revision/(.+)", _Handler.info),
    ("GET", rf"{_MODEL}/tree/([^/]+)", _Handler.tree),
    ("POST", rf"{_MODEL}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(\w+)", _Handler.upload),
    ("POST", r"/lfs/(\w+)/verify", _Handler.verify),
    ("POST", rf"{_MODEL}/commit/(.+)", _Handler.commit),
    (("GET", "HEAD"), rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (("GET", "HEAD"), r"/cdn/(\w+)", _Handler.cdn),
)


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _oid(path: str, content: bytes) -> str:
    if _is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = _oid(path, content)
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if _is_large(path):
        entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return entry
