"""Operations on whole images: making, checking, copying, committing."""

from __future__ import annotations

import os
from typing import NamedTuple

from . import _cowslip
from ._image import Backing, Cache, Image, Name, Opening, Preallocation, Watch, open
from ._jobs import run


class CheckResult(NamedTuple):
    """The findings of :func:`check`."""

    corruptions: int
    """Findings that lose data, or may."""
    leaks: int
    """Clusters that are counted, and not used."""
    errors: int
    """Structures that could not be checked."""
    allocated_clusters: int
    fragmented_clusters: int
    total_clusters: int
    findings: list[str]
    """The first thousand findings, in words."""

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not (self.corruptions or self.leaks or self.errors)


class Converted(NamedTuple):
    """Figures of :func:`convert`."""

    read: int
    """Bytes that were read."""
    written: int
    """Bytes of data that were written."""
    zeroed: int
    """Bytes that were written as zeroes."""


def create(
    name: Name,
    size: int = 0,
    *,
    format: str = "qcow2",
    backing_file: str | None = None,
    backing_format: str | None = None,
    cluster_size: int | None = None,
    extended_l2: bool = False,
    compression: str = "zlib",
    preallocation: Preallocation = "off",
    replace: bool = False,
    progress: Watch | None = None,
) -> None:
    """Makes an image. A job.

    Without a size an overlay has that of its backing file. ``backing_file`` stands in the image as
    it is given: a relative one is looked for beside the image. What fails, or is cancelled, leaves
    no new file; an existing one is an error, unless it is to be replaced.
    """
    if backing_file is not None and backing_format is None:
        raise ValueError("a backing file and its format are named together")
    options = {
        "size": size,
        "format": format,
        "backing_file": backing_file,
        "backing_format": backing_format,
        "cluster_size": cluster_size,
        "extended_l2": extended_l2,
        "compression": compression,
        "preallocation": preallocation,
        "replace": replace,
    }
    run(lambda job: _cowslip.create(os.fspath(name), options, job), progress)


def check(
    name: Name,
    *,
    format: str | None = None,
    force_share: bool = False,
    progress: Watch | None = None,
) -> CheckResult:
    """Checks the structures of an image, and changes nothing. A job."""
    options = Opening(format=format, force_share=force_share)._asdict()
    counts, findings = run(
        lambda job: _cowslip.check(os.fspath(name), options, job), progress
    )
    return CheckResult(*counts, findings)


def convert(
    source: Name | Image,
    target: Name | Image,
    *,
    format: str = "qcow2",
    compress: bool = False,
    cluster_size: int | None = None,
    extended_l2: bool = False,
    compression: str = "zlib",
    replace: bool = False,
    progress: Watch | None = None,
) -> Converted:
    """Copies a disk, with holes as holes, and flattens its chain. A job.

    Source and target are names or open images. A target by name is made; if that fails or is
    cancelled, what was made of it is removed.
    """

    def work(job: _cowslip.Job) -> tuple[int, int, int]:
        if isinstance(source, Image):
            return into(source, job)
        with open(source) as opened:
            return into(opened, job)

    def into(opened: Image, job: _cowslip.Job) -> tuple[int, int, int]:
        if isinstance(target, Image):
            return _cowslip.convert(opened, target, (compress, False), job)
        options = {
            "size": opened.size,
            "format": format,
            "backing_file": None,
            "backing_format": None,
            "cluster_size": cluster_size,
            "extended_l2": extended_l2,
            "compression": compression,
            "preallocation": "off",
            "replace": replace,
        }
        path = os.fspath(target)
        existed = os.path.lexists(path)
        _cowslip.create(path, options, job)
        try:
            with open(path, writable=True, format=format) as made:
                return _cowslip.convert(opened, made, (compress, not existed), job)
        except BaseException:
            if not existed and os.path.isfile(path):
                os.unlink(path)
            raise

    return Converted(*run(work, progress))


def commit(
    name: Name,
    *,
    format: str | None = None,
    cache: Cache = "writeback",
    backing: Backing = "any",
    passphrase: str | None = None,
    progress: Watch | None = None,
) -> None:
    """Writes what an overlay holds into its backing file, and empties it. A job.

    Cancelled or failed, the overlay shows its disk as before.
    """
    opening = Opening(format, True, cache, True, False, backing, passphrase)
    run(lambda job: _cowslip.commit(os.fspath(name), opening._asdict(), job), progress)
