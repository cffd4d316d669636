"""Backs up an image, each time what has changed since the time before.

    python3 incremental_backup.py IMAGE DIRECTORY

The first copy is whole. The later ones are overlays on the one before: opened, the last shows all
of the disk. The image keeps a bitmap of what is written between, so it is not in use meanwhile.
"""

import pathlib
import sys

import cowslip

BITMAP = "incremental-backup"
PIECE = 4 << 20


def back_up(name: str, directory: pathlib.Path) -> int:
    """Makes the next copy, and returns the bytes that were copied."""
    directory.mkdir(exist_ok=True)
    before = sorted(directory.glob("*.qcow2"))
    copy = directory / f"{len(before):06}.qcow2"
    unfinished = copy.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    with cowslip.open(name, writable=True) as image:
        found = {bitmap.name: bitmap for bitmap in image.bitmaps()}.get(BITMAP)
        if before and found and not found.inconsistent:
            below = {"backing_file": before[-1].name, "backing_format": "qcow2"}
            cowslip.create(unfinished, image.size, **below)
            with cowslip.open(unfinished, writable=True) as target:
                copied = copy_changes(image, target)
        else:
            copied = cowslip.convert(image, unfinished).written
        # The next copy begins here once this one is on disk under its name.
        unfinished.rename(copy)
        if found:
            image.remove_bitmap(BITMAP)
        image.add_bitmap(BITMAP)
    return copied


def copy_changes(image: cowslip.Image, target: cowslip.Image) -> int:
    """Copies what the bitmap has noted."""
    memory = memoryview(bytearray(PIECE))
    copied = 0
    for start, length, dirty in image.dirty(BITMAP):
        for offset in range(start, start + length if dirty else start, PIECE):
            piece = memory[: min(PIECE, start + length - offset)]
            image.pread_into(piece, offset)
            copied += target.pwrite(piece, offset)
    return copied


if __name__ == "__main__":
    print(back_up(sys.argv[1], pathlib.Path(sys.argv[2])), "bytes copied")
