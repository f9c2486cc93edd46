"""The routes of the loopback Hub: what huggingface_hub asks of a server, read and write."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

if TYPE_CHECKING:
    from loopback_hub import Account, Fault, LoopbackHub, Repo

LFS_SUFFIXES = (".safetensors", ".bin", ".parquet", ".pt", ".gguf")


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self._read_body()
        self.fault: Fault | None = self.server.take_fault(f"{self.command} {unquote(parts.path)}")
        if self.fault:
            time.sleep(self.fault.delay)
            if self.fault.cut == "answer":
                self.close_connection = True
                return
        try:
            if self.fault and self.fault.status:
                token = self.headers.get("Authorization", "")
                raise Refused(self.fault.status, self.fault.message.format(token=token))
            self.account = self._account()
            for pattern, handle in _ROUTES:
                if match := re.fullmatch(pattern, parts.path):  # still quoted: a revision may hold a slash
                    handle(self, **{name: value and unquote(value) for name, value in match.groupdict().items()})
                    return
            raise Refused(404, "no such route")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message, "X-Error-Code": refused.code}
            self._json({"error": refused.message}, refused.status, {k: v for k, v in headers.items() if v})

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        fault = self.fault
        if fault and fault.corrupt and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_response(status)
        named = {"Content-Length": str(len(data)), **(headers or {}), **(fault.headers if fault else {})}
        for name, value in named.items():
            self.send_header(name, value)
        if fault and fault.cut == "headers":
            self._headers_buffer[-1] = self._headers_buffer[-1][:5]
            self.flush_headers()
            self.close_connection = True
            return
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.keep is not None and not fault.status and len(data) > fault.keep:
            data, self.close_connection = data[: fault.keep], True
        step = max(1, -(-len(data) // fault.pieces)) if fault and fault.pace else max(1, len(data))
        for start in range(0, len(data), step):
            time.sleep(fault.pace if fault else 0)
            self.wfile.write(data[start : start + step])

    # Who asks, and may they?

    def _account(self) -> Account | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.accounts:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.server.accounts[token] if token else None

    def _repo(self, kind: str | None, repo_id: str) -> Repo:
        repo = self.server.repos.get(((kind or "model").removesuffix("s"), repo_id))
        if repo is None or (repo.private and not self._owns(repo_id)):
            raise Refused(404 if self.account else 401, "Repository not found", "RepoNotFound")
        return repo

    def _owns(self, repo_id: str) -> bool:
        return self.account is not None and self.account.name == repo_id.split("/")[0]

    def _readable(self, repo: Repo) -> None:
        if repo.gated and (self.account is None or repo.id not in self.account.granted):
            status = 401 if self.account is None else 403
            raise Refused(status, f"Access to {repo.kind} {repo.id} is restricted.", "GatedRepo")

    def _writable(self, kind: str, repo_id: str, propose: bool = False) -> Repo:
        repo = self._repo(kind, repo_id)
        propose = propose or "create_pr" in self.query
        if self.account is None or not (propose or (self.account.write and self._owns(repo_id))):
            raise Refused(403, f"You do not have write access to {repo_id}", "Forbidden")
        return repo

    def _at(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]]:
        if sha := repo.find(revision):
            return sha, repo.commits[sha]
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    # Reading

    def info(self, kind: str, repo: str, revision: str | None = None) -> None:
        found = self._repo(kind, repo)
        sha, files = self._at(found, revision or "main")
        sized = "blobs" in self.query
        siblings = [self._sibling(p, data) if sized else {"rfilename": p} for p, data in files.items()]
        fixed = {"id": repo, "private": found.private, "gated": "auto" if found.gated else False, "tags": []}
        self._json({**fixed, "sha": sha, "siblings": siblings, "cardData": _card_data(files)})

    def list_models(self) -> None:
        """Those that carry every asked tag; tags are what the card says, and its base as the Hub writes it."""
        wanted, found = {*self.query.get("filter", [])}, []
        for (kind, repo), held in self.server.repos.items():
            files = held.commits[held.refs["main"]]
            if kind == "model" and wanted <= (tags := _tags(files)) and (not held.private or self._owns(repo)):
                found.append({"id": repo, "tags": sorted(tags), "private": held.private})
        self._json(found[: int(self.query.get("limit", ["1000"])[0])])

    def auth_check(self, kind: str, repo: str) -> None:
        self._readable(self._repo(kind, repo))
        self._json({})

    def tree(self, kind: str, repo: str, revision: str, folder: str | None) -> None:
        _, files = self._at(self._repo(kind, repo), revision)
        prefix = f"{folder}/" if folder else ""
        below = {path: data for path, data in files.items() if path.startswith(prefix)}
        if folder and not below:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        folders = {path[: i + len(prefix)] for path in below for i, c in enumerate(path[len(prefix) :]) if c == "/"}
        entries = [_folder_entry(path) for path in sorted(folders) if deep or "/" not in path[len(prefix) :]]
        entries += [self._entry(p, data) for p, data in below.items() if deep or "/" not in p[len(prefix) :]]
        self._json(entries)

    def paths_info(self, kind: str, repo: str, revision: str) -> None:
        _, files = self._at(self._repo(kind, repo), revision)
        asked = parse_qs(self.body.decode()).get("paths", [])
        found = [self._entry(p, files[p]) for p in asked if p in files]
        self._json(found + [_folder_entry(p) for p in asked if any(f.startswith(f"{p}/") for f in files)])

    def refs(self, kind: str, repo: str) -> None:
        known = self._repo(kind, repo).refs.items()
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in known
            if not name.startswith("refs/")
        ]
        self._json({"branches": branches, "tags": [], "converts": []})

    def resolve(self, kind: str | None, repo: str, revision: str, path: str) -> None:
        found = self._repo(kind, repo)
        self._readable(found)
        sha, files = self._at(found, revision)
        if path not in files:
            return self._send(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        data, status, headers = files[path], 200, {}
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        if self.command == "GET":
            with self.server.lock:
                self.server.sent += len(data)
        tag = f'"{etag(path, files[path])}"'
        self._send(data, status, {**headers, "X-Repo-Commit": sha, "ETag": tag, "Accept-Ranges": "bytes"})

    def _sibling(self, path: str, data: bytes) -> dict:
        size = self._size(path, data)
        lfs = {"sha256": etag(path, data), "size": size, "pointerSize": 134} if path.endswith(LFS_SUFFIXES) else None
        return {"rfilename": path, "size": size, "blobId": blob_id(data), **({"lfs": lfs} if lfs else {})}

    def _entry(self, path: str, data: bytes) -> dict:
        entry = {"type": "file", "oid": blob_id(data), "size": self._size(path, data), "path": path}
        if path.endswith(LFS_SUFFIXES):
            entry["lfs"] = {"oid": etag(path, data), "size": entry["size"], "pointerSize": 134}
        return entry

    def _size(self, path: str, data: bytes) -> int:
        return self.server.sizes.get(path, len(data))

    # Writing

    def whoami(self) -> None:
        if self.account is None:
            raise Refused(401, "Invalid username or password.")
        self._json({"type": "user", "name": self.account.name, "orgs": []})

    def create(self) -> None:
        asked = json.loads(self.body)
        if self.account is None:
            raise Refused(401, "Invalid username or password.")
        repo_id = f"{asked.get('organization') or self.account.name}/{asked['name']}"
        kind = asked.get("type") or "model"
        url = f"{self.server.url}/{'datasets/' if kind == 'dataset' else ''}{repo_id}"
        if (kind, repo_id) in self.server.repos:
            self._json({"error": "You already created this repository", "url": url}, 409)
        elif not self.account.write or not self._owns(repo_id):
            raise Refused(403, f"You do not have the rights to create a {kind} under this namespace", "Forbidden")
        else:
            self.server.add(kind, repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"})
            self.server.repos[kind, repo_id].private = asked.get("visibility") == "private"
            self._json({"url": url, "name": repo_id})

    def preupload(self, kind: str, repo: str, revision: str) -> None:
        _, files = self._at(self._writable(kind, repo), revision)
        answers = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            known = {"oid": etag(path, files[path])} if path in files else {}
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        self._json({"files": answers})

    def lfs_batch(self, kind: str | None, repo: str) -> None:
        self._writable(kind or "model", repo, propose=True)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            href = f"{self.server.url}/lfs/{asked['oid']}"
            upload = {"upload": {"href": href}, "verify": {"href": f"{self.server.url}/lfs/verify"}}
            objects.append(asked | ({} if asked["oid"] in self.server.objects else {"actions": upload}))
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, "content and sha256 differ")
        self.server.objects[oid] = self.body
        self._json({})

    def lfs_verify(self) -> None:
        asked = json.loads(self.body)
        if len(self.server.objects.get(asked["oid"], b"")) != asked["size"]:
            raise Refused(400, "object is missing or has another size")
        self._json({})

    def branch(self, kind: str, repo: str, name: str) -> None:
        found = self._writable(kind, repo)
        if name in found.refs:
            raise Refused(409, f"Reference already exists: {name}")
        start = (json.loads(self.body) if self.body else {}).get("startingPoint", "main")
        found.refs[name] = self._at(found, start)[0]
        self._json({})

    def commit(self, kind: str, repo: str, revision: str) -> None:
        found = self._writable(kind, repo)
        before, files = self._at(found, revision)
        files, header = dict(files), {}
        for line in self.body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                files.pop(value["path"])
        if header.get("parentCommit", before) != before:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        answer = {"success": True}
        if "create_pr" in self.query:
            number = len(found.requests) + 1
            found.requests.append({"num": number, "title": header["summary"], "status": "open", "isPullRequest": True})
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.url}/{repo}/discussions/{number}"
        sha = found.commit(files, revision)
        for path, data in files.items() if self.server.root and revision == "main" else ():
            target = Path(str(self.server.root), f"{found.kind}s", repo, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        self._json({**answer, "commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha})

    def discussions(self, kind: str, repo: str) -> None:
        found = self._repo(kind, repo)
        wanted = self.query.get("status", [""])[0]
        fixed = {"createdAt": "2026-01-01T00:00:00.000Z", "repo": {"name": repo, "type": found.kind}}
        listed = [{**fixed, **one} for one in found.requests if wanted in ("", one["status"])]
        self._json({"discussions": listed, "count": len(listed), "start": 0})

    def merge(self, kind: str, repo: str, number: str) -> None:
        found = self._writable(kind, repo)
        found.requests[int(number) - 1]["status"] = "merged"
        found.commit(found.commits[found.refs[f"refs/pr/{number}"]])
        self._json({})


_API, _ID = r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)", r"(?P<repo>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/api/whoami-v2", Handler.whoami),
    (r"/api/repos/create", Handler.create),
    (r"/api/models", Handler.list_models),
    (r"/api/validate-yaml", lambda handler: handler._json({"errors": [], "warnings": []})),
    (rf"{_API}(?:/revision/(?P<revision>[^/]+))?", Handler.info),
    (rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", Handler.tree),
    (rf"{_API}/paths-info/(?P<revision>[^/]+)", Handler.paths_info),
    (rf"{_API}/auth-check", Handler.auth_check),
    (rf"{_API}/refs", Handler.refs),
    (rf"{_API}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (rf"{_API}/commit/(?P<revision>[^/]+)", Handler.commit),
    (rf"{_API}/branch/(?P<name>[^/]+)", Handler.branch),
    (rf"{_API}/discussions", Handler.discussions),
    (rf"{_API}/discussions/(?P<number>\d+)/merge", Handler.merge),
    (rf"/(?:(?P<kind>datasets)/)?{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    (rf"/(?:(?P<kind>datasets)/)?{_ID}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"/lfs/verify", Handler.lfs_verify),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs_put),
]  # the first whole match wins


def blob_id(data: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if path.endswith(LFS_SUFFIXES) else blob_id(data)


def _card_data(files: Mapping[str, bytes]) -> dict | None:
    parts = files.get("README.md", b"").decode(errors="replace").split("---\n", 2)
    return yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None


def _tags(files: Mapping[str, bytes]) -> set[str]:
    card = _card_data(files) or {}
    base, relation = card.get("base_model"), card.get("base_model_relation")
    return {*card.get("tags", []), *([f"base_model:{base}", f"base_model:{relation}:{base}"] if base else [])}


def _folder_entry(path: str) -> dict:
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
