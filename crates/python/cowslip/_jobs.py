"""Long operations: progress, cancelling, waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from . import _cowslip

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds between two looks at a job's progress.
INTERVAL = 0.1


class Progress(NamedTuple):
    """How far a job has come."""

    stage: str
    """The work that goes on, in a word: ``begin``, ``allocate``, ``copy``, ``flush``, …"""
    done: int
    """Bytes that are done."""
    total: int
    """Bytes in all, as far as known."""

    @property
    def fraction(self) -> float:
        """The part that is done, from 0 to 1."""
        return self.done / self.total if self.total else 0.0


class _Current(threading.local):
    """The job whose thread this is."""

    native: _cowslip.Job | None = None


_current = _Current()


class Job(Generic[R]):
    """An operation in a thread of its own, begun by :func:`start`.

    Iterating over it yields its progress until it has ended, and raises what it has raised.
    ``await`` waits for its result in asyncio; a task that is cancelled meanwhile cancels it. Leaving
    a ``with`` block cancels it, too, if it has not ended, and waits for its end.
    """

    def __init__(self, work: Callable[[], R]) -> None:
        self._native = _cowslip.Job()
        self._ended = threading.Event()
        self._result: R | None = None
        self._raised: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._run, args=(work,), name="cowslip-job")
        thread.start()

    def _run(self, work: Callable[[], R]) -> None:
        _current.native = self._native
        try:
            self._result = work()
        except BaseException as raised:  # Raised again where the result is asked for.
            self._raised = raised
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @property
    def progress(self) -> Progress:
        """How far it has come, now."""
        return Progress(*self._native.progress())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Asks it to end soon; it raises :class:`CancelledError` then."""
        self._native.cancel()

    def result(self, timeout: float | None = None) -> R:
        """Waits for its end and returns its result, or raises what it has raised.

        Raises ``TimeoutError`` if it has not ended within ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError("the job has not ended")
        if self._raised is not None:
            raise self._raised
        return self._result  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Progress]:
        last = None
        while not self._ended.wait(INTERVAL):
            now = self.progress
            if now != last:
                last = now
                yield now
        if self._raised is None:
            yield self.progress
        self.result()

    def __enter__(self) -> Job[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Cancels it if it goes on, and waits until it has ended, whatever interrupts that."""
        interrupted: BaseException | None = None
        while not self._ended.is_set():
            try:
                self.cancel()
                self._ended.wait()
            except KeyboardInterrupt as raised:
                # It is ending already, and a thread that writes is not left behind.
                interrupted = raised
        if interrupted is not None:
            raise interrupted

    def __await__(self) -> Generator[Any, None, R]:
        return self._awaited().__await__()

    async def _awaited(self) -> R:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def from_thread() -> None:
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:
                pass  # The loop is closed, and nobody waits.

        with self._lock:
            if self._ended.is_set():
                ended.set()
            else:
                self._callbacks.append(from_thread)
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError as raised:
                # What it has begun is sound when it has ended, and not before.
                self.cancel()
                cancelled = raised
        if cancelled is not None:
            raise cancelled
        return self.result()


def start(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
    """Begins a long operation in a thread of its own, and returns its job.

    ``start(cowslip.convert, "a.qcow2", "b.raw", format="raw")``: any function or method of the
    package whose documentation says that it is a job.
    """
    return Job(lambda: function(*args, **kwargs))


def run(
    work: Callable[[_cowslip.Job], R], progress: Callable[[Progress], object] | None
) -> R:
    """Runs work as a job and waits for it, within a job's thread as part of that job.

    An exception meanwhile, of ``progress`` or of Ctrl-C, cancels it and passes when it has ended.
    """
    if _current.native is not None:
        return work(_current.native)
    job: Job[R] | None = None
    try:
        job = Job(lambda: work(_current.native or _cowslip.Job()))
        for known in job:
            if progress is not None:
                progress(known)
        return job.result()
    finally:
        if job is not None:
            job._end()
