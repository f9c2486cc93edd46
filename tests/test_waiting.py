"""Jobs in daemon threads: their answers, the first error, and Ctrl-C."""

import signal
import threading
import time

import pytest

from remoe_cli.hub import waiting
from remoe_cli.hub.waiting import ask, ask_all


def test_answers_come_in_the_order_of_the_jobs():
    def job(number):
        return lambda: (time.sleep(0.01 * (5 - number)), number)[1]

    assert ask_all([job(number) for number in range(5)], at_once=3) == list(range(5))
    assert ask_all([]) == []


def test_the_first_error_ends_the_rest():
    begun, stopped = [], threading.Event()

    def fails():
        raise KeyError("first")

    def runs_on():
        begun.append(1)
        stopped.wait(5)

    start = time.monotonic()
    with pytest.raises(KeyError, match="first"):
        ask_all([runs_on, fails, runs_on, runs_on], at_once=2, stop=stopped.set)
    assert stopped.is_set() and len(begun) <= 2 and time.monotonic() - start < 2


def test_ctrl_c_is_answered_though_the_job_goes_on():
    forever = threading.Event()
    threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(lambda: forever.wait(30))
    finally:
        signal.signal(signal.SIGINT, before)
        forever.set()
    assert time.monotonic() - start < 0.2 + 2 * waiting.GRACE


def test_a_long_wait_is_told(monkeypatch, capfd):
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    assert ask(lambda: (time.sleep(0.5), "answer")[1]) == "answer"
    assert "Still waiting for the Hub" in capfd.readouterr().err
