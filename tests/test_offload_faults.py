"""What goes wrong while the offloaded decoder runs: it stops with one line, and does not hang."""

import ctypes
import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from commands import make_model, refused
from tiny_models import EXPERTS

from remoe_cli.__main__ import main
from remoe_cli.errors import CheckpointError, RemoeError
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.offload.block import ExpertBlock
from remoe_cli.offload.pack import write

PROMPT = [5, 17, 80, 3, 3, 99, 41, 64, 12, 110, 27]
NEW = 16
SETTINGS = [Settings(), Settings(readers=1), Settings(io="buffered"), Settings(ram=100_000), Settings(guess=2)]
IDS = ["direct", "one reader", "buffered", "ram", "guess"]


@pytest.fixture
def checkpoint(folders, tmp_path):
    return Checkpoint.open(Path(shutil.copytree(folders("mixtral", torch.bfloat16), tmp_path / "model")))


def within(seconds: float, work):
    """What work() returns or raises; fails where it hangs."""
    done: list = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, "it hangs"
    value, error = done[0]
    if error is not None:
        raise error
    return value


DIES = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


# storage


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_a_shard_that_shrinks_in_mid_decode_is_named_with_the_expert(checkpoint, settings):
    with OffloadedDecoder(checkpoint, 3, settings=settings) as decoder:
        whole = decoder.decode(PROMPT, NEW)
        used = int(whole.trace.experts[-1, -1, 0])
        last = max(decoder.layers[-1].pieces(used), key=lambda piece: piece.offset)
        content = last.file.read_bytes()
        steps = []

        def shrink(*_: object) -> None:
            steps.append(0)
            if len(steps) == 4:
                os.truncate(last.file, last.offset + 10)
                decoder._tiers.forget()

        hook = decoder._model.register_forward_pre_hook(shrink)
        with pytest.raises(CheckpointError) as caught:
            within(20, lambda: decoder.decode(PROMPT, NEW))
        assert len(steps) >= 4 and str(last.file) in caught.value.message
        assert f"layer {decoder.layers[-1].layer}" in caught.value.message and "expert " in caught.value.message
        assert "Try: " in str(caught.value)
        hook.remove()
        last.file.write_bytes(content)
        again = within(20, lambda: decoder.decode(PROMPT, NEW))
        assert again.ids == whole.ids and again.counts.misses == whole.counts.misses


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_a_disk_error_is_named_and_the_next_request_runs(checkpoint, settings, monkeypatch):
    with OffloadedDecoder(checkpoint, 3, settings=settings) as decoder:
        whole, real, reads = decoder.decode(PROMPT, NEW), os.preadv, []
        decoder._tiers.forget()

        def failing(*arguments):
            reads.append(0)
            if len(reads) > 30:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(CheckpointError, match=r"expert \d of layer \d was not read.*disk reports an error"):
            within(20, lambda: decoder.decode(PROMPT, NEW))
        monkeypatch.setattr(os, "preadv", real)
        assert within(20, lambda: decoder.decode(PROMPT, NEW)).ids == whole.ids


# threads


@DIES
def test_a_reader_that_died_while_idle_is_reported(checkpoint):
    with OffloadedDecoder(checkpoint, 3, settings=Settings(readers=1)) as decoder:
        decoder.decode(PROMPT, 2)
        end(decoder, SystemExit)
        with pytest.raises(RemoeError, match="a thread that reads experts has died"):
            within(20, lambda: decoder.decode(PROMPT, 2))


@DIES
def test_one_of_two_readers_is_enough(checkpoint):
    with OffloadedDecoder(checkpoint, 3, settings=Settings(readers=2)) as decoder:
        whole = decoder.decode(PROMPT, NEW)
        end(decoder, SystemExit, only=1)
        assert within(20, lambda: decoder.decode(PROMPT, NEW)).ids == whole.ids


