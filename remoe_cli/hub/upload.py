"""Puts a folder on the Hub as a model repository, in one commit."""

from dataclasses import dataclass
from pathlib import Path

from remoe_cli.errors import HubError, UsageError
from remoe_cli.hub.failures import explain, has_token
from remoe_cli.hub.resolve import split


@dataclass(frozen=True)
class Pushed:
    """commit: 40 hex digits, None after a dry run; new: False when the Hub held the same content already."""

    repo: str
    url: str
    commit: str | None
    new: bool
    files: tuple[str, ...]


def push_folder(
    folder: Path,
    repo: str | None = None,
    *,
    base_name: str,
    message: str,
    private: bool = False,
    dry_run: bool = False,
) -> Pushed:
    """Uploads every file of `folder` (but hidden ones), making the repository if need be.

    repo: "org/name" or "name"; None: `base_name` (the base model's name without its owner) + "-remoe" under the token's
    account. The same content twice makes no second commit. dry_run: nothing is created or sent, and no token needed.
    Raises HubError without a token, without the right to write, or when private is asked of a public repository.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files = _files(folder)
    wanted = repo or f"{base_name}-remoe"
    if "@" in wanted:
        raise UsageError(f"a push goes to a repository, not to a revision of one: {wanted}.", "remoe push RUN org/name")
    split(wanted)
    api = HfApi()
    if not has_token() and not dry_run:
        raise HubError(
            "no Hugging Face token is set, so nothing was pushed.",
            "hf auth login (or set HF_TOKEN), or remoe push --to DIR for a folder",
        )
    try:
        owner = _owner(api, dry_run) if "/" not in wanted else ""
        target = f"{owner}/{wanted}" if owner else wanted
        if dry_run:
            return Pushed(target, f"{api.endpoint}/{target}", None, False, tuple(files))
        api.create_repo(target, private=private, exist_ok=True)
        before = api.model_info(target)
        if private and not before.private:
            raise HubError(
                f"{target} exists and is public, so nothing was pushed.", f"hf repos settings {target} --private"
            )
        additions = [CommitOperationAdd(name, str(folder / name)) for name in files]
        done = api.create_commit(target, additions, commit_message=message)
    except HubError:
        raise
    except Exception as error:  # the library raises its own, httpx's and the file system's: explain tells them apart
        raise explain(error, repo or wanted) from error
    return Pushed(target, f"{api.endpoint}/{target}", done.oid, done.oid != before.sha, tuple(files))


def _files(folder: Path) -> list[str]:
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)]
    if not names:
        raise UsageError(f"there is nothing to push in {folder}.", "remoe finetune demo")
    return names


def _owner(api, dry_run: bool) -> str:
    if dry_run and not has_token():
        return "<your account>"
    return api.whoami()["name"]
