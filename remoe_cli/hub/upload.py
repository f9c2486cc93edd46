"""Puts a folder on the Hub as a model repository, in one commit or one pull request."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remoe_cli.console import note
from remoe_cli.delta import BESIDE
from remoe_cli.delta.peft import ADAPTER
from remoe_cli.errors import HubError, UsageError
from remoe_cli.hub.download import remote_files
from remoe_cli.hub.failures import broken, chain, explain, has_token, said_by, status_of, timeout, without_token
from remoe_cli.hub.waiting import ask

LARGE = 50_000_000  # bytes of an upload that a person is told of
_NO_BRANCH = re.compile(r"[\s\x00-\x1f\x7f~^:?*\[\\]|\.\.")


@dataclass(frozen=True)
class Pushed:
    """url: of the repository, branch or pull request; revision: what the files are found at, None for main; commit: 40
    hex digits, None after a dry run; new: False when the Hub held the same content there already."""

    repo: str
    url: str
    revision: str | None
    commit: str | None
    new: bool
    files: tuple[str, ...]


def push_folder(
    folder: Path,
    target: str,
    *,
    message: str,
    private: bool = False,
    dry_run: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
) -> Pushed:
    """Uploads every file of `folder` (but hidden ones), making the repository and the branch if need be.

    target: of `target_of`. revision: a branch, by default main. create_pr: propose the files to a repository that
    exists, for which a right to read is enough. What a former delta had beside its gates and this one lacks is removed.
    The same content twice makes no second commit, and no second pull request while the first is open. dry_run: nothing
    is created or sent, and no token needed.
    Raises HubError without the right to write, or when private is asked of a public repository.
    """
    from huggingface_hub import HfApi

    check_branch(revision)
    files = _files(folder)
    api = HfApi()
    if dry_run:
        return Pushed(target, f"{api.endpoint}/{target}", revision, None, False, tuple(files))
    try:
        return ask(lambda: _push(api, folder, files, target, message, private, create_pr, revision))
    except HubError:
        raise
    except Exception as error:  # the library raises its own, httpx's and the file system's: explain tells them apart
        raise _explain(error, target, revision, create_pr) from error


def target_of(repo: str | None, base_name: str, dry_run: bool = False) -> str:
    """The repository to push to: "org/name".

    repo: "org/name" or "name"; None: `base_name` (the base model's name without its owner) + "-remoe" under the token's
    account. Raises UsageError for another form, HubError without a token (which a dry run does not need).
    """
    from huggingface_hub import constants, HfApi

    wanted = default_name(base_name) if repo is None else repo
    if "@" in wanted:
        raise UsageError(
            f"a push goes to a repository, not to {wanted}; --revision names a branch.",
            f"remoe push RUN {wanted.partition('@')[0]} --revision {wanted.partition('@')[2] or 'BRANCH'}",
        )
    _check_name(wanted)
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


def check_branch(name: str | None) -> None:
    """Raises UsageError for what git would not take as a branch, before anything is made on the Hub."""
    if name is not None and (not name or _NO_BRANCH.search(name)):
        raise UsageError(
            f"--revision is a branch (without spaces, '..' and ~^:?*[\\), not {name!r}.", "remoe push RUN --revision v2"
        )


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        valid = repo.isascii()
    except HFValidationError:
        valid = False
    if not valid:
        raise UsageError(
            f"a repository is user/name, of letters, digits, '-', '_' and '.', not {repo!r}.", "remoe push RUN YOU/NAME"
        )


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
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if not create_pr:
        api.create_repo(target, private=private, exist_ok=True)
    if private and not _state(api, target, None).private:
        raise HubError(
            f"{target} exists and is public, so nothing was pushed.", f"hf repos settings {target} --private"
        )
    made = not create_pr and revision is not None and _make_branch(api, target, revision)
    before = _state(api, target, revision)
    page, sent = f"{api.endpoint}/{target}", tuple(files)
    address = page + (f"/tree/{revision}" if revision else "")
    if _holds(before, folder, files):
        return Pushed(target, address, revision, before.sha, made, sent)
    if create_pr:
        for number in _open_requests(api, target, message):
            state = _state(api, target, f"refs/pr/{number}")
            if _holds(state, folder, files):
                return Pushed(target, f"{page}/discussions/{number}", f"refs/pr/{number}", state.sha, False, sent)
    size = sum((folder / name).stat().st_size for name in files)
    if size > LARGE:
        note(f"Uploading {size / 1e6:,.0f} MB to {target}")
    with ExitStack() as streams, _quiet():
        additions = [
            CommitOperationAdd(name, path_or_fileobj=streams.enter_context(open(folder / name, "rb"))) for name in files
        ]  # open files go the LFS way, which every Hub speaks; paths would need xet wherever hf-xet is installed
        done = api.create_commit(
            target,
            [*additions, *(CommitOperationDelete(name) for name in _left_over(before, files))],
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=None if create_pr else before.sha,  # a push in between is refused, not overwritten
        )
    if create_pr:
        return Pushed(target, done.pr_url, done.pr_revision, done.oid, True, sent)
    return Pushed(target, address, revision, done.oid, True, sent)


def _make_branch(api: Any, target: str, name: str) -> bool:
    """True when it was not there."""
    if name.startswith("refs/") or name in {branch.name for branch in api.list_repo_refs(target).branches}:
        return False
    api.create_branch(target, branch=name, exist_ok=True)
    return True


def _state(api: Any, target: str, revision: str | None) -> Any:
    return api.model_info(target, revision=revision, files_metadata=True, timeout=timeout())


def _holds(info: Any, folder: Path, files: list[str]) -> bool:
    """True when the repository has each of these files with the same content at that commit, and nothing left over."""
    there = remote_files(info)
    same = all(name in there and there[name].matches(folder / name) for name in files)
    return same and not _left_over(info, files)


def _left_over(info: Any, files: list[str]) -> list[str]:
    """What a former delta had beside its gates and this one lacks, such as a report: it would speak of other gates.

    GGUFs stay: they are large, and may be somebody else's; `remoe pull --as gguf` looks into them.
    """
    return [name for name in (*BESIDE, *ADAPTER) if name in remote_files(info) and name not in files]


def _open_requests(api: Any, target: str, title: str) -> list[int]:
    """The numbers of the open pull requests of that title."""
    found = api.get_repo_discussions(target, discussion_type="pull_request", discussion_status="open")
    return [request.num for request in found if request.title == title]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warning that open files do not go through xet (that is meant so), and without its bars,
    which are shown for no upload at all too, unless HF_HUB_DISABLE_PROGRESS_BARS=0 asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub._commit_api")
    level = logger.level
    logger.setLevel(logging.ERROR)
    silence = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if silence:
            enable_progress_bars()


def _explain(error: BaseException, target: str, revision: str | None, create_pr: bool) -> HubError:
    """explain, in the words of a push."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, RepositoryNotFoundError

    again = "the same command again (what was sent already makes no second commit)"
    if isinstance(error, ValueError) and "README.md" in str(error):
        return HubError(
            f"the Hub does not take the card ({without_token(str(error))}).", "remoe push --to DIR, to look at it"
        )
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
