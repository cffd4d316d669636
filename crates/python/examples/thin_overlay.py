"""From nothing to a thin overlay that is served, as a virtual machine takes it.

    python3 thin_overlay.py DIRECTORY
"""

import os
import sys

import cowslip

os.chdir(sys.argv[1])
cowslip.create("golden.qcow2", 10 << 30, extended_l2=True)
with cowslip.open("golden.qcow2", writable=True) as golden:
    golden.pwrite(b"an operating system", 1 << 20)

base = {"backing_file": "golden.qcow2", "backing_format": "qcow2"}
cowslip.create("vm.qcow2", extended_l2=True, **base)
with cowslip.open("vm.qcow2", writable=True) as image, image.serve("vm.sock") as server:
    print("qemu-system-x86_64 -drive file=" + server.uri, flush=True)
    sys.stdin.read()  # Until its input ends.
