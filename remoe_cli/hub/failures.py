"""What went wrong between here and the Hub, in words that name the next command."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from remoe_cli.errors import HubError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MissingError(HubError):
    """No such repository, as far as this token (or none) may know."""


def explain(
    error: BaseException, repo: str, kind: str = "model", revision: str | None = None, file: str | None = None
) -> HubError:
    """The HubError for an exception of huggingface_hub (or of the file system below its cache) while reading.

    repo: "org/name"; kind: "model", "delta" or "dataset"; file: the one that was being fetched. The text never holds the token.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    what = f"{file} of {repo}" if file else f"{kind} {repo}"
    causes = list(chain(error))
    if constants.HF_HUB_OFFLINE and unreachable(error):
        return offline(repo, kind, f"{what} is not in the cache {cache()}")
    for one in causes:
        if isinstance(one, HfHubHTTPError):
            return _answered(one, repo, kind, revision, what)
    for one in causes:
        if isinstance(one, (HTTPError, ConnectionError, TimeoutError)):
            lost = "did not come whole" if file else f"is not in the cache {cache()}"
            return HubError(
                f"{broken(one)}, and {what} {lost}.",
                "the same command once the network is up (whole files are kept), or with a local folder",
            )
    for one in causes:
        if isinstance(one, OSError) and one.errno in _FULL:
            return HubError(f"the disk below {cache()} is full ({one.strerror}); {what} did not fit.", _elsewhere())
        if isinstance(one, OSError) and one.errno is not None:
            return HubError(f"the cache {cache()} cannot be written ({one.strerror}).", _elsewhere())
        if isinstance(one, OSError) and "Consistency check failed" in str(one):
            return HubError(
                f"{what} arrived with another length than announced; nothing of it was kept.",
                "the same command again (whole files are kept)",
            )
    said = without_token(f"{type(error).__name__}: {error}")
    return HubError(f"{what} could not be read ({said}).", f"hf download {repo}")


def broken(error: BaseException) -> str:
    """How the connection ended, for an exception that is no answer of the server."""
    name = type(error).__name__
    if "Timeout" in name:
        wait = f"{timeout():g} s (HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT)"
        return f"{endpoint()} did not answer in time: {name} after {wait}"
    if name in ("RemoteProtocolError", "ReadError", "WriteError"):
        return f"{endpoint()} broke off the connection ({without_token(str(error)) or name})"
    return f"cannot reach {endpoint()} ({name})"


def timeout() -> float:
    """Seconds to wait for an answer (HF_HUB_ETAG_TIMEOUT, by default 10)."""
    from huggingface_hub import constants

    return constants.HF_HUB_ETAG_TIMEOUT


def unreachable(error: BaseException) -> bool:
    """True when the Hub gave no usable answer: no network, offline mode, a timeout, or its own failure (5xx, 429)."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    for one in chain(error):
        if isinstance(one, HfHubHTTPError):
            return status_of(one) >= 500 or status_of(one) == 429
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


def _answered(error, repo: str, kind: str, revision: str | None, what: str) -> HubError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status, said = status_of(error), said_by(error)
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
    if isinstance(error, RemoteEntryNotFoundError):
        return HubError(f"{what} is listed by {endpoint()}, but not there.", f"open {page}, or another @REVISION")
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
        who = "your token" if has_token() else "a stranger (no token is set)"
        return HubError(f"{who} may not read {what} ({why}).", f"open {page}, or: hf auth login --force")
    if status == 429:
        login = "" if has_token() else ", or hf auth login (a token has a higher limit)"
        return HubError(
            f"{endpoint()} limits the rate of requests (status 429) for {what}.",
            f"the same command in a few minutes{login}",
        )
    if status >= 500:
        return HubError(
            f"{endpoint()} failed with status {status} while serving {what}; whole files so far are kept.",
            "the same command in a few minutes",
        )
    why = said or "no reason given"
    return HubError(f"{endpoint()} refused {what} with status {status} ({why}).", f"open {page}")


def status_of(error) -> int:
    """The HTTP status of a HfHubHTTPError; 0 when there was no answer."""
    return error.response.status_code if error.response is not None else 0


def said_by(error) -> str:
    """The server's own reason, shortened, with the token cut out should it be quoted."""
    text = error.server_message or (error.response.headers.get("X-Error-Message") if error.response is not None else "")
    return without_token(text or "")[:200]


def without_token(text: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _elsewhere() -> str:
    return "HF_HOME=/a/disk/with/room before the same command"
