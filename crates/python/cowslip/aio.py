"""Images in asyncio: requests that the kernel carries out while the loop goes on.

Each loop has one queue of requests, for all images, whose descriptor it watches. A request that is
cancelled is given up if it is a read; one that changes the disk runs to its end, and the buffer of
either stays in use until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from . import _cowslip
from ._image import (
    Backing,
    Bitmap,
    Cache,
    Compacted,
    Extent,
    Layer,
    Name,
    Preallocation,
    Snapshot,
    Watch,
)
from ._image import Image as BlockingImage
from ._image import open as open_blocking
from ._jobs import start

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

__all__ = ["Image", "open"]


class _Queue:
    """The requests of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.native = _cowslip.Queue()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        loop.add_reader(self.native.fileno(), self._complete)
        # A loop that is shut down ends its generators, and so the queue, which belongs to its
        # thread: freed with the loop it might be freed in another.
        self._keeper = _until_shutdown(ref(self))
        try:
            self._keeper.__anext__().send(None)
        except StopIteration:
            pass  # It has come to its first value.

    def _complete(self) -> None:
        for token, value, raised in self.native.complete():
            future = self._futures.pop(token)
            if future.done():
                continue  # The caller has given it up.
            if raised is None:
                future.set_result(value)
            else:
                future.set_exception(raised)

    async def end_of(self, token: int) -> Any:
        """Waits for a request."""
        future = asyncio.get_running_loop().create_future()
        self._futures[token] = future
        try:
            return await future
        except asyncio.CancelledError:
            self.native.cancel(token)
            raise

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives up reads and waits for other requests."""
        _queues.pop(loop, None)
        loop.remove_reader(self.native.fileno())
        self.native.close()
        for future in self._futures.values():
            future.cancel()


async def _until_shutdown(queue: ref[_Queue]) -> AsyncGenerator[None, None]:
    """Closes a queue when its loop is shut down."""
    try:
        yield
    finally:
        closing = queue()
        if closing is not None:
            closing.close(asyncio.get_running_loop())


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


def _queue() -> _Queue:
    loop = asyncio.get_running_loop()
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = _Queue(loop)
    return queue


class Image:
    """An open image, in asyncio; made by :func:`open`. ``async with`` closes it.

    Methods are those of :class:`cowslip.Image`. Several loops, and blocking calls of ``blocking``,
    may use it at once.
    """

    def __init__(self, blocking: BlockingImage) -> None:
        self.blocking = blocking
        """The same image, for calls that block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self.blocking).replace("cowslip.", "cowslip.aio.", 1)

    @property
    def name(self) -> str:
        """The name that it was opened by."""
        return self.blocking.name

    @property
    def size(self) -> int:
        """Bytes of the disk."""
        return self.blocking.size

    @property
    def block_size(self) -> int:
        """Bytes of the unit of allocation."""
        return self.blocking.block_size

    @property
    def writable(self) -> bool:
        """Whether it may be written."""
        return self.blocking.writable

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self.blocking.closed

    @property
    def layers(self) -> list[Layer]:
        """The images of the chain; the first is the image itself."""
        return self.blocking.layers

    async def pread(self, length: int, offset: int) -> bytes:
        """Reads bytes of the disk."""
        queue = _queue()
        read: bytes = await queue.end_of(queue.native.pread(self.blocking, length, offset))
        return read

    async def pread_into(self, buffer: Buffer, offset: int) -> int:
        """Fills a buffer from the disk, without a copy; returns its length in bytes."""
        queue = _queue()
        token = queue.native.pread_into(self.blocking, buffer, offset)
        count: int = await queue.end_of(token)
        return count

    async def pwrite(self, data: Buffer, offset: int, *, fua: bool = False) -> int:
        """Writes a buffer to the disk, without a copy; returns its length in bytes."""
        queue = _queue()
        token = queue.native.pwrite(self.blocking, data, offset, fua)
        count: int = await queue.end_of(token)
        return count

    async def flush(self) -> None:
        """Makes durable what had been written when it was called."""
        queue = _queue()
        await queue.end_of(queue.native.flush(self.blocking))

    async def discard(self, length: int, offset: int) -> None:
        """Gives up bytes of the disk."""
        queue = _queue()
        await queue.end_of(queue.native.discard(self.blocking, length, offset))

    async def zero(
        self, length: int, offset: int, *, unmap: bool = False, fua: bool = False
    ) -> None:
        """Makes bytes of the disk read as zeroes."""
        queue = _queue()
        await queue.end_of(queue.native.zero(self.blocking, length, offset, (unmap, fua)))

    async def extents(
        self, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[Extent]:
        """The states of a range of the disk, in order, covering it; all of it by default."""
        states = self.blocking.extents(offset, length)
        while True:
            some = await start(lambda: [extent for extent, _ in zip(states, range(256))])
            for extent in some:
                yield extent
            if len(some) < 256:
                return

    async def resize(
        self,
        size: int,
        *,
        shrink: bool = False,
        preallocation: Preallocation = "off",
    ) -> None:
        """Gives the disk another size."""
        resize = self.blocking.resize
        await start(resize, size, shrink=shrink, preallocation=preallocation)

    async def compact(self) -> Compacted:
        """Gives back the space of the file that holds nothing, in place."""
        return await start(self.blocking.compact)

    async def snapshots(self) -> list[Snapshot]:
        """The internal snapshots."""
        return await start(self.blocking.snapshots)

    async def create_snapshot(self, name: str) -> str:
        """Keeps the disk as it is now; returns the snapshot's ID."""
        return await start(self.blocking.create_snapshot, name)

    async def apply_snapshot(self, id_or_name: str) -> None:
        """Takes the disk back to a snapshot; what it holds now is lost."""
        await start(self.blocking.apply_snapshot, id_or_name)

    async def delete_snapshot(self, id_or_name: str) -> None:
        """Deletes a snapshot and frees what only it had."""
        await start(self.blocking.delete_snapshot, id_or_name)

    async def bitmaps(self) -> list[Bitmap]:
        """The persistent bitmaps."""
        return await start(self.blocking.bitmaps)

    async def close(self) -> None:
        """Waits for requests that were given up, flushes and closes."""
        while not self.blocking.closed and self.blocking.requests:
            await asyncio.sleep(0.001)
        await start(self.blocking.close)


async def open(
    name: Name,
    *,
    writable: bool = False,
    format: str | None = None,
    cache: Cache = "writeback",
    discard: bool = True,
    backing: Backing = "any",
    force_share: bool = False,
    passphrase: str | None = None,
) -> Image:
    """Opens an image, as :func:`cowslip.open`."""
    opening = start(
        open_blocking,
        name,
        writable=writable,
        format=format,
        cache=cache,
        discard=discard,
        backing=backing,
        force_share=force_share,
        passphrase=passphrase,
    )
    try:
        return Image(await opening)
    except asyncio.CancelledError:
        try:
            opening.result().close()
        except OSError:
            pass  # It could not be opened, and nobody waits for it.
        raise
