"""Images whose calls block."""

import array
import errno
import io
import mmap
import os
import pickle
import threading
import warnings
from datetime import datetime, timedelta, timezone

import cowslip
from support import MIB, InDirectory


class Requests(InDirectory):
    def test_what_was_written_is_read_and_survives(self) -> None:
        image = self.opened()
        self.assertEqual(image.pwrite(b"bytes of a guest", MIB), 16)
        image.flush()
        self.assertEqual(image.pread(18, MIB - 1), b"\0bytes of a guest\0")
        self.assertEqual(image.pread(0, 64 * MIB), b"")
        image.zero(2, MIB)
        image.pwrite(b"!", MIB + 15, fua=True)
        image.close()
        with cowslip.open("a.qcow2") as image:
            self.assertEqual(image.pread(16, MIB), b"\0\0tes of a gues!")
            self.assertFalse(image.writable)
            with self.assertRaises(cowslip.ReadOnlyError) as raised:
                image.pwrite(b"x", 0)
        self.assertEqual(raised.exception.errno, errno.EACCES)
        self.assert_clean("a.qcow2")

    def test_any_contiguous_buffer_is_written_and_filled(self) -> None:
        image = self.opened()
        numbers = array.array("Q", range(1000))
        for offset in (0, 3, 4093):
            self.assertEqual(image.pwrite(numbers, offset), 8000)
            back = array.array("Q", bytes(8000))
            self.assertEqual(image.pread_into(back, offset), 8000)
            self.assertEqual(back, numbers)
        # Parts at any address, whose neighbours stay.
        for start in range(9):
            for length in (0, 1, 7, 8, 9, 4096):
                memory = bytearray(b"\xaa" * (start + length + 9))
                image.pread_into(memoryview(memory)[start : start + length], 4093)
                self.assertEqual(memory[start : start + length], image.pread(length, 4093))
                self.assertEqual(memory[:start], b"\xaa" * start)
                self.assertEqual(memory[start + length :], b"\xaa" * 9)
        with mmap.mmap(-1, 2 * MIB) as mapped:
            image.pread_into(mapped, 0)
            self.assertEqual(mapped[:8000], image.pread(8000, 0))
            image.pwrite(mapped, 4 * MIB)
        self.assertEqual(image.pread(8000, 4 * MIB), image.pread(8000, 0))
        table = memoryview(bytearray(range(64))).cast("B", (8, 8))
        image.pwrite(table, 0)
        self.assertEqual(image.pread(64, 0), bytes(range(64)))

    def test_other_buffers_and_types_are_refused(self) -> None:
        image = self.opened()
        with self.assertRaises(BufferError):
            image.pread_into(b"constant", 0)
        with self.assertRaises(BufferError):
            image.pwrite(memoryview(bytes(10))[::2], 0)
        calls = [
            lambda: image.pwrite("text", 0),
            lambda: image.pwrite(None, 0),
            lambda: image.pread_into(5, 0),
            lambda: image.pread("1", 0),
            lambda: image.pread(1.5, 0),
            lambda: image.pread(1),
            lambda: image.discard(1, None),
            lambda: image.pwrite(b"", 0, True),
            lambda: cowslip.open(17),
            lambda: cowslip.open("a.qcow2", writable="yes"),
            lambda: cowslip.Image("a.qcow2", None),
            lambda: cowslip.create("b.qcow2", "1G"),
            lambda: cowslip.convert(image, 5),
            lambda: pickle.dumps(image),
        ]
        for call in calls:
            with self.assertRaises((TypeError, AttributeError)):
                call()
        for call in (lambda: image.pread(-1, 0), lambda: image.pread(1, 1 << 64)):
            with self.assertRaises(OverflowError):
                call()
        with self.assertRaises(OSError):
            cowslip.open("a\0b")
        # Nothing of this has hurt it.
        image.pwrite(b"x", 0)
        self.assertEqual(image.pread(1, 0), b"x")

    def test_requests_beyond_the_end_are_errors_and_take_no_memory(self) -> None:
        image = self.opened()
        for length, offset in ((1, 64 * MIB), ((1 << 63) - 1, 0), (1, (1 << 64) - 1)):
            for call in (image.pread, image.discard, image.zero):
                with self.assertRaises(cowslip.InvalidError, msg=str(call)) as raised:
                    call(length, offset)
                self.assertEqual(raised.exception.errno, errno.EINVAL)
        with self.assertRaises(cowslip.InvalidError):
            image.pwrite(bytes(2), 64 * MIB - 1)
        with self.assertRaises(cowslip.InvalidError):
            image.pread_into(bytearray(2), 64 * MIB - 1)
        huge = self.opened("huge.qcow2", 1 << 55, cluster_size=2 * MIB)
        with self.assertRaises(MemoryError):
            huge.pread(1 << 54, 0)
        with self.assertRaises(cowslip.Error):
            huge.resize(1 << 63)

    def test_a_closed_image_says_so(self) -> None:
        image = self.opened()
        image.close()
        image.close()
        self.assertTrue(image.closed)
        self.assertIn("closed", repr(image))
        calls = [
            lambda: image.pread(1, 0),
            lambda: image.pwrite(b"x", 0),
            lambda: image.flush(),
            lambda: image.size,
            lambda: image.layers,
            lambda: list(image.extents()),
            lambda: image.compact(),
            lambda: image.create_snapshot("x"),
            lambda: cowslip.convert(image, "b.raw", format="raw"),
            lambda: image.file().read(1),
        ]
        for call in calls:
            with self.assertRaisesRegex(ValueError, "closed"):
                call()
        self.assertFalse(os.path.exists("b.raw"))

    def test_a_forgotten_image_is_flushed_and_closed_with_a_warning(self) -> None:
        cowslip.create("a.qcow2", MIB)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            image = cowslip.open("a.qcow2", writable=True)
            image.pwrite(b"kept", 0)
            del image
        self.assertEqual([warning.category for warning in caught], [ResourceWarning])
        with cowslip.open("a.qcow2") as image:
            self.assertEqual(image.pread(4, 0), b"kept")


