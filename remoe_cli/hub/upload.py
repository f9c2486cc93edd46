"""Puts a folder on the Hub as a model repository, in one commit or one pull request."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remoe_cli.errors import HubError, UsageError
from remoe_cli.hub.download import remote_files
from remoe_cli.hub.failures import broken, chain, explain, has_token, said_by, status_of, timeout
from remoe_cli.hub.resolve import split
from remoe_cli.hub.waiting import ask


@dataclass(frozen=True)
class Pushed:
    """url: of the repository, branch or pull request; commit: 40 hex digits, None after a dry run; new: False when the
    Hub held the same content already."""

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
    create_pr: bool = False,
    revision: str | None = None,
) -> Pushed:
    """Uploads every file of `folder` (but hidden ones), making the repository and the branch if need be.

    repo: "org/name" or "name"; None: `base_name` (the base model's name without its owner) + "-remoe" under the token's
    account. revision: a branch, by default main. create_pr: propose the files to a repository that exists, for which
    a right to read is enough. The same content twice makes no second commit, and no second pull request while the first
    is open. dry_run: nothing is created or sent, and no token needed.
    Raises HubError without a token, without the right to write, or when private is asked of a public repository.
    """
    from huggingface_hub import HfApi

    files = _files(folder)
    target = target_of(repo, base_name, dry_run)
    api = HfApi()
    if dry_run:
        return Pushed(target, f"{api.endpoint}/{target}", None, False, tuple(files))
    try:
        return ask(lambda: _push(api, folder, files, target, message, private, create_pr, revision))
    except HubError:
        raise
    except Exception as error:  # the library raises its own, httpx's and the file system's: explain tells them apart
        raise _explain(error, target, revision, create_pr) from error


def target_of(repo: str | None, base_name: str, dry_run: bool = False) -> str:
    """The repository that `push_folder` would write to: "org/name". Raises HubError or UsageError as it does."""
    from huggingface_hub import constants, HfApi

    wanted = repo or default_name(base_name)
    if "@" in wanted:
        raise UsageError(
            f"a push goes to a repository, not to {wanted}; --revision names a branch.",
            f"remoe push RUN {wanted.partition('@')[0]} --revision {wanted.partition('@')[2] or 'BRANCH'}",
        )
    split(wanted)
    elsewhere = "remoe push --to DIR for a folder"
    if constants.HF_HUB_OFFLINE and not dry_run:
        raise HubError(
            "HF_HUB_OFFLINE is set, so nothing was pushed.", f"the same with HF_HUB_OFFLINE=0, or {elsewhere}"
        )
    if not has_token() and not dry_run:
        raise HubError(
            "no Hugging Face token is set, so nothing was pushed.", f"hf auth login (or set HF_TOKEN), or {elsewhere}"
        )
    if "/" in wanted:
        return wanted
    try:
        return f"{_owner(HfApi(), dry_run)}/{wanted}"
    except HubError:
        raise
    except Exception as error:  # the library raises its own and httpx's
        raise _explain(error, wanted, None, False) from error


def default_name(base_name: str) -> str:
    """A valid repository name for a delta of that base."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", base_name)
    single = re.sub(r"([.-])[.-]+", r"\1", plain).strip(".-")  # the Hub takes neither -- nor ..
    return f"{single[:80].strip('.-') or 'model'}-remoe"


