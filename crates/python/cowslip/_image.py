"""Images: opening, and what is done with an open one. Calls block, without Python's lock."""

from __future__ import annotations

import io
import os
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal, NamedTuple

from . import _cowslip
from ._jobs import Progress, run

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

Name = str | os.PathLike[str]
Cache = Literal["writeback", "none", "writethrough", "directsync", "unsafe"]
Backing = Literal["any", "same-directory", "none"]
Preallocation = Literal["off", "metadata", "falloc", "full"]
Watch = Callable[[Progress], object]

#: Extents, and runs of a bitmap, that are asked for at a time.
AT_A_TIME = 1024


class Extent(NamedTuple):
    """A run of the disk with one state, as ``qemu-img map`` shows it."""

    start: int
    """First byte on the disk."""
    length: int
    """Bytes; never 0."""
    depth: int
    """The layer that decides: 0 is the image itself, 1 its backing file."""
    present: bool
    """Some layer has it."""
    zero: bool
    """It reads as zeroes."""
    data: bool
    """It is stored as data."""
    compressed: bool
    """It is stored compressed."""
    host_offset: int | None
    """Where its bytes are in that layer's file, if they are there as they are."""


class DirtyExtent(NamedTuple):
    """A run of the disk and whether it was written since the bitmap was made or cleared."""

    start: int
    length: int
    dirty: bool


class Layer(NamedTuple):
    """An image of the chain."""

    name: str
    format: str
    size: int


class Snapshot(NamedTuple):
    """An internal snapshot."""

    id: str
    name: str
    date: datetime
    """When it was taken."""
    vm_state_size: int
    """Bytes of the machine's saved state; 0 without one."""
    vm_clock: float
    """Seconds that the machine had run."""


class Bitmap(NamedTuple):
    """A persistent bitmap of written parts of the disk."""

    name: str
    granularity: int
    """Bytes that a bit stands for."""
    enabled: bool
    """It follows writes."""
    inconsistent: bool
    """It was not stored properly, and can only be removed."""


class Compacted(NamedTuple):
    """Figures of :meth:`Image.compact`."""

    before: int
    """Bytes of the file before."""
    after: int
    """Bytes of the file now."""
    moved: int
    """Bytes that were copied."""
    leaked: int
    """Bytes of leaks that were freed."""


class Opening(NamedTuple):
    """How an image is opened; see :func:`open`."""

    format: str | None = None
    writable: bool = False
    cache: str = "writeback"
    discard: bool = True
    force_share: bool = False
    backing: str = "any"
    passphrase: str | None = None


class Image(_cowslip.Image):
    """An open image, with its chain; made by :func:`open`.

    A ``with`` block closes it. Any number of threads may use it at once. A process that was forked
    cannot use it, and opens its own.
    """

    __slots__ = ("name",)

    name: str

    def __new__(cls, name: Name, opening: Opening = Opening()) -> Self:
        self = super().__new__(cls, os.fspath(name), opening._asdict())
        self.name = os.fspath(name)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            warnings.warn(f"unclosed image {self.name!r}", ResourceWarning, source=self)
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.size} bytes"
        return f"<cowslip.Image {self.name!r}: {state}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("an open image cannot be pickled")

    @property
    def layers(self) -> list[Layer]:
        """The images of the chain; the first is the image itself."""
        return [Layer(*fields) for fields in self.layer_fields()]

    def extents(self, offset: int = 0, length: int | None = None) -> Iterator[Extent]:
        """The states of a range of the disk, in order, covering it; all of it by default."""
        end = self.size if length is None else offset + length
        while offset < end:
            found = self.extent_fields(offset, end - offset, AT_A_TIME)
            for fields in found:
                extent = Extent(*fields)
                yield extent
                offset = extent.start + extent.length

    def resize(
        self,
        size: int,
        *,
        shrink: bool = False,
        preallocation: Preallocation = "off",
        progress: Watch | None = None,
    ) -> None:
        """Gives the disk another size; what is added reads as zeroes. A job.

        A smaller size loses data, and needs ``shrink=True``.
        """
        if size < self.size and not shrink:
            raise ValueError("a smaller disk loses data: shrink=True says that it may")
        run(lambda job: self.resize_as_job(size, preallocation, job), progress)

    def compact(self, *, progress: Watch | None = None) -> Compacted:
        """Gives back the space of the file that holds nothing, in place. A job."""
        return Compacted(*run(self.compact_as_job, progress))

    def snapshots(self) -> list[Snapshot]:
        """The internal snapshots."""
        return [
            Snapshot(
                identity,
                name,
                datetime.fromtimestamp(seconds, timezone.utc).replace(
                    microsecond=min(nanoseconds, 999_999_999) // 1000
                ),
                state,
                clock / 1e9,
            )
            for identity, name, seconds, nanoseconds, state, clock in self.snapshot_fields()
        ]

    def create_snapshot(self, name: str, *, progress: Watch | None = None) -> str:
        """Keeps the disk as it is now; returns the snapshot's ID. A job."""
        return run(lambda job: self.create_snapshot_as_job(name, job), progress)

    def apply_snapshot(self, id_or_name: str, *, progress: Watch | None = None) -> None:
        """Takes the disk back to a snapshot; what it holds now is lost. A job."""
        run(lambda job: self.snapshot_as_job(id_or_name, False, job), progress)

    def delete_snapshot(self, id_or_name: str, *, progress: Watch | None = None) -> None:
        """Deletes a snapshot and frees what only it had. A job."""
        run(lambda job: self.snapshot_as_job(id_or_name, True, job), progress)

    def bitmaps(self) -> list[Bitmap]:
        """The persistent bitmaps."""
        return [Bitmap(*fields) for fields in self.bitmap_fields()]

    def dirty(self, bitmap: str) -> Iterator[DirtyExtent]:
        """The runs of the disk that a bitmap has noted, and those between, covering the disk."""
        offset = 0
        while offset < self.size:
            runs = self.dirty_fields(bitmap, offset, AT_A_TIME)
            for length, dirty in runs:
                yield DirtyExtent(offset, length, dirty)
                offset += length
            if not runs:
                return

    def serve(self, socket: Name) -> Server:
        """Serves the disk over NBD on a new Unix socket, in a thread, until it is stopped."""
        return Server(self, socket)

    def file(self) -> DiskFile:
        """The disk as a file with a position, for code that reads files. Closing it leaves the
        image open."""
        return DiskFile(self)


