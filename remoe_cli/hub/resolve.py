"""From what a user calls a model to a folder with its files: "demo", a local folder, or a Hub id with @revision."""

import contextlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remoe_cli import atomic
from remoe_cli.console import note
from remoe_cli.errors import CheckpointError, HubError, RunError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, indexed, read_object, SINGLE
from remoe_cli.hub.download import cached, download, remote_files, RemoteFile, total_size
from remoe_cli.hub.failures import cache, endpoint, explain, has_token, MissingError, offline, timeout, unreachable
from remoe_cli.hub.waiting import ask

_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # config and every kind of tokenizer
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Found:
    """A model before its weights are here. commit: 40 hex digits for a Hub model, None for a folder.

    files: what the Hub holds at that commit; None for a folder, or when only the cache could answer.
    """

    id: str
    commit: str | None
    folder: Path
    config: dict = field(repr=False)
    files: dict[str, RemoteFile] | None = field(default=None, repr=False)


def resolve(model: str | Found) -> Checkpoint:
    """The model's files on this disk, downloaded into the Hugging Face cache where need be (progress on stderr).

    model: "demo", a local folder, "org/name" or "org/name@revision"; or what `fetch_config` found. Of a Hub repository
    only config, tokenizer and safetensors come, never pickles. Raises HubError or CheckpointError.
    """
    found = model if isinstance(model, Found) else fetch_config(model)
    if found.commit is not None:
        _fetch_weights(found, found.commit)
    return Checkpoint.open(found.folder, found.id, found.commit)


def fetch_config(model: str) -> Found:
    """Only the config, so that a model can be refused before its weights are downloaded; pins the commit.

    Raises HubError or CheckpointError.
    """
    if model == "demo":
        from remoe_cli import demo

        return _local("demo", demo.PATH)
    if Path(model).expanduser().is_dir():
        return _local(model, Path(model).expanduser())
    repo, revision = split(model)
    commit, files = _pinned(repo, revision, "config.json", model)
    if files is not None:
        if "config.json" not in files:
            page = f"{endpoint()}/{repo}"
            raise HubError(f"{page} has no config.json, so it is no model that remoe can read.", f"open {page}")
        download(repo, commit, {"config.json": files["config.json"]})
    folder = _folder(repo, revision, commit, "config.json")
    return Found(repo, commit, folder, read_object(folder / "config.json"), files)


def fetch_repository(
    name: str, needed: Sequence[str], others: Sequence[str] = (), large: Sequence[str] = ()
) -> tuple[Path, str]:
    """The named files of a delta, those of `others` where there are any, and the commit they are of.

    name: "org/name[@revision]". large: patterns; every file at the top that one matches comes too, announced and with
    progress. Raises HubError, also when a needed file is not there, or none of a pattern.
    """
    repo, revision = split(name, "delta")
    commit, files = _pinned(repo, revision, needed[0], name, "delta")
    if files is not None:
        top = [file for file in files if "/" not in file]
        lacking = [wanted for wanted in (*needed, *large) if not any(Path(file).match(wanted) for file in top)]
        if lacking:
            raise HubError(f"{repo} on {endpoint()} holds no {lacking[0]}.", f"open {endpoint()}/{repo}")
        download(repo, commit, {wanted: files[wanted] for wanted in (*needed, *others) if wanted in files})
        _fetch_large(repo, commit, {file: files[file] for file in top if any(Path(file).match(p) for p in large)})
    folder = _folder(repo, revision, commit, needed[0])
    absent = [wanted for wanted in (*needed, *large) if not any(folder.glob(wanted))]
    if absent:
        raise _incomplete(repo, "delta", f"the cache {cache()} lacks {absent[0]} of {repo}")
    return folder, commit


def holds(name: str, file: str) -> bool:
    """Whether a Hub repository, "org/name[@revision]", has that file; with the Hub out of reach, whether the cache has it.
    Raises HubError."""
    repo, revision = split(name)
    if cached(repo, file, revision) is not None:
        return True
    files = _pinned(repo, revision, "config.json", name)[1]
    return files is not None and file in files


def split(model: str, kind: str = "model") -> tuple[str, str | None]:
    """("org/name", revision or None). kind: model or delta. Raises HubError for what can only be a path, or is no Hub id."""
    repo, _, revision = model.partition("@")
    hint = "remoe finetune demo, a folder with a config.json, or a Hub id such as deepseek-ai/DeepSeek-V2-Lite"
    if kind == "delta":
        hint = "remoe runs, for those here, or the Hub id of a delta (user/name)"
    if Path(model).is_file():
        form = "in Hugging Face format " if kind == "model" else ""
        raise HubError(f"{model} is a file; a {kind} is a folder {form}or a Hub id.", hint)
    if not _ID.fullmatch(repo) or ".." in repo or "--" in repo or model.endswith("@"):
        raise HubError(f"there is no folder {model}, and that is not a Hub id (org/name, org/name@revision).", hint)
    return repo, revision or None


