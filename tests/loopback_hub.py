"""A small Hugging Face Hub on 127.0.0.1, from the standard library alone, for tests against the real clients.

    with LoopbackHub() as hub:
        hub.add("model", "org/tiny", {"config.json": b"{}"})
        ...  # run a process with HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET=1 and a fresh HF_HOME (hub.environment(home))

    python tests/loopback_hub.py --root DIR --port N      # serves DIR/models/ORG/NAME/* and DIR/datasets/ORG/NAME/*

`hub.log` holds every request as "METHOD path"; `hub.faults` makes requests fail. Content pushed in --root mode is
also written below DIR. Xet is not spoken: clients need HF_HUB_DISABLE_XET=1 before they import huggingface_hub.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".parquet", ".pt", ".gguf")


@dataclass
class Fault:
    """pattern: regular expression over "METHOD path"; status: answered instead, or 0: cut the body at `keep` bytes."""

    pattern: str
    status: int = 0
    keep: int = 0
    times: int = 10**9


@dataclass
class Account:
    name: str
    write: bool = True
    granted: tuple[str, ...] = ()  # gated repositories this account may read


@dataclass
class Repo:
    kind: str
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        parent = self.refs.get(branch, "")
        seed = "\0".join([self.id, parent, *(f"{path} {_blob_id(data)}" for path, data in sorted(files.items()))])
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        """The full commit of a branch, a tag, or a commit written out or shortened to at least 7 digits."""
        if revision in self.refs:
            return self.refs[revision]
        return next((sha for sha in self.commits if len(revision) >= 7 and sha.startswith(revision)), None)


class LoopbackHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0, root: Path | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.root = root
        self.repos: dict[tuple[str, str], Repo] = {}
        self.accounts: dict[str, Account] = {}
        self.objects: dict[str, bytes] = {}  # LFS content by sha256
        self.faults: list[Fault] = []
        self.sizes: dict[str, int] = {}  # a path's size as *claimed*, to play a file too large for the disk
        self.log: list[str] = []
        self.lock = threading.Lock()
        for kind in ("model", "dataset"):
            for folder in sorted((root / f"{kind}s").glob("*/*")) if root else ():
                paths = sorted(p for p in folder.rglob("*") if p.is_file())
                self.add(kind, "/".join(folder.parts[-2:]), {str(p.relative_to(folder)): p.read_bytes() for p in paths})

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def add(self, kind: str, repo_id: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Commits `files` as the whole content of a branch, making the repository if need be. Returns the commit."""
        return self.repos.setdefault((kind, repo_id), Repo(kind, repo_id)).commit(files, branch)

    def files(self, kind: str, repo_id: str) -> dict[str, bytes]:
        repo = self.repos[kind, repo_id]
        return repo.commits[repo.refs["main"]]

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """What a client process needs in its environment: this endpoint, a clean home, no Xet, perhaps a token."""
        fixed = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        return {**fixed, "HF_HUB_DISABLE_TELEMETRY": "1", **({"HF_TOKEN": token} if token else {})}

    def take_fault(self, request: str) -> Fault | None:
        with self.lock:
            self.log.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self._read_body()
        self.fault = self.server.take_fault(f"{self.command} {unquote(parts.path)}")
        try:
            if self.fault and self.fault.status:
                raise _Refused(self.fault.status, "the server is told to fail")
            self.account = self._account()
            for pattern, handle in _ROUTES:
                if match := re.fullmatch(pattern, parts.path):  # still quoted: a revision may hold a slash
                    handle(self, **{name: value and unquote(value) for name, value in match.groupdict().items()})
                    return
            raise _Refused(404, "no such route")
        except _Refused as refused:
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
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault and not self.fault.status and len(data) > self.fault.keep:
            self.wfile.write(data[: self.fault.keep])
            self.close_connection = True
        else:
            self.wfile.write(data)

    # Who asks, and may they?

    def _account(self) -> Account | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.accounts:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return self.server.accounts[token] if token else None

    def _repo(self, kind: str | None, repo_id: str) -> Repo:
        repo = self.server.repos.get(((kind or "model").removesuffix("s"), repo_id))
        if repo is None or (repo.private and not self._owns(repo_id)):
            raise _Refused(404 if self.account else 401, "Repository not found", "RepoNotFound")
        return repo

    def _owns(self, repo_id: str) -> bool:
        return self.account is not None and self.account.name == repo_id.split("/")[0]

    def _readable(self, repo: Repo) -> None:
        if repo.gated and (self.account is None or repo.id not in self.account.granted):
            status = 401 if self.account is None else 403
            raise _Refused(status, f"Access to {repo.kind} {repo.id} is restricted.", "GatedRepo")

    def _writable(self, kind: str, repo_id: str) -> Repo:
        repo = self._repo(kind, repo_id)
        if self.account is None or not self.account.write or not self._owns(repo_id):
            raise _Refused(403, f"You do not have write access to {repo_id}", "Forbidden")
        return repo

    def _at(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]]:
        if sha := repo.find(revision):
            return sha, repo.commits[sha]
        raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    # Reading

    def info(self, kind: str, repo: str, revision: str | None = None) -> None:
        found = self._repo(kind, repo)
        sha, files = self._at(found, revision or "main")
        sized = "blobs" in self.query
        siblings = [{"rfilename": p, **({"size": self._size(p, data)} if sized else {})} for p, data in files.items()]
        gated = "auto" if found.gated else False
        self._json({"id": repo, "sha": sha, "private": found.private, "gated": gated, "siblings": siblings, "tags": []})

    def auth_check(self, kind: str, repo: str) -> None:
        self._readable(self._repo(kind, repo))
        self._json({})

    def tree(self, kind: str, repo: str, revision: str, folder: str | None) -> None:
        _, files = self._at(self._repo(kind, repo), revision)
        prefix = f"{folder}/" if folder else ""
        below = {path: data for path, data in files.items() if path.startswith(prefix)}
        if folder and not below:
            raise _Refused(404, f"{folder} does not exist", "EntryNotFound")
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
        branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in known]
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
        tag = f'"{_etag(path, files[path])}"'
        self._send(data, status, {**headers, "X-Repo-Commit": sha, "ETag": tag, "Accept-Ranges": "bytes"})

    def _entry(self, path: str, data: bytes) -> dict:
        entry = {"type": "file", "oid": _blob_id(data), "size": self._size(path, data), "path": path}
        if path.endswith(LFS_SUFFIXES):
            entry["lfs"] = {"oid": _etag(path, data), "size": entry["size"], "pointerSize": 134}
        return entry

    def _size(self, path: str, data: bytes) -> int:
        return self.server.sizes.get(path, len(data))

    # Writing

    def whoami(self) -> None:
        if self.account is None:
            raise _Refused(401, "Invalid username or password.")
        self._json({"type": "user", "name": self.account.name, "orgs": []})

    def create(self) -> None:
        asked = json.loads(self.body)
        if self.account is None:
            raise _Refused(401, "Invalid username or password.")
        repo_id = f"{asked.get('organization') or self.account.name}/{asked['name']}"
        kind = asked.get("type") or "model"
        url = f"{self.server.url}/{'datasets/' if kind == 'dataset' else ''}{repo_id}"
        if (kind, repo_id) in self.server.repos:
            self._json({"error": "You already created this repository", "url": url}, 409)
        elif not self.account.write or not self._owns(repo_id):
            raise _Refused(403, f"You do not have the rights to create a {kind} under this namespace", "Forbidden")
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
            known = {"oid": _etag(path, files[path])} if path in files else {}
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        self._json({"files": answers})

    def lfs_batch(self, kind: str | None, repo: str) -> None:
        self._writable(kind or "model", repo)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            href = f"{self.server.url}/lfs/{asked['oid']}"
            upload = {"upload": {"href": href}, "verify": {"href": f"{self.server.url}/lfs/verify"}}
            objects.append(asked | ({} if asked["oid"] in self.server.objects else {"actions": upload}))
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "content and sha256 differ")
        self.server.objects[oid] = self.body
        self._json({})

    def lfs_verify(self) -> None:
        asked = json.loads(self.body)
        if len(self.server.objects.get(asked["oid"], b"")) != asked["size"]:
            raise _Refused(400, "object is missing or has another size")
        self._json({})

    def commit(self, kind: str, repo: str, revision: str) -> None:
        found = self._writable(kind, repo)
        files = dict(self._at(found, revision)[1])
        for line in self.body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                files.pop(value["path"])
        sha = found.commit(files, revision)
        for path, data in files.items() if self.server.root else ():
            target = Path(str(self.server.root), f"{found.kind}s", repo, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        self._json({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})


_API, _ID = r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)", r"(?P<repo>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", lambda handler: handler._json({"errors": [], "warnings": []})),
    (rf"{_API}(?:/revision/(?P<revision>[^/]+))?", _Handler.info),
    (rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", _Handler.tree),
    (rf"{_API}/paths-info/(?P<revision>[^/]+)", _Handler.paths_info),
    (rf"{_API}/auth-check", _Handler.auth_check),
    (rf"{_API}/refs", _Handler.refs),
    (rf"{_API}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (rf"{_API}/commit/(?P<revision>[^/]+)", _Handler.commit),
    (rf"/(?:(?P<kind>datasets)/)?{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    (rf"/(?:(?P<kind>datasets)/)?{_ID}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"/lfs/verify", _Handler.lfs_verify),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
]  # the first whole match wins


def _blob_id(data: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _etag(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if path.endswith(LFS_SUFFIXES) else _blob_id(data)


def _folder_entry(path: str) -> dict:
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="0: any free one; the first line says which")
    parser.add_argument("--account", action="append", default=[], metavar="NAME:TOKEN", help="may write under NAME/")
    for flag in ("--gated", "--private"):
        parser.add_argument(flag, action="append", default=[], metavar="ORG/NAME")
    parser.add_argument("--fault", action="append", default=[], metavar="STATUS:REGEX")
    args = parser.parse_args()
    hub = LoopbackHub(args.port, args.root)
    for name, token in (pair.split(":") for pair in args.account):
        hub.accounts[token] = Account(name)
    hub.faults = [Fault(regex, int(status)) for status, regex in (text.split(":", 1) for text in args.fault)]
    for repo in hub.repos.values():
        repo.gated, repo.private = repo.id in args.gated, repo.id in args.private
    print(hub.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        hub.serve_forever()


if __name__ == "__main__":
    main()