class Server(_cowslip.Server):
    """A disk that is served over NBD, made by :meth:`Image.serve`. A ``with`` block stops it.

    Its image cannot be closed before, and may be used beside its clients.
    """

    __slots__ = ("socket",)

    socket: str
    """Path of the Unix socket."""

    def __new__(cls, image: Image, socket: Name) -> Self:
        self = super().__new__(cls, image, os.fspath(socket))
        self.socket = os.path.abspath(socket)
        return self

    @property
    def uri(self) -> str:
        """The URI that clients take."""
        return f"nbd+unix:///?socket={urllib.parse.quote(self.socket)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class DiskFile(io.RawIOBase):
    """A disk as an unbuffered file; ``io.BufferedReader`` and its kin buffer it.

    Its end is that of the disk, which writes do not move.
    """

    def __init__(self, image: Image) -> None:
        super().__init__()
        self._image = image
        self._position = 0

    @property
    def image(self) -> Image:
        """The image that it is of."""
        return self._image

    @property
    def size(self) -> int:
        """Bytes of the disk."""
        return self._image.size

    def readable(self) -> bool:
        self._check_open()
        return True

    def writable(self) -> bool:
        self._check_open()
        return self._image.writable

    def seekable(self) -> bool:
        self._check_open()
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        if whence == os.SEEK_SET:
            position = offset
        elif whence == os.SEEK_CUR:
            position = self._position + offset
        elif whence == os.SEEK_END:
            position = self._image.size + offset
        else:
            raise ValueError(f"whence is {whence}")
        if position < 0:
            raise ValueError(f"the position would be {position}")
        self._position = position
        return position

    def tell(self) -> int:
        self._check_open()
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        return self._pass(buffer, self._image.pread_into)

    def write(self, data: Buffer, /) -> int:
        return self._pass(data, self._image.pwrite)

    def flush(self) -> None:
        """Makes durable what was written."""
        if not self.closed and not self._image.closed and self._image.writable:
            self._image.flush()

    def _pass(self, buffer: Buffer, request: Callable[[memoryview, int], object]) -> int:
        """Passes to a request what of a buffer is before the end of the disk, and moves on."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._image.size - self._position)]
        if len(view):
            request(view, self._position)
        self._position += len(view)
        return len(view)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")


def open(
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
    """Opens an image: a path, ``nbd://…``, ``https://…``, ``s3://…`` or ``json:{…}``.

    - ``format``: ``qcow2``, ``raw``, …; found out if it is not given. Untrusted images are opened
      with their format, and with a policy for ``backing``.
    - ``cache``: the page cache (``writeback``, ``writethrough``), past it (``none``,
      ``directsync``), or without durability (``unsafe``).
    - ``discard``: discards free clusters and give their space back to the host.
    - ``backing``: files that the image may name: ``any``, those in its directory or below
      (``same-directory``), or ``none``.
    - ``force_share``: reads it although another program writes it.
    """
    opening = Opening(format, writable, cache, discard, force_share, backing, passphrase)
    return Image(name, opening)