def test_a_reader_that_dies_at_work_is_an_error_of_the_request(checkpoint, monkeypatch):
    with OffloadedDecoder(checkpoint, 3) as decoder:
        whole, real, reads = decoder.decode(PROMPT, NEW), os.preadv, []

        def killing(*arguments):
            reads.append(0)
            if len(reads) == 30:
                raise SystemExit
            return real(*arguments)

        monkeypatch.setattr(os, "preadv", killing)
        with pytest.raises(RemoeError, match="a thread that reads experts has died"):
            within(20, lambda: decoder.decode(PROMPT, NEW))
        assert within(20, lambda: decoder.decode(PROMPT, NEW)).ids == whole.ids


def end(decoder: OffloadedDecoder, kind: type[BaseException], only: int | None = None) -> None:
    """Raises an exception in reader threads, and waits for their end."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("remoe-reader")]
    threads = [thread for thread in threads if thread in decoder._tiers._readers._threads][:only]
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
    with decoder._tiers._readers._change:
        decoder._tiers._readers._change.notify_all()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_closing_does_not_wait_for_a_slow_link(checkpoint):
    decoder = OffloadedDecoder(checkpoint, 3, settings=Settings(throttle=1000.0))  # 4.6 s an expert
    with pytest.raises(AssertionError, match="hangs"):
        within(0.5, lambda: decoder.decode(PROMPT, 2))
    since = time.monotonic()
    within(20, decoder.close)
    assert time.monotonic() - since < 2


@pytest.mark.parametrize("settings", [*SETTINGS, Settings(warm="carry")], ids=[*IDS, "carry"])
def test_a_request_after_an_interrupted_one_starts_anew(checkpoint, settings):
    with OffloadedDecoder(checkpoint, 3, settings=settings) as decoder:
        whole, steps = decoder.decode(PROMPT, NEW, keep_logits=True), []

        def interrupt(*_: object) -> None:
            steps.append(0)
            if len(steps) == 10:
                raise KeyboardInterrupt

        hook = decoder._blocks[1]._arithmetic._module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(PROMPT, NEW)
        hook.remove()
        again = within(20, lambda: decoder.decode(PROMPT, NEW, keep_logits=True))
        assert again.ids == whole.ids and torch.equal(again.logits, whole.logits)
        assert again.counts.misses == whole.counts.misses


# other processes, as copies of this one: that spares them the imports


FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("options", [[], ["--throttle", "100kB/s"]], ids=["fast", "throttled"])
def test_ctrl_c_in_mid_token(tmp_path, options):
    model = make_model(tmp_path / "model", "mixtral")
    begun = FORK.Event()

    def decode() -> None:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        serve = ExpertBlock._serve

        def noted(*arguments) -> None:
            begun.set()
            serve(*arguments)

        ExpertBlock._serve = noted  # type: ignore[method-assign]
        sys.argv = ["remoe", "decode", str(model), "--cache", "2", "--tokens", "200", "--threads", "1", *options]
        main()

    process = FORK.Process(target=decode)
    process.start()
    try:
        assert begun.wait(30), (tmp_path / "stderr").read_text()
        os.kill(process.pid, signal.SIGINT)
        process.join(3)
        assert process.exitcode == 130
    finally:
        process.kill()
    assert not (tmp_path / "stdout").read_text()
    assert (tmp_path / "stderr").read_text().splitlines()[-1] == "Interrupted."
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_two_processes_read_one_packed_store(folders, tmp_path):
    checkpoint = Checkpoint.open(folders("gpt_oss", torch.bfloat16))
    write(experts_on_disk(checkpoint), checkpoint, tmp_path / "store")

    def decode(results) -> None:
        with OffloadedDecoder(checkpoint, 3, pack=tmp_path / "store", threads=1) as decoder:
            results.put([decoder.decode(PROMPT, NEW).ids for _ in range(5)])

    results = FORK.SimpleQueue()
    both = [FORK.Process(target=decode, args=(results,)) for _ in range(2)]
    for process in both:
        process.start()
    with OffloadedDecoder(checkpoint, EXPERTS, threads=1) as decoder:
        expected = decoder.decode(PROMPT, NEW).ids
    for process in both:
        process.join(60)
        assert process.exitcode == 0 and results.get() == [expected] * 5


def test_fewer_slots_than_a_token_needs(remoe, tmp_path):
    model = make_model(tmp_path / "model", "mixtral")
    refused(remoe("decode", model, "--cache", 1), "too small", "--cache 2")
