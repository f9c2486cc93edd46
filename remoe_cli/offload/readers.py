"""Reader threads: loads that are under way while the model computes."""

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from remoe_cli.errors import RemoeError
from remoe_cli.offload.store import IoCount


class Load:
    """One expert on its way into a slot. thread: the one that has taken it. keep: see Tiers.begin. copied: on a GPU, the event after its copy."""

    __slots__ = ("copied", "count", "done", "error", "expert", "finished", "keep", "layer", "slot", "thread")

    def __init__(self, layer: int, expert: int, slot: int, count: IoCount, keep: bool = True) -> None:
        self.layer, self.expert, self.slot, self.count, self.keep = layer, expert, slot, count, keep
        self.finished = False
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.copied: Any = None
        self.done = threading.Lock()
        self.done.acquire()


class Readers:
    """n threads that call work(load, thread number), demand loads first, in the order in which they were submitted.

    An error in a thread is raised by `wait`, in the thread that waits. Close it.
    """

    def __init__(self, n: int, work: Callable[[Load, int], None]) -> None:
        self._work = work
        self._demand: deque[Load] = deque()
        self._guesses: deque[Load] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._active, self._since = 0, 0.0
        self.busy_s = 0.0  # time during which at least one thread was at work
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"remoe-reader-{i}", daemon=True) for i in range(n)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load, *, guess: bool = False) -> None:
        with self._change:
            (self._guesses if guess else self._demand).append(load)
            self._change.notify()

    def withdraw(self, load: Load) -> bool:
        """Takes back a guess that no thread has begun; whether it could."""
        with self._change:
            if load.thread is not None:
                return False
            self._guesses.remove(load)
            return True

    def hasten(self, load: Load) -> None:
        """A guess that has become a demand, where no thread has begun it."""
        with self._change:
            if load.thread is None:
                self._guesses.remove(load)
                self._demand.append(load)

    def wait(self, load: Load) -> None:
        """Until the load is there. Raises what went wrong with it."""
        while not load.finished:
            if load.done.acquire(timeout=0.5):
                break
            at_it = self._threads if load.thread is None else [load.thread]
            if not load.finished and not any(thread.is_alive() for thread in at_it):
                raise _died()
        if load.error is not None:
            raise load.error

    def drain(self, *, drop: bool = True) -> None:
        """Until nothing is under way or queued: what is queued is dropped, or done first. Errors are left to `wait`."""
        with self._change:
            if drop:
                self._demand.clear()
                self._guesses.clear()
            while (self._active or self._demand or self._guesses) and any(t.is_alive() for t in self._threads):
                self._change.wait(0.5)

    def close(self) -> None:
        """Ends the threads, after what they are at."""
        with self._change:
            self._closed = True
            self._demand.clear()
            self._guesses.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while (load := self._next()) is not None:
            try:
                self._work(load, number)
            except Exception as error:
                load.error = error
            except (
                BaseException
            ):  # SystemExit would end the process without a word, were it raised where it is waited for
                load.error = _died()
            finally:
                self._finish(load)

    def _next(self) -> Load | None:
        with self._change:
            while not (self._demand or self._guesses or self._closed):
                self._change.wait()
            if self._closed:
                return None
            load = (self._demand or self._guesses).popleft()
            load.thread = threading.current_thread()
            if not self._active:
                self._since = perf_counter()
            self._active += 1
            return load

    def _finish(self, load: Load) -> None:
        with self._change:
            load.finished = True  # before a drain may return
            load.done.release()
            self._active -= 1
            if not self._active:
                self.busy_s += perf_counter() - self._since
                self._change.notify_all()  # for drain


def _died() -> RemoeError:
    return RemoeError("a thread that reads experts has died.", "the same command again")