def _local(name: str, folder: Path) -> Found:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"the folder {name} has no config.json, so it is not a model folder.", f"ls {folder}")
    return Found(name, None, folder, read_object(folder / "config.json"))


def _pinned(
    repo: str, revision: str | None, name: str, asked: str, kind: str = "model"
) -> tuple[str, dict[str, RemoteFile] | None]:
    """The commit behind a revision and its files; with the Hub out of reach, the commit under which the cache has `name`."""
    from huggingface_hub import constants, HfApi

    try:
        info = ask(lambda: HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout()))
    except Exception as error:  # the library raises its own, httpx's and the file system's: explain tells them apart
        held = cached(repo, name, revision) if unreachable(error) else None
        if held is not None:
            if not constants.HF_HUB_OFFLINE:
                note(f"{endpoint()} gives no answer; {repo}@{held.parent.name[:8]} comes from the cache")
            return held.parent.name, None
        reason = explain(error, repo, kind, revision)
        if isinstance(reason, MissingError):
            raise HubError(f"there is no folder ./{asked}, and {reason.message}", reason.hint) from error
        raise reason from error
    return str(info.sha), remote_files(info)


def _folder(repo: str, revision: str | None, commit: str, name: str) -> Path:
    """The cache's `snapshots/<commit>` that holds `name`. Notes which commit the revision means, for when the Hub is away."""
    held = cached(repo, name, commit)
    if held is None:
        raise HubError(f"the cache {cache()} lost {name} of {repo} while it was read.", "the same command again")
    folder = held.parent
    reference = folder.parent.parent / "refs" / (revision or "main")
    if revision != commit and not (reference.is_file() and reference.read_text() == commit):
        with contextlib.suppress(OSError, RunError):  # a read-only cache still serves
            reference.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(reference, commit)
    return folder


def _fetch_weights(found: Found, commit: str) -> None:
    if found.files is None:
        return _check_cached(found)
    names = [name for name in found.files if "/" not in name and any(Path(name).match(p) for p in _BESIDE_WEIGHTS)]
    download(found.id, commit, {name: found.files[name] for name in names})
    shards = weight_files(found, found.files)
    _fetch_large(found.id, commit, {name: found.files[name] for name in shards}, "weight file")
    for name in shards:
        held, size = (found.folder / name).stat().st_size, found.files[name].size
        if size not in (None, held):
            raise HubError(
                f"{found.folder / name} is damaged: it holds {held:,} bytes, the Hub says {size:,}.",
                f"hf download {found.id} {name} --revision {commit} --force-download",
            )


def weight_files(found: Found, files: dict[str, RemoteFile]) -> list[str]:
    """The weight files: those the index names, else the single one. Stray files beside them are not the model's."""
    if INDEX in files:
        return [name for name in indexed(found.folder / INDEX) if name in files]
    if SINGLE in files:
        return [SINGLE]
    others = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors", ".npz"))]
    held = f"only {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}" if others else "no weights at all"
    raise HubError(
        f"{found.id}@{found.commit} has neither {SINGLE} nor {INDEX}, {held}; remoe reads safetensors only.",
        f"{found.id}@REVISION with a revision that holds safetensors, or a folder after save_pretrained()",
    )


def _check_cached(found: Found) -> None:
    """With the Hub out of reach, the cache must hold every weight file already."""
    names = indexed(found.folder / INDEX) if (found.folder / INDEX).is_file() else [SINGLE]
    absent = [name for name in names if not (found.folder / name).is_file()]
    if not absent:
        return
    held = f"the cache {cache()} holds {len(names) - len(absent)} of {len(names)} weight files of {found.id}"
    raise _incomplete(found.id, "model", held)


def _incomplete(repo: str, kind: str, held: str) -> HubError:
    """With the Hub out of reach. held: what the cache has or lacks."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return offline(repo, kind, held)
    return HubError(f"{endpoint()} gives no answer, and {held}.", "the same command once the Hub answers")


def _fetch_large(repo: str, commit: str, files: dict[str, RemoteFile], what: str = "file") -> None:
    """What of these the cache lacks, said so and with progress."""
    absent = {name: file for name, file in files.items() if cached(repo, name, commit) is None}
    if absent:
        _announce(repo, commit, len(absent), what, total_size(absent))
        download(repo, commit, absent, large=True)


def _announce(repo: str, commit: str, files: int, what: str, size: int | None) -> None:
    """Says what comes; refuses when the disk has no room for it. size: None when the Hub does not tell it."""
    place = next(folder for folder in (cache(), *cache().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size is not None and size > free:
        raise HubError(
            f"{repo} needs {_gigabytes(size)} more, and {cache()} has {_gigabytes(free)} free.",
            "HF_HOME=/a/disk/with/room before the same command",
        )
    anonymous = "" if has_token() else ", without a token"
    count = f"1 {what}" if files == 1 else f"{files} {what}s"
    told = "of unknown size" if size is None else _gigabytes(size)
    note(f"Downloading {repo}@{commit[:8]}: {count}, {told}, to {cache()}{anonymous}")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
