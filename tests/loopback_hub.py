"""A small Hugging Face Hub on 127.0.0.1, from the standard library alone, for tests against the real clients.

    with LoopbackHub() as hub:
        hub.add("model", "org/tiny", {"config.json": b"{}"})
        ...  # run a process with HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET=1 and a fresh HF_HOME (hub.environment(home))

    python tests/loopback_hub.py --root DIR --port N      # serves DIR/models/ORG/NAME/* and DIR/datasets/ORG/NAME/*

`hub.log` holds every request as "METHOD path"; `hub.faults` makes requests fail; the routes are in loopback_routes.py. Content pushed in --root mode is
also written below DIR. Xet is not spoken: clients need HF_HUB_DISABLE_XET=1 before they import huggingface_hub.
"""

import argparse
import contextlib
import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from loopback_routes import blob_id, Handler


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" `pattern` finds.

    Before the answer: `delay` seconds pass. The answer: `status` with `message` ({token} is the asker's) instead of the
    real one; or none at all, or one that ends inside its headers (`cut`). Of the real answer: `headers` are added or
    replaced, the last byte of the body is another one (`corrupt`), the body ends after `keep` bytes, or comes in `pieces`
    with `pace` seconds before each.
    """

    pattern: str
    status: int = 0
    message: str = "the server is told to fail"
    headers: dict[str, str] = field(default_factory=dict)
    cut: Literal["", "answer", "headers"] = ""
    keep: int | None = None
    delay: float = 0
    pace: float = 0
    pieces: int = 20
    corrupt: bool = False
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
    requests: list[dict] = field(default_factory=list)  # pull requests; number N is refs/pr/N

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        parent = self.refs.get(branch, "")
        seed = "\0".join([self.id, parent, *(f"{path} {blob_id(data)}" for path, data in sorted(files.items()))])
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
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.root = root
        self.repos: dict[tuple[str, str], Repo] = {}
        self.accounts: dict[str, Account] = {}
        self.objects: dict[str, bytes] = {}  # LFS content by sha256
        self.faults: list[Fault] = []
        self.sizes: dict[str, int] = {}  # a path's size as *claimed*, to play a file too large for the disk
        self.log: list[str] = []
        self.sent = 0  # bytes of files, ranges or whole
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
