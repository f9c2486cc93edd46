"""What a model's safetensors headers say while its weights stay where they are: ranged reads on the Hub, none of its tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from remoe_cli.console import progress
from remoe_cli.errors import CheckpointError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, indexed, placed, read_header, SINGLE, TensorInfo
from remoe_cli.hub.download import AT_ONCE, cached, download, RemoteFile
from remoe_cli.hub.failures import explain
from remoe_cli.hub.resolve import Found, weight_files
from remoe_cli.hub.waiting import ask_all

_FEW = 8  # files whose headers are there before a bar is worth its line


@dataclass(frozen=True)
class Headers(Checkpoint):
    """A checkpoint of which only the headers are here; tensors cannot be read. places: on-disk name -> place, empty where no
    header can be read; absent: why, in a few words, "" where all are here. Offsets of remote files count from their data."""

    places: dict[str, TensorInfo] = field(default_factory=dict, repr=False)
    absent: str = ""

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.places


def fetch_headers(found: Found) -> Headers:
    """The headers of all weight files, or none of them where a folder (or the cache, with the Hub out of reach) lacks one.

    Raises HubError, also for a repository without safetensors, and CheckpointError for a damaged header.
    """
    if found.commit is not None and found.files is not None:
        return _remote(found, found.commit, found.files)
    names = indexed(found.folder / INDEX) if (found.folder / INDEX).is_file() else [SINGLE]
    here = [name for name in names if (found.folder / name).is_file()]
    bare = Headers(found.folder, found.id, found.commit, found.config)
    if len(here) < len(names):
        absent = f"{len(here)} of {len(names)} weight files are here" if here else "no weight file is here"
        return Headers(found.folder, found.id, found.commit, found.config, {}, absent)
    return Headers(found.folder, found.id, found.commit, found.config, _merged([bare._header(p) for p in bare.files]))


def _remote(found: Found, commit: str, files: dict[str, RemoteFile]) -> Headers:
    if INDEX in files:
        download(found.id, commit, {INDEX: files[INDEX]})
    names = weight_files(found, files)
    done = [0]
    jobs = [_job(found, commit, name, files[name].size, done) for name in names]
    if len(names) <= _FEW:
        return Headers(found.folder, found.id, commit, found.config, _merged(ask_all(jobs, at_once=AT_ONCE)))
    with progress("headers", len(names)) as bar:
        read = ask_all(jobs, at_once=AT_ONCE, tick=lambda: bar.update(done[0]))
    return Headers(found.folder, found.id, commit, found.config, _merged(read))


def _job(
    found: Found, commit: str, name: str, size: int | None, done: list[int]
) -> Callable[[], dict[str, TensorInfo]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    def fetch() -> dict[str, TensorInfo]:
        try:
            if (held := cached(found.id, name, commit)) is not None:
                return read_header(held)
            header = HfApi().parse_safetensors_file_metadata(found.id, name, revision=commit)
            entries = {tensor: vars(info) for tensor, info in header.tensors.items()}
            return placed(Path(name), entries, 0, 2**63 if size is None else size)
        except (SafetensorsParsingError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = str(error) if type(error) is ValueError else "its header cannot be read"
            hint = f"another @REVISION of {found.id}"
            raise CheckpointError(f"{name} of {found.id}@{commit[:8]} is damaged: {why}.", hint) from error
        except Exception as error:  # the library raises its own and httpx's: explain tells them apart
            raise explain(error, found.id, revision=commit, file=name) from error
        finally:
            done[0] += 1

    return fetch


def _merged(headers: list[dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
    return {name: info for header in headers for name, info in header.items()}
