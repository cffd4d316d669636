"""Reads an ext4 file system inside an image with a forensic library, dissect.extfs.

    python3 forensic.py IMAGE PATH

The library comes from PyPI (pip install dissect.extfs), and takes any file that can be read.
"""

import io
import sys

import cowslip
from dissect.extfs import ExtFS


def main(image: str, path: str) -> None:
    with cowslip.open(image) as opened:
        system = ExtFS(io.BufferedReader(opened.file(), 1 << 20))
        sys.stdout.buffer.write(system.get(path).open().read())


if __name__ == "__main__":
    main(*sys.argv[1:])