class Opening(InDirectory):
    def test_errors_have_kind_number_and_words(self) -> None:
        with self.assertRaises(FileNotFoundError) as raised:
            cowslip.open("none.qcow2")
        self.assertIsInstance(raised.exception, cowslip.NotFoundError)
        self.assertEqual(raised.exception.errno, errno.ENOENT)
        self.assertIn("'none.qcow2'", str(raised.exception))
        image = self.opened()
        with self.assertRaises(FileExistsError):
            cowslip.create("a.qcow2", MIB)
        with self.assertRaises(BlockingIOError) as raised:
            cowslip.open("a.qcow2")
        self.assertIsInstance(raised.exception, cowslip.LockedError)
        with cowslip.open("a.qcow2", force_share=True) as shared:
            self.assertEqual(shared.size, image.size)
        for options in ({"cache": "x"}, {"backing": "x"}, {"format": "x"}):
            with self.assertRaises(cowslip.Error):
                cowslip.open("a.qcow2", **options)
        for options in ({"compression": "x"}, {"preallocation": "x"}, {"cluster_size": 5}):
            with self.assertRaises(cowslip.InvalidError):
                cowslip.create("b.qcow2", MIB, **options)
        self.assertFalse(os.path.exists("b.qcow2"))
        image.close()
        with open("a.qcow2", "r+b") as file:
            file.seek(64)
            file.write(b"\xff" * 8)
        with self.assertRaises(OSError):
            cowslip.open("a.qcow2")

    def test_chains_and_the_files_that_images_may_name(self) -> None:
        os.mkdir("below")
        cowslip.create("below/base.qcow2", 3 * MIB)
        cowslip.create(
            "top.qcow2", backing_file="below/base.qcow2", backing_format="qcow2"
        )
        with cowslip.open("top.qcow2", backing="same-directory") as image:
            names = [(layer.name, layer.format, layer.size) for layer in image.layers]
        self.assertEqual(
            names,
            [("top.qcow2", "qcow2", 3 * MIB), ("below/base.qcow2", "qcow2", 3 * MIB)],
        )
        with self.assertRaises(PermissionError):
            cowslip.open("top.qcow2", backing="none")
        with self.assertRaises(ValueError):
            cowslip.create("c.qcow2", backing_file="top.qcow2")

    def test_paths_are_names(self) -> None:
        import pathlib

        cowslip.create(pathlib.Path("a.raw"), MIB, format="raw")
        with cowslip.open(pathlib.Path("a.raw"), format="raw") as image:
            self.assertEqual((image.size, image.name), (MIB, "a.raw"))


