"""Files of one commit into the Hugging Face cache, each checked against the digest that the Hub gives for it."""

import hashlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli.console import progress
from remoe_cli.errors import HubError
from remoe_cli.hub.failures import explain
from remoe_cli.hub.waiting import ask_all

AT_ONCE = 8
_BLOCK = 1 << 20


class RemoteFile(NamedTuple):
    """size in bytes; sha256 of a large file's content (LFS); blob_id: git's sha1 of a small one; None: not told."""

    size: int | None
    sha256: str | None
    blob_id: str | None

    def matches(self, path: Path) -> bool:
        """True when the file's content has this size and digest, as far as they were told. Reads all of it."""
        held = path.stat().st_size
        if self.size not in (None, held):
            return False
        if self.sha256 is not None:
            return _digest(path, hashlib.sha256()) == self.sha256
        return self.blob_id is None or _digest(path, hashlib.sha1(b"blob %d\0" % held)) == self.blob_id


def remote_files(info: Any) -> dict[str, RemoteFile]:
    """Name -> what the Hub says of it, from model_info(..., files_metadata=True)."""
    return {
        sibling.rfilename: RemoteFile(sibling.size, sibling.lfs.sha256 if sibling.lfs else None, sibling.blob_id)
        for sibling in info.siblings or []
    }


def total_size(files: dict[str, RemoteFile]) -> int | None:
    """None when the Hub does not tell all sizes."""
    sizes = [file.size for file in files.values()]
    return None if None in sizes else sum(size or 0 for size in sizes)


def cached(repo: str, name: str, revision: str | None) -> Path | None:
    """The file in the cache, or None. revision: a commit, or a branch or tag that was asked for before."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def download(repo: str, commit: str, files: dict[str, RemoteFile], *, large: bool = False) -> None:
    """Fetches what the cache lacks. A file is whole and has the right digest, or it is not in the cache.

    large: show progress on stderr, and take what is in the cache already on trust; else that is checked too, and
    fetched again where it is damaged. Raises HubError; after Ctrl-C or an error the whole files so far stay.
    """
    absent = {}
    for name, file in files.items():
        held = cached(repo, name, commit)
        if held is not None and (large or file.matches(held)):
            continue
        if held is not None:
            _remove(held)
        absent[name] = file
    stopped, received, lock = threading.Event(), [0], threading.Lock()

    def count(n: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        with lock:
            received[0] += n

    total = total_size(absent)
    with progress("download", total, in_bytes=True) if large and total else nullcontext() as bar:
        try:
            ask_all(
                [_job(repo, commit, name, file, _meter(count)) for name, file in absent.items()],
                at_once=AT_ONCE,
                tick=lambda: bar.update(min(received[0], total)) if bar and total else None,
                stop=stopped.set,
            )
        except BaseException:
            _drop_partial_files()
            raise


def _job(repo: str, commit: str, name: str, file: RemoteFile, meter: type) -> Callable[[], None]:
    from huggingface_hub import hf_hub_download

    def fetch() -> None:
        try:
            path = Path(hf_hub_download(repo, name, revision=commit, tqdm_class=meter))
            whole = file.matches(path)
        except (
            Exception
        ) as error:  # the library raises its own, httpx's and the file system's: explain tells them apart
            raise explain(error, repo, revision=commit, file=name) from error
        if not whole:
            _remove(path)
            raise HubError(
                f"{name} of {repo} arrived with another content than the Hub announces (size or hash); it was removed.",
                "the same command again (whole files are kept)",
            )

    return fetch


def _remove(path: Path) -> None:
    """Out of the cache: the content and the name in the snapshot that links to it."""
    try:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise HubError(f"{path} is damaged and cannot be removed ({error.strerror}).", f"rm {path}") from None


def _meter(count: Callable[[int], None]) -> type:
    """A progress bar for huggingface_hub that shows nothing and calls count(bytes); what that raises ends the download."""
    from tqdm import tqdm

    class Meter(tqdm):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the wire, where they differ from those in the file: not counted."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

    return Meter


def _drop_partial_files() -> None:
    """Removes what this process still writes: a name of its own for each try, which no later try would go on with.

    Works where /proc lists open files (Linux).
    """
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = entry.readlink()
        except OSError:
            continue
        if target.name.endswith(".incomplete"):
            target.unlink(missing_ok=True)


def _digest(path: Path, digest: Any) -> str:
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
