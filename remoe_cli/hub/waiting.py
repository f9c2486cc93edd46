"""Network work in daemon threads, so that Ctrl-C is answered at once, whatever a server does."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from remoe_cli.console import note

T = TypeVar("T")
GRACE = 1.0  # seconds that running jobs get to tidy up after themselves
PATIENCE = 15.0  # seconds without an answer after which a person is told


def ask(job: Callable[[], T]) -> T:
    """What job() returns or raises. Says so on stderr while the answer takes long."""
    begin = said = time.monotonic()

    def tick() -> None:
        nonlocal said
        if time.monotonic() - said > PATIENCE:
            said = time.monotonic()
            note(f"Still waiting for the Hub after {said - begin:.0f} s")

    return ask_all([job], tick=tick)[0]


def ask_all(
    jobs: Sequence[Callable[[], T]],
    *,
    at_once: int = 1,
    tick: Callable[[], object] = lambda: None,
    stop: Callable[[], object] = lambda: None,
) -> list[T]:
    """What the jobs return, in their order; the first exception of one is raised and no further job begins.

    tick is called a few times a second meanwhile; stop when one job failed or Ctrl-C came, to end the running ones.
    """
    todo = deque(enumerate(jobs))
    answers: queue.SimpleQueue[tuple[int, list[T], BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while todo:
            try:
                index, job = todo.popleft()
            except IndexError:
                return
            try:
                answers.put((index, [job()], None))
            except BaseException as error:
                answers.put((index, [], error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(jobs)))]
    results: dict[int, T] = {}
    try:
        for thread in threads:
            thread.start()
        while len(results) < len(jobs):
            try:
                index, value, error = answers.get(timeout=0.2)
            except queue.Empty:
                tick()
                continue
            if error is not None:
                raise error
            results[index] = value[0]
            tick()
    except BaseException:
        todo.clear()
        stop()
        deadline = time.monotonic() + GRACE
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    return [results[index] for index in range(len(jobs))]
