"""What the tests share."""

import faulthandler
import os
import shutil
import subprocess
import tempfile
import unittest

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

    def assert_clean(self, name: str) -> None:
        """Both checkers find nothing, where QEMU's is there."""
        self.assertTrue(cowslip.check(name).clean)
        if shutil.which("qemu-img"):
            subprocess.run(["qemu-img", "check", "-q", name], check=True)