class Whole(InDirectory):
    def test_extents_cover_the_disk(self) -> None:
        image = self.opened()
        for cluster in range(0, 64 * 16, 2):
            image.pwrite(b"x" * 65536, cluster * 65536)
        extents = list(image.extents())
        self.assertEqual(len(extents), 1024)
        position = 0
        for number, extent in enumerate(extents):
            self.assertEqual(extent.start, position)
            self.assertEqual(extent.data, number % 2 == 0)
            self.assertEqual(extent.zero, number % 2 == 1)
            position += extent.length
        self.assertEqual(position, image.size)
        part = list(image.extents(65536 + 5, 10))
        self.assertEqual([(one.start, one.length) for one in part], [(65541, 10)])
        self.assertEqual(list(image.extents(5, 0)), [])
        with self.assertRaises(cowslip.InvalidError):
            list(image.extents(0, image.size + 1))

    def test_snapshots_are_made_applied_and_deleted(self) -> None:
        image = self.opened()
        image.pwrite(b"before", 0)
        before = datetime.now(timezone.utc)
        identity = image.create_snapshot("first")
        image.pwrite(b"after!", 0)
        (snapshot,) = image.snapshots()
        self.assertEqual((snapshot.id, snapshot.name), (identity, "first"))
        self.assertLess(abs(snapshot.date - before), timedelta(minutes=1))
        image.apply_snapshot("first")
        self.assertEqual(image.pread(6, 0), b"before")
        image.delete_snapshot(identity)
        self.assertEqual(image.snapshots(), [])
        with self.assertRaises(FileNotFoundError):
            image.apply_snapshot("first")
        image.close()
        self.assert_clean("a.qcow2")

    def test_disks_grow_and_shrink_only_when_they_may(self) -> None:
        image = self.opened(size=MIB)
        image.resize(4 * MIB, preallocation="metadata")
        self.assertEqual(image.size, 4 * MIB)
        with self.assertRaises(ValueError):
            image.resize(MIB)
        image.resize(MIB, shrink=True)
        self.assertEqual(image.size, MIB)

    def test_space_of_what_was_discarded_comes_back(self) -> None:
        image = self.opened()
        image.pwrite(os.urandom(16 * MIB), 0)
        image.discard(15 * MIB, 0)
        image.flush()
        figures = image.compact()
        self.assertLess(figures.after, 3 * MIB)
        self.assertGreater(figures.before, figures.after)
        image.close()
        self.assert_clean("a.qcow2")

    def test_bitmaps_note_what_is_written(self) -> None:
        image = self.opened()
        image.pwrite(b"before", 0)
        image.add_bitmap("since", granularity=65536)
        image.pwrite(b"x", 5 * 65536)
        image.pwrite(b"x", 6 * 65536 + 7)
        dirty = [(one.start, one.length) for one in image.dirty("since") if one.dirty]
        self.assertEqual(dirty, [(5 * 65536, 2 * 65536)])
        self.assertEqual(sum(one.length for one in image.dirty("since")), image.size)
        image.clear_bitmap("since")
        self.assertFalse(any(one.dirty for one in image.dirty("since")))
        (bitmap,) = image.bitmaps()
        self.assertEqual(bitmap, ("since", 65536, True, False))
        image.remove_bitmap("since")
        self.assertEqual(image.bitmaps(), [])
        with self.assertRaises(cowslip.Error):
            list(image.dirty("since"))

    def test_a_disk_is_a_file(self) -> None:
        image = self.opened(size=MIB)
        with image.file() as file:
            self.assertEqual(file.seek(-4, os.SEEK_END), MIB - 4)
            self.assertEqual(file.write(b"longer than that"), 4)
            self.assertEqual(file.write(b"beyond"), 0)
            self.assertEqual(file.read(3), b"")
            file.seek(-2, os.SEEK_CUR)
            self.assertEqual(file.read(), b"ng")
            with self.assertRaises(ValueError):
                file.seek(-1)
            file.seek(5 * MIB)
            self.assertEqual((file.read(1), file.tell()), (b"", 5 * MIB))
        with self.assertRaises(ValueError):
            file.read(1)
        with io.BufferedReader(image.file(), 65536) as buffered:
            buffered.seek(MIB - 4)
            self.assertEqual(buffered.read(), b"long")
        self.assertFalse(image.closed)


