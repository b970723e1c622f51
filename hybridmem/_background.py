"""One thread that flushes while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Background"]


class Background:
    """Runs a task in a thread of its own; at most one waits while another runs.

    A task that waits will see all that was done before it begins, so it serves every request made
    until then. An error is kept for the next `check`.

    Parameters
    ----------
    lock : re-entrant lock
        Held while a task runs and its error is kept: who holds it later knows of the error.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._held = lock
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: Future[None] | None = None
        self._error: BaseException | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Have the task run once, beginning after this call."""
        with self._lock:
            waiting = self._waiting
            if waiting is not None and not (waiting.running() or waiting.done()):
                return
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor  # with logging: 4 ms of an import

                self._pool = ThreadPoolExecutor(1, "hybridmem-flush")
            self._waiting = self._pool.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        with self._held:
            try:
                task()
            except BaseException as error:
                self._error = error

    def check(self) -> None:
        """Raise the error of a task that failed, once."""
        if self._error is not None:
            with self._lock:
                error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait until nothing runs any more; raise the error of a task that failed."""
        with self._lock:
            pool, self._pool, self._waiting = self._pool, None, None
        if pool is not None:
            pool.shutdown(wait=True)
        self.check()
