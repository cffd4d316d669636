"""Cowslip: qcow2 images that allocate well, as objects.

>>> import cowslip
>>> cowslip.create("vm.qcow2", 10 << 30)
>>> with cowslip.open("vm.qcow2", writable=True) as image:
...     image.pwrite(b"bytes of a guest", 1 << 20)
...     image.flush()
...     image.pread(5, 1 << 20)
16
b'bytes'

Calls block, without Python's lock: threads run beside them. :mod:`cowslip.aio` is for asyncio.
Offsets and lengths are in bytes, and the length, or the buffer, comes before the offset.
"""

from . import aio
from ._cowslip import VERSION as __version__
from ._errors import (
    CancelledError,
    CorruptError,
    DeniedError,
    Error,
    ExistsError,
    InvalidError,
    LatchedError,
    LockedError,
    NotFoundError,
    OpenError,
    OverwriteError,
    PassphraseError,
    ReadOnlyError,
    UnsupportedError,
)
from ._image import (
    Bitmap,
    Compacted,
    DirtyExtent,
    DiskFile,
    Extent,
    Image,
    Layer,
    Server,
    Snapshot,
    open,
)
from ._jobs import Job, Progress, start
from ._whole import CheckResult, Converted, check, commit, convert, create

__all__ = [
    "Bitmap",
    "CancelledError",
    "CheckResult",
    "Compacted",
    "Converted",
    "CorruptError",
    "DeniedError",
    "DirtyExtent",
    "DiskFile",
    "Error",
    "ExistsError",
    "Extent",
    "Image",
    "InvalidError",
    "Job",
    "LatchedError",
    "Layer",
    "LockedError",
    "NotFoundError",
    "OpenError",
    "OverwriteError",
    "PassphraseError",
    "Progress",
    "ReadOnlyError",
    "Server",
    "Snapshot",
    "UnsupportedError",
    "__version__",
    "aio",
    "check",
    "commit",
    "convert",
    "create",
    "open",
    "start",
]
