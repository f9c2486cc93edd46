"""Every way in which a Hub fails: its own words, nothing partial under a final name, and a second try that succeeds.

CI runs three cases of each kind, `make test-faults` all of them.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from faults import chosen
from hub_client import Client
from huggingface_hub import HfApi
from loopback_hub import Account, Fault, LoopbackHub
from safetensors.numpy import save

from remoe_cli.hub.failures import explain

WRITER, READER, WRONG = "hf_writer-of-this-test", "hf_reader-of-this-test", "hf_nobody"
WEIGHTS = save({"w": np.arange(50_000, dtype=np.float32)})
MODEL = {"config.json": b'{"model_type": "deepseek_v2"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
LIMITED = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"
UNLIMITED = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
SOON = {"Retry-After": "0"}


@dataclass(frozen=True)
class Case:
    """words: in this case's message and in no other's; hint: in its next command. again: the token of the second try."""

    name: str
    words: str
    hint: str
    fault: Fault | None = None
    token: str | None = None
    again: str | None = None
    private: bool = False
    gated: bool = False
    call: str = ""
    before: str = ""
    after: str = ""
    env: dict[str, str] = field(default_factory=dict)
    again_call: str = ""

    def __str__(self) -> str:
        return self.name


def model(fault: str, **answer) -> Fault:
    """A fault of what huggingface_hub asks of the repository under test (the word NAME)."""
    return Fault(
        fault.replace("INFO", "GET /api/models/org/NAME").replace("FILE", "/org/NAME/resolve/.*safetensors"), **answer
    )


DOWNLOADS = [
    Case("401", "no public model org/NAME", "hf auth login", private=True, again="hf_org"),
    Case("401 with a token", "does not accept the token in HF_TOKEN", "unset HF_TOKEN", token=WRONG),
    Case("403", "your token may not read model.safetensors of org/NAME (Bearer *** is not welcome)", "hf auth login",
         model("HEAD FILE", status=403, message="{token} is not welcome"), token=READER),
    Case("gated", "is gated, and no token is set", "accept its terms", gated=True, again=READER),
    Case("gated with a token", "account of your token may not read it yet", "accept its terms", gated=True, token=WRITER, again=READER),
    Case("404 repository", "no model org/NAME on", "check the name", private=True, token=READER, again="hf_org"),
    Case("404 revision", "has no revision 'v9'", "/commits/main", call="resolve('org/NAME@v9')"),
    Case("404 file", "model.safetensors of org/NAME is listed by", "another @REVISION",
         model("HEAD FILE", status=404, headers={"X-Error-Code": "EntryNotFound"})),
    Case("409", "refused model org/NAME with status 409", "open", model("INFO", status=409)),
    Case("412", "refused model org/NAME with status 412", "open", model("INFO", status=412)),
    Case("429", "limits the rate of requests (status 429) for model org/NAME", "few minutes", model("INFO", status=429)),
    Case("429 for a file", "(status 429) for model.safetensors", "few minutes", model("FILE", status=429, headers=SOON)),
    Case("500", "failed with status 500 while serving model org/NAME", "few minutes", model("INFO", status=500)),
    Case("503 with half a cache", "status 503 while serving model.safetensors", "few minutes", model("FILE", status=503, headers=SOON)),
    Case("503 after half a cache", "gives no answer, and the cache", "once the Hub answers", model("INFO", status=503),
         before="fetch_config('org/NAME')"),
    Case("cut", "without sending a response.), and model org/NAME", "network", model("INFO", cut="answer")),
    Case("cut in the headers", "without sending a response.), and model.safetensors of", "network", model("GET FILE", cut="headers")),
    Case("cut in the body", "received 0 bytes", "network", model("GET FILE", keep=0)),
    Case("slow", "did not answer in time: ReadTimeout after 1 s (HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT), and model ", "network",
         model("INFO", delay=2), env={"HF_HUB_ETAG_TIMEOUT": "1"}),
    Case("slow body", "HF_HUB_DOWNLOAD_TIMEOUT), and model.safetensors of org/NAME did not come whole", "network",
         model("GET FILE", pace=2), env={"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}),
    Case("wrong size", "arrived with another length than announced", "whole files are kept",
         model("HEAD FILE", headers={"Content-Length": "9"})),
    Case("wrong hash", "another content than the Hub announces", "whole files are kept", model("GET FILE", corrupt=True)),
    Case("disk full", "is full (File too large)", "HF_HOME=", before=LIMITED, after=UNLIMITED),
    Case("offline", "HF_HUB_OFFLINE is set and model org/NAME is not in the cache", "HF_HUB_OFFLINE=0 hf download", env={"HF_HUB_OFFLINE": "1"}),
    Case("no network", "cannot reach http://127.0.0.1:9 (ConnectError)", "network", env={"HF_ENDPOINT": "http://127.0.0.1:9"}),
]  # fmt: skip

PUSH = "push_folder(Path(DELTA), target_of('ada/NAME', 'b'), message='remoe: gates')"
PROPOSE = "push_folder(Path(DELTA), target_of('org/NAME', 'b'), message='remoe: gates', create_pr=True)"
PUSHES = [
    Case("no token", "no Hugging Face token is set", "remoe push --to", again=WRITER),
    Case("401", "does not accept the token in HF_TOKEN", "unset HF_TOKEN", token=WRONG, again=WRITER),
    Case("403", "your token may not write to org/NAME", "--create-pr", token=WRITER, call=PUSH.replace("ada", "org"), again_call=PROPOSE),
    Case("403, quoting the token", "may not write to ada/NAME (Bearer *** may not)", "hf auth login",
         model("POST .*ada/NAME/preupload", status=403, message="{token} may not"), token=WRITER),
    Case("403 for a pull request", "may not open a pull request in org/NAME", "hf auth login",
         model("POST .*NAME/commit", status=403), token=WRITER, call=PROPOSE),
    Case("404 repository", "no model none/NAME on", "check the name", token=WRITER, call=PROPOSE.replace("org/", "none/"), again_call=PROPOSE),
    Case("404 revision", "has no revision 'v9'", "/commits/main", token=WRITER,
         call=PROPOSE.replace("create_pr=True", "create_pr=True, revision='v9'"), again_call=PROPOSE),
    Case("409", "changed while this was pushed (status 409", "again", model("POST .*NAME/commit", status=409), token=WRITER),
    Case("412", "changed while this was pushed (status 412", "again", model("POST .*NAME/commit", status=412), token=WRITER),
    Case("429", "limits the rate of pushes", "few minutes", model("POST .*ada/NAME/preupload", status=429, headers=SOON), token=WRITER),
    Case("500", "the Hub failed with status 500", "few minutes", model("POST .*ada/NAME/commit", status=500), token=WRITER),
    Case("503 for the large file", "the Hub failed with status 503", "few minutes", Fault("PUT /lfs", 503, headers=SOON), token=WRITER),
    Case("the large file refused", "with status 400", "open", Fault("POST /lfs/verify", 400), token=WRITER),
    Case("the card refused", "does not take the card", "--to DIR", Fault("validate-yaml", 400), token=WRITER),
    Case("cut", "(Server disconnected without sending a response.), while", "no second commit",
         model("POST .*ada/NAME/commit", cut="answer"), token=WRITER),
    Case("slow", "did not answer in time: ReadTimeout", "no second commit",
         model("GET /api/models/ada/NAME", delay=2), token=WRITER, env={"HF_HUB_ETAG_TIMEOUT": "1"}),
    Case("offline", "HF_HUB_OFFLINE is set, so nothing was pushed", "--to DIR", token=WRITER, env={"HF_HUB_OFFLINE": "1"}),
    Case("no network", "cannot reach http://127.0.0.1:9 (ConnectError), while", "no second commit", token=WRITER,
         env={"HF_ENDPOINT": "http://127.0.0.1:9"}),
]  # fmt: skip


@pytest.mark.parametrize("cases", [DOWNLOADS, PUSHES], ids=["download", "push"])
def test_no_two_cases_are_told_in_the_same_words(cases):
    for case in cases:
        assert [other.name for other in cases if case.words in other.words] == [case.name]


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub() as server:
        server.accounts |= {WRITER: Account("ada"), READER: Account("bob", write=False), "hf_org": Account("org")}
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(hub, home):
    """client(token, env): the process that has them, started at its first use."""
    known: dict = {}

    def find(token: str | None, env: dict[str, str]) -> Client:
        key = (token, *sorted(env.items()))
        if key not in known:
            known[key] = Client(hub, home, token, **env)
        return known[key]

    yield find
    for one in known.values():
        one.stderr()
        one.close()


def named(prefix: str, case: Case) -> str:
    """A repository of the case's own."""
    return f"{prefix}-{re.sub('[^a-z0-9]+', '-', case.name)}"