def _push(
    api: Any,
    folder: Path,
    files: list[str],
    target: str,
    message: str,
    private: bool,
    create_pr: bool,
    revision: str | None,
) -> Pushed:
    from huggingface_hub import CommitOperationAdd

    if not create_pr:
        api.create_repo(target, private=private, exist_ok=True)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(target, branch=revision, exist_ok=True)
    before = _state(api, target, revision)
    if private and not before.private:
        raise HubError(
            f"{target} exists and is public, so nothing was pushed.", f"hf repos settings {target} --private"
        )
    page = f"{api.endpoint}/{target}"
    if _holds(before, folder, files):
        return Pushed(target, page + (f"/tree/{revision}" if revision else ""), before.sha, False, tuple(files))
    if create_pr:
        for number in _open_requests(api, target, message):
            state = _state(api, target, f"refs/pr/{number}")
            if _holds(state, folder, files):
                return Pushed(target, f"{page}/discussions/{number}", state.sha, False, tuple(files))
    with ExitStack() as streams, _quiet():
        additions = [
            CommitOperationAdd(name, path_or_fileobj=streams.enter_context(open(folder / name, "rb"))) for name in files
        ]  # open files go the LFS way, which every Hub speaks; paths would need xet wherever hf-xet is installed
        done = api.create_commit(
            target,
            additions,
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=None if create_pr else before.sha,  # a push in between is refused, not overwritten
        )
    url = done.pr_url if create_pr else page + (f"/tree/{revision}" if revision else "")
    return Pushed(target, url, done.oid, True, tuple(files))


def _state(api: Any, target: str, revision: str | None) -> Any:
    return api.model_info(target, revision=revision, files_metadata=True, timeout=timeout())


def _holds(info: Any, folder: Path, files: list[str]) -> bool:
    """True when the repository has each of these files with the same content at that commit."""
    there = remote_files(info)
    return all(name in there and there[name].matches(folder / name) for name in files)


def _open_requests(api: Any, target: str, title: str) -> list[int]:
    """The numbers of the open pull requests of that title."""
    found = api.get_repo_discussions(target, discussion_type="pull_request", discussion_status="open")
    return [request.num for request in found if request.title == title]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warning that open files do not go through xet: that is meant so."""
    logger = logging.getLogger("huggingface_hub._commit_api")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _explain(error: BaseException, target: str, revision: str | None, create_pr: bool) -> HubError:
    """explain, in the words of a push."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, RepositoryNotFoundError

    again = "the same command again (what was sent already makes no second commit)"
    if isinstance(error, ValueError) and "README.md" in str(error):
        return HubError(f"the Hub does not take the card ({error}).", "remoe push --to DIR, to look at it")
    causes = chain(error)  # a failed LFS upload comes wrapped
    error = next((one for one in causes if isinstance(one, HfHubHTTPError | HTTPError)), error)
    if isinstance(error, HfHubHTTPError):
        status, said = status_of(error), said_by(error) or "no reason given"
        if isinstance(error, GatedRepoError | RepositoryNotFoundError):
            return explain(error, target, revision=revision)
        if status == 403 and error.response.url.path.endswith("/repos/create"):
            return HubError(
                f"your token may not make {target} ({said}).", "remoe push RUN YOU/NAME, or hf auth login --force"
            )
        if status == 403 and not create_pr:
            return HubError(
                f"your token may not write to {target} ({said}).",
                f"remoe push RUN {target} --create-pr (proposes the files), or hf auth login --force with a token that may",
            )
        if status == 403:
            return HubError(f"your token may not open a pull request in {target} ({said}).", "hf auth login --force")
        if status in (409, 412):
            return HubError(f"{target} changed while this was pushed (status {status}: {said}).", again)
        if status == 429:
            return HubError(
                f"the Hub limits the rate of pushes to {target} (status 429).", "the same command in a few minutes"
            )
        if status >= 500:
            return HubError(
                f"the Hub failed with status {status} while {target} was pushed.",
                f"in a few minutes {again}",
            )
    elif isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return HubError(f"{broken(error)}, while {target} was pushed.", again)
    return explain(error, target, revision=revision)


def _files(folder: Path) -> list[str]:
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)]
    if not names:
        raise UsageError(f"there is nothing to push in {folder}.", "remoe finetune demo")
    return names


def _owner(api: Any, dry_run: bool) -> str:
    from huggingface_hub import constants

    if dry_run and (constants.HF_HUB_OFFLINE or not has_token()):
        return "<your account>"
    return ask(api.whoami)["name"]
