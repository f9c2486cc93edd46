"""What went wrong between here and the Hub, in words that name the next command."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from remoe_cli.errors import HubError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class MissingError(HubError):
    """No such repository, as far as this token (or none) may know."""


def explain(error: BaseException, repo: str, kind: str = "model", revision: str | None = None) -> HubError:
    """The HubError for an exception of huggingface_hub (or of the file system below its cache).

    repo: "org/name"; kind: "model" or "dataset". The text never holds the token.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    chain = list(_chain(error))
    if constants.HF_HUB_OFFLINE and unreachable(error):
        return offline(repo, kind, f"{kind} {repo} is not in the cache {cache()}")
    for one in chain:
        if isinstance(one, HfHubHTTPError):
            return _answered(one, repo, kind, revision)
    for one in chain:
        if isinstance(one, (HTTPError, ConnectionError, TimeoutError)):
            return HubError(
                f"cannot reach {endpoint()} ({type(one).__name__}), and {kind} {repo} is not in the cache {cache()}.",
                "the same command once the network is up, or with a local folder",
            )
    for one in chain:
        if isinstance(one, OSError) and one.errno in _FULL:
            return HubError(f"the disk below {cache()} is full.", _elsewhere())
        if isinstance(one, OSError) and one.errno is not None:
            return HubError(f"the cache {cache()} cannot be written ({one.strerror}).", _elsewhere())
        if isinstance(one, OSError) and "Consistency check failed" in str(one):
            return HubError(
                f"a file of {repo} arrived incomplete; nothing of it was kept.",
                "the same command again (whole files are kept)",
            )
    return HubError(f"{kind} {repo} could not be read ({type(error).__name__}: {error}).", f"hf download {repo}")


def unreachable(error: BaseException) -> bool:
    """True when the Hub gave no usable answer: no network, offline mode, a timeout, or its own failure (5xx, 429)."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    for one in _chain(error):
        if isinstance(one, HfHubHTTPError):
            return _status(one) >= 500 or _status(one) == 429
        if isinstance(one, (HTTPError, ConnectionError, TimeoutError)):
            return True
    return False


def offline(repo: str, kind: str, what: str) -> HubError:
    """For a command that needed the Hub while HF_HUB_OFFLINE is set."""
    option = " --repo-type dataset" if kind == "dataset" else ""
    return HubError(f"HF_HUB_OFFLINE is set and {what}.", f"HF_HUB_OFFLINE=0 hf download {repo}{option}")


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def cache() -> Path:
    """The folder of all downloaded files (HF_HUB_CACHE, by default below HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _answered(error, repo: str, kind: str, revision: str | None) -> HubError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status, said = _status(error), _said(error)
    page = f"{endpoint()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    if isinstance(error, GatedRepoError):
        if has_token():
            return HubError(
                f"{kind} {repo} is gated, and the account of your token may not read it yet.",
                f"accept its terms at {page}, then the same command",
            )
        return HubError(
            f"{kind} {repo} is gated, and no token is set.", f"accept its terms at {page}, then: hf auth login"
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"{kind} {repo} has no revision {revision!r} (a branch, tag or commit).",
            f"{repo} without @, or a commit from {page}/commits/main",
        )
    missing = isinstance(error, RepositoryNotFoundError)
    if not has_token() and (missing or status == 401):  # the Hub says 401 to strangers rather than tell what exists
        return MissingError(
            f"there is no public {kind} {repo} on {endpoint()}; if it is private: no token is set.",
            f"check the name at {page}, or: hf auth login",
        )
    if missing:
        return MissingError(
            f"there is no {kind} {repo} on {endpoint()} that your token may read.", f"check the name at {page}"
        )
    if status == 401:
        place = "in HF_TOKEN" if os.environ.get("HF_TOKEN") else "that is stored here"
        first = "unset HF_TOKEN && " if os.environ.get("HF_TOKEN") else ""
        return HubError(f"{endpoint()} does not accept the token {place}.", f"{first}hf auth login --force")
    if status == 403:
        why = said or "forbidden"
        return HubError(f"your token may not do this with {kind} {repo} ({why}).", "hf auth login --force")
    if status == 429:
        return HubError(f"{endpoint()} limits the rate of requests.", "the same command in a few minutes")
    if status >= 500:
        return HubError(
            f"{endpoint()} failed with status {status} while serving {repo}; whole files so far are kept.",
            "the same command in a few minutes",
        )
    why = said or "no reason given"
    return HubError(f"{endpoint()} refused {kind} {repo} with status {status} ({why}).", f"open {page}")


def _status(error) -> int:
    return error.response.status_code if error.response is not None else 0


def _said(error) -> str:
    """The server's own reason, shortened, with the token cut out should it be quoted."""
    from huggingface_hub import get_token

    text = error.server_message or (error.response.headers.get("X-Error-Message") if error.response is not None else "")
    token = get_token()
    return (text or "").replace(token, "***")[:200] if token else (text or "")[:200]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _elsewhere() -> str:
    return "HF_HOME=/a/disk/with/room before the same command"
