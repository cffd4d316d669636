"""The examples, and what the manual's chapter says, as they stand there."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import unittest

import cowslip
from support import MIB, InDirectory

REPOSITORY = pathlib.Path(os.environ["COWSLIP_REPOSITORY"]).resolve()
EXAMPLES = REPOSITORY / "crates/python/examples"
CHAPTER = REPOSITORY / "manual/library-python.md"


def run(example: str, *arguments: str, **options: object) -> str:
    """Runs an example; its output."""
    ended = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
    if ended.returncode != 0:
        raise AssertionError(ended.stderr)
    return ended.stdout


def fat16(files: dict[str, bytes]) -> bytes:
    """A FAT16 file system of 16 MiB with clusters of 2 KiB, whose files lie in every second
    cluster."""
    disk = bytearray(16 * MIB)
    struct.pack_into("<3s8sHBHBHHBHHHLL", disk, 0, b"\xeb\x3c\x90", b"COWSLIP ", 512, 4, 1, 2, 512,
                     32768, 0xF8, 32, 63, 16, 0, 0)
    disk[36:62] = b"\x80\0\x29" + b"\1\2\3\4" + b"COWSLIP    " + b"FAT16   "
    disk[510:512] = b"\x55\xaa"
    table = [0xFFF8, 0xFFFF] + [0] * (32 * 256 - 2)
    root, data = (1 + 64) * 512, (1 + 64) * 512 + 512 * 32
    cluster = 2
    for number, (name, content) in enumerate(files.items()):
        stem, _, extension = name.partition(".")
        first = cluster
        for at in range(0, len(content), 2048):
            part = content[at : at + 2048]
            place = data + (cluster - 2) * 2048
            disk[place : place + len(part)] = part
            is_last = at + 2048 >= len(content)
            table[cluster] = 0xFFFF if is_last else cluster + 2
            cluster += 2
        entry = stem.ljust(8).encode() + extension.ljust(3).encode() + b"\x20" + bytes(14)
        entry += struct.pack("<HL", first, len(content))
        disk[root + 32 * number : root + 32 * number + 32] = entry
    packed = struct.pack(f"<{len(table)}H", *table)
    disk[512 : 512 + len(packed)] = packed
    disk[512 + 32 * 512 : 512 + 32 * 512 + len(packed)] = packed
    return bytes(disk)


class Examples(InDirectory):
    def test_an_incremental_backup_copies_what_has_changed(self) -> None:
        cowslip.create("vm.qcow2", 256 * MIB)
        model = bytearray(256 * MIB)

        def write(data: bytes, offset: int) -> None:
            model[offset : offset + len(data)] = data
            with cowslip.open("vm.qcow2", writable=True) as image:
                image.pwrite(data, offset)

        write(os.urandom(9 * MIB), 3 * MIB)
        self.assertEqual(run("incremental_backup.py", "vm.qcow2", "copies"),
                         f"{9 * MIB} bytes copied\n")
        write(b"changed", 100 * MIB - 3)
        write(os.urandom(6 * MIB), 5 * MIB)
        copied = int(run("incremental_backup.py", "vm.qcow2", "copies").split()[0])
        self.assertTrue(6 * MIB < copied <= 7 * MIB, copied)
        self.assertEqual(run("incremental_backup.py", "vm.qcow2", "copies"), "0 bytes copied\n")
        self.assertEqual(sorted(os.listdir("copies")),
                         ["000000.qcow2", "000001.qcow2", "000002.qcow2"])
        with cowslip.open("copies/000002.qcow2") as copy:
            self.assertEqual(len(copy.layers), 3)
            for offset in range(0, copy.size, 16 * MIB):
                self.assertEqual(copy.pread(16 * MIB, offset), model[offset : offset + 16 * MIB])
        for name in ("vm.qcow2", "copies/000001.qcow2"):
            self.assert_clean(name)
        lines = (EXAMPLES / "incremental_backup.py").read_text().split('"""', 2)[2].splitlines()
        code = [line for line in lines if line.strip()]
        self.assertLessEqual(len(code), 45)

    def test_files_of_a_file_system_inside_an_image_are_read(self) -> None:
        files = {"README.TXT": b"as a guest has written it\n", "DATA": os.urandom(70_001)}
        pathlib.Path("fat.raw").write_bytes(fat16(files))
        cowslip.convert("fat.raw", "fat.qcow2", compress=True)
        cowslip.create("top.qcow2", backing_file="fat.qcow2", backing_format="qcow2")
        listed = run("fat_files.py", "top.qcow2")
        self.assertEqual(listed, "       26 README.TXT\n    70001 DATA\n")
        self.assertEqual(run("fat_files.py", "top.qcow2", "README.TXT"),
                         "as a guest has written it\n")
        ended = subprocess.run([sys.executable, EXAMPLES / "fat_files.py", "top.qcow2", "DATA"],
                               capture_output=True, check=True)
        self.assertEqual(ended.stdout, files["DATA"])
        if shutil.which("fsck.fat"):
            subprocess.run(["fsck.fat", "-n", "fat.raw"], check=True, capture_output=True)

    def test_a_forensic_library_reads_an_image(self) -> None:
        if importlib.util.find_spec("dissect") is None or not shutil.which("mkfs.ext4"):
            print("SKIPPED: not installed: dissect.extfs and mkfs.ext4", file=sys.stderr)
            self.skipTest("dissect.extfs or mkfs.ext4 is not installed")
        os.makedirs("tree/etc")
        pathlib.Path("tree/etc/hostname").write_text("guest\n")
        mkfs = ["mkfs.ext4", "-q", "-d", "tree", "fs.raw", "32M"]
        subprocess.run(mkfs, check=True)
        cowslip.convert("fs.raw", "fs.qcow2", compress=True)
        self.assertEqual(run("forensic.py", "fs.qcow2", "/etc/hostname"), "guest\n")

    def test_a_thin_overlay_is_served_in_25_lines(self) -> None:
        program = EXAMPLES / "thin_overlay.py"
        code = program.read_text().split('"""', 2)[2].splitlines()
        self.assertLessEqual(len(code), 25)
        served = subprocess.Popen([sys.executable, program, "."], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        with served:
            uri = served.stdout.readline().partition("file=")[2].strip()
            self.assertTrue(uri.startswith("nbd+unix:///?socket="), uri)
            with cowslip.open(uri, format="raw", writable=True) as client:
                self.assertEqual(client.pread(19, MIB), b"an operating system")
                client.pwrite(b"a guest's own", 5 * MIB)
            if shutil.which("qemu-io"):
                read = ["qemu-io", "-f", "raw", "-c", "read -P 0x61 5M 1", uri]
                ended = subprocess.run(read, capture_output=True, text=True, check=True)
                self.assertNotIn("failed", ended.stdout)
            served.stdin.close()
            self.assertEqual(served.wait(30), 0)
        self.assertLess(os.stat("vm.qcow2").st_blocks * 512, MIB)
        with cowslip.open("vm.qcow2") as overlay:
            self.assertEqual(overlay.pread(13, 5 * MIB), b"a guest's own")
        for name in ("vm.qcow2", "golden.qcow2"):
            self.assert_clean(name)

    def test_the_blocks_of_the_manual_work_in_their_order(self) -> None:
        blocks = re.findall(r"^```python\n(.*?)^```$", CHAPTER.read_text(), re.M | re.S)
        blocks = [block for block in blocks if "{{#include" not in block]
        self.assertGreaterEqual(len(blocks), 6)
        names: dict[str, object] = {}
        for number, block in enumerate(blocks):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block, f"block {number} of {CHAPTER.name}", "exec"), names)
            expected = re.findall(r"#> (.*)", block)
            self.assertEqual(printed.getvalue().splitlines(), expected, block)


if __name__ == "__main__":
    unittest.main()