class Others(InDirectory):
    def test_threads_use_one_image_at_once(self) -> None:
        image = self.opened()

        def work(number: int) -> None:
            mine = bytes([number]) * 5000
            back = bytearray(5000)
            for turn in range(40):
                offset = (turn * 8 + number) * 5000
                image.pwrite(mine, offset)
                image.pread_into(back, offset)
                assert back == mine
                if turn % 10 == 0:
                    image.flush()
                    list(image.extents(0, MIB))

        self.in_threads(8, work)
        image.close()
        self.assert_clean("a.qcow2")

    def test_a_disk_is_served_beside_other_uses(self) -> None:
        image = self.opened()
        image.pwrite(b"before", 0)
        with image.serve("s.sock") as server:
            with cowslip.open(server.uri, format="raw", writable=True) as client:
                self.assertEqual((client.size, server.clients), (image.size, 1))
                self.assertEqual(client.pread(6, 0), b"before")
                client.pwrite(b"by a client", MIB)
                client.flush()
                self.assertEqual(image.pread(11, MIB), b"by a client")
            with self.assertRaises(cowslip.InvalidError):
                image.close()
            with self.assertRaises(OSError):
                image.serve("no such directory/s.sock")
            self.assertFalse(image.closed)
        self.assertFalse(os.path.exists("s.sock"))
        server.stop()
        image.close()
        self.assert_clean("a.qcow2")

    def test_a_server_removes_its_own_socket_alone(self) -> None:
        image = self.opened()
        os.mkdir("elsewhere")
        with open("elsewhere/s.sock", "wb") as file:
            file.write(b"a file of the user's")
        server = image.serve("s.sock")
        os.chdir("elsewhere")
        server.stop()
        self.assertTrue(os.path.exists("s.sock"))
        os.chdir("..")
        self.assertFalse(os.path.exists("s.sock"))
        server = image.serve("s.sock")
        os.remove("s.sock")
        with open("s.sock", "wb") as file:
            file.write(b"in its place")
        server.stop()
        self.assertTrue(os.path.exists("s.sock"))
        image.close()

    def test_closing_waits_for_calls_of_other_threads(self) -> None:
        for _ in range(20):
            image = self.opened("b.qcow2", replace=True)
            outcomes: list[object] = []

            def work() -> None:
                try:
                    while True:
                        outcomes.append(image.pwrite(b"x" * 70000, 0))
                except ValueError as raised:
                    outcomes.append(raised)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            image.close()
            for thread in threads:
                thread.join()
            self.assertTrue(image.closed)
            ends = [one for one in outcomes if isinstance(one, ValueError)]
            self.assertEqual(len(ends), 3, outcomes)
        self.assert_clean("b.qcow2")

    def test_memory_in_use_cannot_move_and_content_may_change(self) -> None:
        image = self.opened()
        memory = bytearray(8 * MIB)
        stop = threading.Event()

        def scribble() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                memory[number % len(memory)] = number % 256
                try:
                    memory.append(1)
                    memory.pop()
                except BufferError:
                    pass  # It is being written just now.

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for turn in range(20):
                view = memory if turn % 2 else memoryview(memory)[: 8 * MIB - 4096]
                image.pwrite(view, 0)
                image.pread_into(view, 16 * MIB)
                del view
        finally:
            stop.set()
            thread.join()
        image.close()
        self.assert_clean("a.qcow2")

    def test_a_fork_cannot_use_the_image_and_opens_its_own(self) -> None:
        image = self.opened()
        image.pwrite(b"parent", 0)
        image.flush()
        # Threads of the pool are there, and are not in the fork.
        cowslip.convert(image, "packed.qcow2", compress=True)
        queue = cowslip._cowslip.Queue()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Threads, a fork: that is it.
            child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (lambda: image.pread(1, 0), lambda: queue.pread(image, 1, 0)):
                    try:
                        call()
                        raise AssertionError("it was allowed")
                    except RuntimeError as refused:
                        assert "process" in str(refused)
                assert image.closed and "closed" in repr(image)
                image.close()
                del queue
                cowslip.create("child.qcow2", MIB)
                with cowslip.open("child.qcow2", writable=True) as own:
                    own.pwrite(b"child", 0)
                    cowslip.convert(own, "child-packed.qcow2", compress=True)
                code = 0
            except BaseException as raised:
                print("in the fork:", repr(raised), flush=True)
            os._exit(code)
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)
        image.pwrite(b"again!", 6)
        self.assertEqual(image.pread(12, 0), b"parentagain!")
        with cowslip.open("child-packed.qcow2") as own:
            self.assertEqual(own.pread(5, 0), b"child")
        queue.close()
        image.close()
        self.assert_clean("a.qcow2")
