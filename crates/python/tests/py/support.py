"""What the tests share."""

import faulthandler
import os
import shutil
import subprocess
import tempfile
import threading
import unittest
from collections.abc import Callable

import cowslip

MIB = 1 << 20

# What hangs ends, and shows where its threads are.
faulthandler.dump_traceback_later(120, exit=True)


class InDirectory(unittest.TestCase):
    """Tests in a scratch directory, which is the working directory meanwhile."""

    def setUp(self) -> None:
        scratch = tempfile.mkdtemp(prefix="cowslip-python-", dir=os.environ.get("SCRATCH"))
        self.addCleanup(shutil.rmtree, scratch)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(scratch)

    def opened(self, name: str = "a.qcow2", size: int = 64 * MIB, **options: object):
        """A new image, open for writing until the test ends."""
        cowslip.create(name, size, **options)
        image = cowslip.open(name, writable=True)
        self.addCleanup(image.close)
        return image

    def in_threads(self, count: int, work: Callable[[int], None]) -> None:
        """Runs this in so many threads at once; none fails."""
        failures: list[BaseException] = []

        def guarded(number: int) -> None:
            try:
                work(number)
            except BaseException as raised:
                failures.append(raised)

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def assert_clean(self, name: str) -> None:
        """Both checkers find nothing, where QEMU's is there."""
        self.assertTrue(cowslip.check(name).clean)
        if shutil.which("qemu-img"):
            subprocess.run(["qemu-img", "check", "-q", name], check=True)
