"""Jobs: progress, cancelling, Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time

import cowslip
from support import MIB, InDirectory


class Jobs(InDirectory):
    def source(self, size: int = 64 * MIB) -> None:
        """An image full of data."""
        cowslip.create("a.qcow2", size)
        with cowslip.open("a.qcow2", writable=True) as image:
            data = os.urandom(MIB)
            for offset in range(0, size, MIB):
                image.pwrite(data, offset)

    def assert_equal_disks(self, left: str, right: str) -> None:
        with cowslip.open(left) as one, cowslip.open(right) as other:
            self.assertEqual(one.size, other.size)
            for offset in range(0, one.size, MIB):
                self.assertEqual(one.pread(MIB, offset), other.pread(MIB, offset))

    def test_a_copy_is_equal_and_its_progress_is_seen(self) -> None:
        self.source()
        seen: list[cowslip.Progress] = []
        figures = cowslip.convert("a.qcow2", "b.raw", format="raw", progress=seen.append)
        self.assertEqual(figures.written, 64 * MIB)
        self.assertEqual(seen[-1].fraction, 1.0)
        self.assertEqual(seen[-1].done, seen[-1].total)
        self.assert_equal_disks("a.qcow2", "b.raw")
        job = cowslip.start(cowslip.convert, "b.raw", "c.qcow2", compress=True)
        fractions = [progress.fraction for progress in job]
        self.assertEqual(fractions, sorted(fractions))
        self.assertTrue(job.done)
        self.assertEqual(job.result().read, 64 * MIB)
        self.assert_equal_disks("a.qcow2", "c.qcow2")
        self.assert_clean("c.qcow2")

    def test_a_cancelled_copy_leaves_nothing(self) -> None:
        self.source()
        job = cowslip.start(cowslip.convert, "a.qcow2", "b.qcow2", compress=True)
        while not job.progress.done and not job.done:
            time.sleep(0.001)
        job.cancel()
        with self.assertRaises(cowslip.CancelledError):
            job.result(60)
        self.assertFalse(os.path.exists("b.qcow2"))
        with cowslip.start(cowslip.convert, "a.qcow2", "b.qcow2", compress=True) as job:
            pass
        self.assertTrue(job.done)
        self.assertFalse(os.path.exists("b.qcow2"))
        self.assert_clean("a.qcow2")

    def test_an_exception_of_the_callback_cancels_and_passes(self) -> None:
        self.source(8 * MIB)

        def refuse(_: cowslip.Progress) -> None:
            raise KeyError("enough")

        with self.assertRaises(KeyError):
            cowslip.convert("a.qcow2", "b.qcow2", compress=True, progress=refuse)
        self.assertEqual(threading.active_count(), 1)

    def test_failures_are_raised_where_the_result_is_asked_for(self) -> None:
        job = cowslip.start(cowslip.check, "none.qcow2")
        with self.assertRaises(FileNotFoundError):
            list(job)
        with self.assertRaises(FileNotFoundError):
            job.result()
        cowslip.create("a.qcow2", MIB)
        cowslip.create("small.raw", 4096, format="raw")
        with (
            cowslip.open("a.qcow2") as source,
            cowslip.open("small.raw", writable=True, format="raw") as target,
            self.assertRaises(cowslip.InvalidError),
        ):
            cowslip.convert(source, target)
        with self.assertRaises(FileExistsError):
            cowslip.convert("a.qcow2", "small.raw")
        self.assertEqual(os.path.getsize("small.raw"), 4096)

    def test_an_overlay_is_committed(self) -> None:
        self.source(4 * MIB)
        cowslip.create("top.qcow2", backing_file="a.qcow2", backing_format="qcow2")
        with cowslip.open("top.qcow2", writable=True) as top:
            top.pwrite(b"changed", MIB)
        cowslip.commit("top.qcow2")
        with cowslip.open("a.qcow2") as base:
            self.assertEqual(base.pread(7, MIB), b"changed")
        with cowslip.open("top.qcow2") as top:
            self.assertFalse(any(extent.depth == 0 for extent in top.extents()))
            self.assertEqual(top.pread(7, MIB), b"changed")
        self.assert_clean("a.qcow2")

    def test_a_check_counts_and_names_what_it_finds(self) -> None:
        self.source(MIB)
        with open("a.qcow2", "r+b") as file:
            # A cluster behind the end of the refcounts' own, counted once and used by nothing.
            file.seek(0, os.SEEK_END)
            end = file.tell()
            file.truncate(end + 65536)
            file.seek(2 * 65536 + 2 * (end // 65536))
            file.write(b"\0\1")
        result = cowslip.check("a.qcow2")
        self.assertEqual((result.leaks, result.corruptions, result.clean), (1, 0, False))
        self.assertEqual(len(result.findings), 1)
        self.assertIn("leak", result.findings[0].lower())

    def test_ctrl_c_ends_a_copy_and_leaves_nothing(self) -> None:
        self.source()
        program = """
import cowslip, os, signal, sys
def interrupt(progress):
    if progress.done and not sent:
        sent.append(1)
        os.kill(os.getpid(), signal.SIGINT)
sent = []
try:
    for turn in range(100):
        cowslip.convert("a.qcow2", "b.qcow2", compress=True, progress=interrupt)
        os.unlink("b.qcow2")
except KeyboardInterrupt:
    print("interrupted", os.path.exists("b.qcow2"))
"""
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        self.assertEqual(ended.stdout, "interrupted False\n", ended.stderr)
        self.assert_clean("a.qcow2")

    def test_a_program_that_ends_waits_for_its_job(self) -> None:
        self.source(8 * MIB)
        program = 'import cowslip; cowslip.start(cowslip.convert, "a.qcow2", "b.qcow2")'
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
        self.assert_equal_disks("a.qcow2", "b.qcow2")
        self.assert_clean("b.qcow2")

    def test_a_killed_copy_leaves_a_sound_source(self) -> None:
        self.source()
        program = 'import cowslip; cowslip.convert("a.qcow2", "b.qcow2", compress=True)'
        child = subprocess.Popen([sys.executable, "-c", program])
        while not os.path.exists("b.qcow2") and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.wait()
        self.assert_clean("a.qcow2")
