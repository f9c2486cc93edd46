"""Work on threads: kernels run without the GIL."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """work(item) of every item, in order. What has not begun at an error or Ctrl-C never does."""
    executor = ThreadPoolExecutor(threads)
    try:
        return list(executor.map(work, items))
    finally:
        executor.shutdown(cancel_futures=True)
