"""From what a user calls a model to a folder with its files: "demo", a local folder, or a Hub id with @revision."""

import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from remoe_cli.errors import CheckpointError, HubError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, SINGLE
from remoe_cli.hub.failures import cache, endpoint, explain, has_token, MissingError, offline, unreachable

_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # config and every kind of tokenizer
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Found:
    """A model before its weights are here. commit: 40 hex digits for a Hub model, None for a folder."""

    id: str
    commit: str | None
    folder: Path
    config: dict = field(repr=False)


def resolve(model: str | Found) -> Checkpoint:
    """The model's files on this disk, downloaded into the Hugging Face cache where need be (progress on stderr).

    model: "demo", a local folder, "org/name" or "org/name@revision"; or what `fetch_config` found. Of a Hub repository
    only config, tokenizer and safetensors come, never pickles. Raises HubError or CheckpointError.
    """
    found = model if isinstance(model, Found) else fetch_config(model)
    if found.commit is not None:
        _download(found)
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
    folder = _snapshot(repo, revision, ["config.json"], model)
    if not (folder / "config.json").is_file():
        page = f"{endpoint()}/{repo}"
        raise HubError(f"{page} has no config.json, so it is no model that remoe can read.", f"open {page}")
    return Found(repo, folder.name, folder, _read_config(folder))


def fetch_repository(name: str) -> tuple[Path, str]:
    """All files of a small model repository (a delta), and its commit. name: "org/name[@revision]". Raises HubError."""
    repo, revision = split(name)
    folder = _snapshot(repo, revision, None, name)
    return folder, folder.name


def split(model: str) -> tuple[str, str | None]:
    """("org/name", revision or None). Raises HubError for what can only be a path, or is no Hub id."""
    repo, _, revision = model.partition("@")
    hint = "remoe finetune demo, a folder with a config.json, or a Hub id such as deepseek-ai/DeepSeek-V2-Lite"
    if Path(model).is_file():
        raise HubError(f"{model} is a file; a model is a folder in Hugging Face format or a Hub id.", hint)
    if not _ID.fullmatch(repo) or ".." in repo or "--" in repo or model.endswith("@"):
        raise HubError(f"there is no folder {model}, and that is not a Hub id (org/name, org/name@revision).", hint)
    return repo, revision or None


def _local(name: str, folder: Path) -> Found:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"the folder {name} has no config.json, so it is not a model folder.", f"ls {folder}")
    return Found(name, None, folder, _read_config(folder))


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}).", f"cat {path}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object.", f"cat {path}")
    return config


def _snapshot(repo: str, revision: str | None, names: list[str] | None, model: str) -> Path:
    """The cache folder `snapshots/<commit>` with the files matching `names` (all when None)."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=names))
    except Exception as error:  # the library raises its own, httpx's and the file system's: explain tells them apart
        reason = explain(error, repo, revision=revision)
        if isinstance(reason, MissingError):
            raise HubError(f"there is no folder ./{model}, and {reason.message}", reason.hint) from error
        raise reason from error


def _download(found: Found) -> None:
    sizes = _sizes(found)
    if sizes is None:
        return _check_cached(found)
    beside = [name for name in sizes if "/" not in name and any(Path(name).match(p) for p in _BESIDE_WEIGHTS)]
    _snapshot(found.id, found.commit, beside, found.id)
    shards = _shards(found, sizes)
    absent = [name for name in shards if not (found.folder / name).exists()]
    if absent:
        _announce(found, len(absent), sum(sizes[name] for name in absent))
        _snapshot(found.id, found.commit, absent, found.id)
    for name in shards:
        held = (found.folder / name).stat().st_size
        if held != sizes[name]:
            raise HubError(
                f"{found.folder / name} is damaged: it holds {held:,} bytes, the Hub says {sizes[name]:,}.",
                f"hf download {found.id} {name} --revision {found.commit} --force-download",
            )


def _sizes(found: Found) -> dict[str, int] | None:
    """File name -> bytes, of every file of the repository; None when the Hub gives no answer."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(found.id, revision=found.commit, files_metadata=True, timeout=30)
    except Exception as error:
        if unreachable(error):
            return None
        raise explain(error, found.id, revision=found.commit) from error
    return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}


def _shards(found: Found, sizes: dict[str, int]) -> list[str]:
    """The weight files: those the index names, else the single one. Stray files beside them are not the model's."""
    if INDEX in sizes:
        return sorted(name for name in _indexed(found) if name in sizes)
    if SINGLE in sizes:
        return [SINGLE]
    others = [name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors", ".npz"))]
    held = f"only {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}" if others else "no weights at all"
    raise HubError(
        f"{found.id}@{found.commit} has neither {SINGLE} nor {INDEX}, {held}; remoe reads safetensors only.",
        f"{found.id}@REVISION with a revision that holds safetensors, or a folder after save_pretrained()",
    )


def _indexed(found: Found) -> set[str]:
    index = found.folder / INDEX
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not a safetensors index.", f"cat {index}") from None


def _check_cached(found: Found) -> None:
    """With the Hub out of reach, the cache must hold every weight file already."""
    from huggingface_hub import constants

    names = sorted(_indexed(found)) if (found.folder / INDEX).is_file() else [SINGLE]
    absent = [name for name in names if not (found.folder / name).is_file()]
    if not absent:
        return
    held = f"the cache {cache()} holds {len(names) - len(absent)} of {len(names)} weight files of {found.id}"
    if constants.HF_HUB_OFFLINE:
        raise offline(found.id, "model", held)
    raise HubError(f"{endpoint()} gives no answer, and {held}.", "the same command once the Hub answers")


def _announce(found: Found, files: int, size: int) -> None:
    """Says what comes; refuses when the disk has no room for it."""
    place = next(folder for folder in (cache(), *cache().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        raise HubError(
            f"{found.id} needs {_gigabytes(size)} more, and {cache()} has {_gigabytes(free)} free.",
            "HF_HOME=/a/disk/with/room before the same command",
        )
    anonymous = "" if has_token() else ", without a token"
    count = "1 weight file" if files == 1 else f"{files} weight files"
    text = f"Downloading {found.id}@{str(found.commit)[:8]}: {count}, {_gigabytes(size)}, to {cache()}{anonymous}"
    print(text, file=sys.stderr, flush=True)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
