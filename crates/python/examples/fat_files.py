"""Lists and prints the files of a FAT16 file system inside an image of any kind.

    python3 fat_files.py IMAGE [NAME]

It reads the image as what it is for Python, a file: so do libraries that know other file systems.
"""

import io
import struct
import sys
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import cowslip


class Entry(NamedTuple):
    """A file of the root directory."""

    name: str
    size: int
    cluster: int


class Fat16:
    """A FAT16 file system in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        boot = self._bytes(0, 64)
        sector, per_cluster, reserved, fats, roots = struct.unpack_from("<HBHBH", boot, 11)
        (fat_sectors,) = struct.unpack_from("<H", boot, 22)
        if boot[54:59] != b"FAT16":
            raise ValueError("no FAT16 file system")
        self.cluster_bytes = sector * per_cluster
        self.root = (reserved + fats * fat_sectors) * sector, roots * 32
        self.data = sum(self.root) - 2 * self.cluster_bytes
        table = self._bytes(reserved * sector, fat_sectors * sector)
        self.next = memoryview(table).cast("H")

    def _bytes(self, offset: int, length: int) -> bytes:
        self.file.seek(offset)
        return self.file.read(length)

    def entries(self) -> Iterator[Entry]:
        """The files of the root directory."""
        for fields in struct.iter_unpack("<8s3sB14xHL", self._bytes(*self.root)):
            stem, extension, attributes, cluster, size = fields
            if stem[0] == 0:
                return
            if stem[0] != 0xE5 and not attributes & 0x18:
                name = (stem.rstrip() + b"." + extension.rstrip()).rstrip(b".")
                yield Entry(name.decode("ascii", "replace"), size, cluster)

    def read(self, entry: Entry) -> bytes:
        """The bytes of a file."""
        found, cluster = bytearray(), entry.cluster
        while len(found) < entry.size and 2 <= cluster < 0xFFF8:
            found += self._bytes(self.data + cluster * self.cluster_bytes, self.cluster_bytes)
            cluster = self.next[cluster]
        return bytes(found[: entry.size])


def main(image: str, wanted: str | None = None) -> None:
    with cowslip.open(image) as opened, io.BufferedReader(opened.file()) as file:
        system = Fat16(file)
        for entry in system.entries():
            if wanted is None:
                print(f"{entry.size:9} {entry.name}")
            elif entry.name == wanted:
                sys.stdout.buffer.write(system.read(entry))


if __name__ == "__main__":
    main(*sys.argv[1:])