def told(answer: dict, case: Case, name: str, cases: list[Case]) -> None:
    """The error is this case's and no other's, in one line, with its next command."""
    message = answer.get("message", f"no error: {answer}")
    assert "\n" not in message
    assert [other.name for other in cases if other.words.replace("NAME", name) in message] == [case.name], message
    assert case.hint in answer["hint"], answer


@pytest.mark.parametrize("case", chosen(DOWNLOADS), ids=str)
def test_a_download_that_fails_is_told_and_succeeds_the_second_time(hub, home, client, case):
    name = named("m", case)
    commit = hub.add("model", f"org/{name}", MODEL)
    repo = hub.repos["model", f"org/{name}"]
    repo.private, repo.gated = case.private, case.gated
    call, first = f"resolve('org/{name}')", client(case.token, case.env)
    if case.before:
        first(case.before.replace("NAME", name))
    if case.fault:
        case.fault.pattern = case.fault.pattern.replace("NAME", name)
        hub.faults.append(case.fault)
    answer = first(case.call.replace("NAME", name) or call)
    hub.faults.clear()
    told(answer, case, name, DOWNLOADS)
    only_whole(home, name)

    if case.after:
        first(case.after)
    hub.accounts[READER].granted += (f"org/{name}",)
    again = client(case.again or (case.token if case.token != WRONG else None), {})(call)
    assert again.get("commit") == commit, again
    assert {path.name: path.read_bytes() for path in Path(again["folder"]).iterdir()} == MODEL
    only_whole(home, name)


