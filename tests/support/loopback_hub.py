"""A small real Hugging Face Hub on the loopback interface, for tests of download and upload.

`huggingface_hub` and `datasets` speak to it over HTTP when `HF_ENDPOINT` names it::

    with LoopbackHub() as hub:
        hub.add("dataset", "org/name", {"data/train.parquet": content})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)   # before huggingface_hub is imported,
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")     # or in the environment of a subprocess
        ...
        assert hub.repos["dataset", "org/name"].files == {...}
        assert hub.requests == ["HEAD /datasets/org/name/resolve/…", …]

It serves: who am I, create, branches, preupload, LFS upload, commit, repository info, tree,
paths-info, and whole-file or ranged reads. A repository can be private (needs the token) or gated
(always refused).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal["model", "dataset"]
TOKEN = "hf_" + "loopback" * 4


@dataclass
class Repo:
    """One repository: its files at `main`, its other branches, and who may read it."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each branch other than `main`."""
    tags: set[str] = field(default_factory=set)

    @property
    def commit(self) -> str:
        """A commit id that changes with the content."""
        digest = hashlib.sha1()
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + b"\0" + hashlib.sha1(content).digest())
        return digest.hexdigest()


class LoopbackHub:
    """The server; a context manager. `endpoint` is the value for `HF_ENDPOINT`."""

    def __init__(self, token: str = TOKEN, *, read_only_for_all: bool = False) -> None:
        """`token` is the one that is accepted; `read_only_for_all` answers each write with 403."""
        self.token = token
        self.read_only_for_all = read_only_for_all
        self.repos: dict[tuple[Kind, str], Repo] = {}
        self.requests: list[str] = []
        """`METHOD path [range]` of each request, in order."""
        self.cut_next_read_at: int | None = None
        """The next file read ends the connection after so many bytes, once."""
        self.uploaded: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def add(
        self,
        kind: Kind,
        repo: str,
        files: dict[str, bytes],
        *,
        private: bool = False,
        gated: bool = False,
    ) -> Repo:
        """Put a repository with these files on the server."""
        self.repos[kind, repo] = Repo(dict(files), private, gated)
        return self.repos[kind, repo]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Answer(Exception):
    """Ends a request with this status; `code` is the Hub's X-Error-Code."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


_NAME = r"(?P<repo>[\w.-]+/[\w.-]+?)"
_API = rf"/api/(?P<kind>model|dataset)s/{_NAME}"
_ROUTES: list[tuple[str, str, str]] = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", rf"{_API}/branch/(?P<branch>[^/]+)", "branch"),
    ("GET", rf"{_API}/refs", "refs"),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"{_API}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("GET", rf"{_API}(?:/revision/(?P<revision>[^/]+))?", "info"),
    ("POST", rf"/(?:(?P<kind>dataset)s/)?{_NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    ("READ", rf"/(?:(?P<kind>dataset)s/)?{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "read"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        wanted = self.headers.get("Range")
        self.hub.requests.append(" ".join(filter(None, (self.command, url.path, wanted))))
        method = {"HEAD": "READ"}.get(self.command, self.command)
        try:
            for verb, pattern, name in _ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match and (verb == method or (verb == "READ" and method == "GET")):
                    parts = {k: v and unquote(v) for k, v in match.groupdict().items()}
                    getattr(self, f"_{name}")(**parts)
                    return
            raise _Answer(404, f"no route {self.command} {url.path}")
        except _Answer as answer:
            self._json({"error": answer.message}, answer.status, answer.code)

    def _json(self, value: Any, status: int = 200, code: str | None = None) -> None:
        content = json.dumps(value).encode()
        headers = {"Content-Type": "application/json"}
        if code:
            headers |= {"X-Error-Code": code, "X-Error-Message": value["error"]}
        self._send(status, content, headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _signed_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _may_write(self) -> None:
        if not self._signed_in():
            raise _Answer(401, "Invalid username or password.")
        if self.hub.read_only_for_all:
            raise _Answer(403, "Forbidden: you don't have the rights to write here.")

    def _repo(self, kind: str | None, repo: str, revision: str | None = "main") -> Repo:
        found = self.hub.repos.get(("dataset" if kind == "dataset" else "model", repo))
        if found is None or (found.private and not self._signed_in()):
            raise _Answer(
                401 if not self._signed_in() else 404, "Repository not found", "RepoNotFound"
            )
        if revision in found.branches:
            return Repo(found.branches[revision], found.private, found.gated)
        if revision not in (None, "main", found.commit):
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def _readable(self, kind: str | None, repo: str, revision: str | None) -> Repo:
        found = self._repo(kind, repo, revision)
        if found.gated:
            status = 403 if self._signed_in() else 401
            raise _Answer(status, f"Access to {repo} is restricted: ask for it.", "GatedRepo")
        return found

    def _whoami(self) -> None:
        if not self._signed_in():
            raise _Answer(401, "Invalid username or password.")
        self._json({"type": "user", "name": "tester", "orgs": [], "auth": {"type": "access_token"}})

    def _create(self) -> None:
        self._may_write()
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        kind: Kind = "dataset" if asked.get("type") == "dataset" else "model"
        url = {"url": f"{self.hub.endpoint}/{'datasets/' * (kind == 'dataset')}{name}"}
        if (kind, name) in self.hub.repos:
            self._json(url | {"error": "You already created this repo"}, 409)
            return
        self.hub.repos[kind, name] = Repo(
            private=bool(asked.get("private")) or asked.get("visibility") == "private"
        )
        self._json(url)

    def _branch(self, kind: str, repo: str, branch: str) -> None:
        self._may_write()
        found = self._repo(kind, repo)
        if re.search(r"^refs/|^[-./]|\.\.|[\s~^:?*\[\\]|[/.]$|\.lock$", branch):
            raise _Answer(400, f"Invalid reference for a branch: {branch}")
        if branch in {"main", *found.branches, *found.tags}:
            raise _Answer(409, "Reference already exists")
        found.branches[branch] = dict(found.files)
        self._json({}, 201)

    def _refs(self, kind: str, repo: str) -> None:
        found = self._repo(kind, repo)

        def refs(folder: str, names: Iterable[str]) -> list[dict[str, str]]:
            ref = {"targetCommit": found.commit}
            return [ref | {"name": name, "ref": f"refs/{folder}/{name}"} for name in names]

        branches = refs("heads", ["main", *found.branches])
        self._json({"branches": branches, "tags": refs("tags", found.tags), "converts": []})

    def _validate_yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def _preupload(self, kind: str, repo: str, revision: str) -> None:
        self._may_write()
        found = self._repo(kind, repo, revision)
        asked = json.loads(self.body)["files"]

        def entry(path: str) -> dict[str, Any]:
            large = path.endswith((".safetensors", ".bin", ".parquet"))
            content, oid = found.files.get(path), None
            if content is not None:  # the client leaves out what is there already
                blob = b"blob %d\0" % len(content) + content
                oid = (hashlib.sha256(content) if large else hashlib.sha1(blob)).hexdigest()
            mode = "lfs" if large else "regular"
            return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

        self._json({"files": [entry(file["path"]) for file in asked]})

    def _lfs_batch(self, kind: str | None, repo: str) -> None:
        self._may_write()
        objects = json.loads(self.body)["objects"]
        answer = [
            o | {"actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{o['oid']}"}}}
            for o in objects
        ]
        self._json({"transfer": "basic", "objects": answer})

    def _lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Answer(400, "content does not match its hash")
        self.hub.uploaded[oid] = self.body
        self._json({})

    def _commit(self, kind: str, repo: str, revision: str) -> None:
        self._may_write()
        found = self._repo(kind, repo, revision)
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                found.files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del found.files[value["path"]]
        url = f"{self.hub.endpoint}/{repo}/commit/{found.commit}"
        self._json({"success": True, "commitOid": found.commit, "commitUrl": url})

    def _info(self, kind: str, repo: str, revision: str | None) -> None:
        found = self._repo(kind, repo, revision)
        self._json(
            {
                "id": repo,
                "sha": found.commit,
                "private": found.private,
                "gated": "manual" if found.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": path} for path in sorted(found.files)],
            }
        )

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        return {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }

    def _tree(self, kind: str, repo: str, revision: str, path: str | None) -> None:
        found = self._readable(kind, repo, revision)
        prefix = f"{path.rstrip('/')}/" if path else ""
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0] in (
            "true",
            "True",
            "1",
        )
        entries: dict[str, dict[str, Any]] = {}
        for name, content in sorted(found.files.items()):
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                entries[name] = self._entry(name, content)
        if path and not entries:
            raise _Answer(404, f"{path} does not exist", "EntryNotFound")
        self._json(list(entries.values()))

    def _paths_info(self, kind: str, repo: str, revision: str) -> None:
        found = self._readable(kind, repo, revision)
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode())["paths"]
        entries = [self._entry(p, found.files[p]) for p in paths if p in found.files]
        entries += [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            for path in paths
            if any(name.startswith(f"{path.rstrip('/')}/") for name in found.files)
        ]
        self._json(entries)

    def _read(self, kind: str | None, repo: str, revision: str, path: str) -> None:
        found = self._readable(kind, repo, revision)
        if path not in found.files:
            raise _Answer(404, f"{path} does not exist", "EntryNotFound")
        content = found.files[path]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": found.commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        status = 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            if first >= len(content):
                raise _Answer(416, "range lies beyond the end")
            headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
            content, status = content[first : last + 1], 206
        cut, hub = self.hub.cut_next_read_at, self.hub
        if cut is not None and self.command == "GET":
            hub.cut_next_read_at = None
            headers["Content-Length"] = str(len(content))
            self._send(status, content[:cut], headers)
            self.close_connection = True
        else:
            headers["Content-Length"] = str(len(content))
            self._send(status, content, headers)