def only_whole(home: Path, name: str) -> None:
    """What the cache shows under a final name is what the Hub has; no scrap is left."""
    cache = home / "hub" / f"models--org--{name}"
    for path in cache.glob("snapshots/*/*"):
        assert path.read_bytes() == MODEL[path.name]
    assert not list(cache.rglob("*.incomplete"))


@pytest.fixture(scope="module")
def delta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delta")
    (folder / "README.md").write_text("---\nlibrary_name: remoe\n---\n# card")
    (folder / "remoe.json").write_text("{}")
    return folder


@pytest.mark.parametrize("case", chosen(PUSHES), ids=str)
def test_a_push_that_fails_is_told_and_succeeds_the_second_time(hub, client, delta, case):
    name = named("d", case)
    (delta / "gates.safetensors").write_bytes(save({name: np.ones((8, 16), np.float32)}))  # no LFS file twice
    files = {path.name: path.read_bytes() for path in delta.iterdir()}
    hub.add("model", f"org/{name}", {"README.md": b"theirs"})
    repair = {"NAME": name, "DELTA": repr(str(delta))}
    call, second = case.call or PUSH, case.again_call or case.call or PUSH
    for word, value in repair.items():
        call, second = call.replace(word, value), second.replace(word, value)
    if case.fault:
        case.fault.pattern = case.fault.pattern.replace("NAME", name)
        hub.faults.append(case.fault)
    answer = client(case.token, case.env)(call)
    hub.faults.clear()
    told(answer, case, name, PUSHES)
    for owner in ("ada", "org"):
        repo = hub.repos.get(("model", f"{owner}/{name}"))
        assert repo is None or "gates.safetensors" not in hub.files("model", f"{owner}/{name}"), "half a push"
        assert repo is None or not repo.requests

    again = client(case.again or case.token, {})(second)
    assert again.get("new"), again
    owner = again["repo"].split("/")[0]
    repo = hub.repos["model", f"{owner}/{name}"]
    pushed = repo.commits[repo.refs["refs/pr/1" if "create_pr" in second else "main"]]
    assert files.items() <= pushed.items()
    assert not client(case.again or case.token, {})(second)["new"], "the same content twice made a second commit"


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, client, delta):
    (delta / "gates.safetensors").write_bytes(save({"lost": np.ones((8, 16), np.float32)}))
    call = PUSH.replace("NAME", "lost").replace("DELTA", repr(str(delta)))
    hub.faults.append(Fault("POST .*ada/lost/commit", cut="headers"))
    answer = client(WRITER, {})(call)
    hub.faults.clear()
    assert "broke off the connection" in answer["message"] and "no second commit" in answer["hint"]
    again = client(WRITER, {})(call)
    assert not again["new"] and again["commit"] == hub.repos["model", "ada/lost"].refs["main"]


def test_a_push_in_between_is_not_overwritten(hub, client, delta):
    """The second push comes while the first is under way: after it has looked, before its commit."""
    (delta / "gates.safetensors").write_bytes(save({"between": np.ones((8, 16), np.float32)}))
    call = PUSH.replace("NAME", "between").replace("DELTA", repr(str(delta)))
    hub.add("model", "ada/between", {"README.md": b"first"})
    hub.log.clear()
    hub.faults.append(Fault("POST .*ada/between/preupload", delay=3, times=1))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client(WRITER, {}), call)
        while not any("between/preupload" in entry for entry in hub.log):
            time.sleep(0.01)
        other = HfApi(hub.url, token=WRITER)
        other.upload_file(path_or_fileobj=b"by another", path_in_repo="README.md", repo_id="ada/between")
        assert not first.done()
        answer = first.result()
    hub.faults.clear()
    assert "changed while this was pushed (status 412" in answer["message"], answer
    assert hub.files("model", "ada/between") == {"README.md": b"by another"}
    assert client(WRITER, {})(call)["new"]
    assert hub.files("model", "ada/between")["gates.safetensors"] == (delta / "gates.safetensors").read_bytes()


def test_a_closed_pull_request_does_not_count_as_open(hub, client, delta):
    (delta / "gates.safetensors").write_bytes(save({"closed": np.ones((8, 16), np.float32)}))
    call = PROPOSE.replace("NAME", "closed").replace("DELTA", repr(str(delta)))
    hub.add("model", "org/closed", {"README.md": b"theirs"})
    assert client(WRITER, {})(call)["revision"] == "refs/pr/1"
    again = client(WRITER, {})(call)
    assert (again["new"], again["revision"]) == (False, "refs/pr/1")
    hub.repos["model", "org/closed"].requests[0]["status"] = "closed"
    again = client(WRITER, {})(call)
    assert (again["new"], again["revision"]) == (True, "refs/pr/2")


def test_the_token_is_cut_out_of_an_error_of_no_known_kind(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    said = explain(RuntimeError(f"proxy said no to Bearer {WRITER}"), "org/x").message
    assert "RuntimeError: proxy said no to Bearer ***" in said and WRITER not in said
