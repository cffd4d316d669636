"""Images in asyncio."""

import asyncio
import faulthandler
import gc
import os
import threading
import time
import unittest
import weakref

import cowslip
import cowslip.aio
from support import MIB, InDirectory


class Aio(InDirectory):
    def setUp(self) -> None:
        super().setUp()
        cowslip.create("a.qcow2", 64 * MIB)

    def test_requests_go_on_together(self) -> None:
        async def work() -> None:
            async with await cowslip.aio.open("a.qcow2", writable=True) as image:
                self.assertEqual((image.size, image.writable), (64 * MIB, True))
                writes = (
                    image.pwrite(bytes([number]) * 4096, number * 4096) for number in range(200)
                )
                self.assertEqual(await asyncio.gather(*writes), [4096] * 200)
                await image.flush()
                reads = await asyncio.gather(
                    *(image.pread(4096, number * 4096) for number in range(200))
                )
                for number, read in enumerate(reads):
                    self.assertEqual(read, bytes([number]) * 4096)
                memory = bytearray(8192)
                self.assertEqual(await image.pread_into(memory, 4096), 8192)
                self.assertEqual(memory, b"\1" * 4096 + b"\2" * 4096)
                await image.zero(4096, 0, unmap=True)
                await image.discard(4096, 4096)
                self.assertEqual(await image.pread(1, 0), b"\0")
                identity = await image.create_snapshot("one")
                self.assertEqual([one.id for one in await image.snapshots()], [identity])
                covered = [extent.length async for extent in image.extents()]
                self.assertEqual(sum(covered), image.size)
                await image.resize(65 * MIB)
            self.assertTrue(image.closed)
            with self.assertRaises(ValueError):
                await image.pread(1, 0)

        asyncio.run(work())
        self.assert_clean("a.qcow2")

    def test_errors_are_raised_where_they_are_awaited(self) -> None:
        async def work() -> None:
            with self.assertRaises(FileNotFoundError):
                await cowslip.aio.open("none.qcow2")
            async with await cowslip.aio.open("a.qcow2") as image:
                with self.assertRaises(cowslip.ReadOnlyError):
                    await image.pwrite(b"x", 0)
                with self.assertRaises(cowslip.InvalidError):
                    await image.pread(1, 64 * MIB)
                with self.assertRaises(cowslip.InvalidError):
                    await image.pread_into(bytearray(2), 64 * MIB - 1)
                with self.assertRaises(TypeError):
                    await image.pread_into("text", 0)
                with self.assertRaises(BufferError):
                    await image.pread_into(b"constant", 0)
                with self.assertRaises(OverflowError):
                    await image.pread(-1, 0)
                both = await asyncio.gather(
                    image.pread(1, 0), image.discard(1, 0), return_exceptions=True
                )
                self.assertEqual(both[0], b"\0")
                self.assertIsInstance(both[1], cowslip.ReadOnlyError)

        asyncio.run(work())

    def test_what_is_given_up_hurts_nothing(self) -> None:
        async def work() -> None:
            async with await cowslip.aio.open("a.qcow2", writable=True) as image:
                memory = bytearray(MIB)
                for turn in range(50):
                    tasks = [
                        asyncio.create_task(image.pwrite(bytes([turn + 1]) * MIB, MIB)),
                        asyncio.create_task(image.pread_into(memory, 0)),
                        asyncio.create_task(image.pread(MIB, MIB)),
                        asyncio.create_task(image.flush()),
                    ]
                    await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    ends = await asyncio.gather(*tasks, return_exceptions=True)
                    for end in ends:
                        if isinstance(end, BaseException):
                            self.assertIsInstance(end, asyncio.CancelledError)
                del tasks
            # All requests have ended, so the memory may move.
            memory.append(1)

        asyncio.run(work())
        with cowslip.open("a.qcow2") as image:
            # Writes that were given up have ended, whole.
            self.assertEqual(len(set(image.pread(MIB, MIB))), 1)
        self.assert_clean("a.qcow2")

    def test_code_that_runs_when_a_buffer_goes_may_ask_the_queue(self) -> None:
        class Buffer(bytearray):
            pass

        async def work() -> list[int]:
            asked: list[int] = []
            async with await cowslip.aio.open("a.qcow2", writable=True) as image:

                async def one() -> None:
                    buffer = Buffer(4096)
                    weakref.finalize(
                        buffer, lambda: asked.append(cowslip.aio._queue().native.in_flight)
                    )
                    await image.pwrite(buffer, 0)

                task = asyncio.ensure_future(one())
                await asyncio.sleep(0)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                # The queue has the last hold of the buffer.
                del task
                gc.collect()
                while not asked:
                    await asyncio.sleep(0.01)
            return asked

        faulthandler.dump_traceback_later(60, exit=True)
        try:
            self.assertEqual(asyncio.run(work()), [0])
        finally:
            faulthandler.cancel_dump_traceback_later()

    def test_each_loop_has_its_queue(self) -> None:
        with cowslip.open("a.qcow2", writable=True) as blocking:
            image = cowslip.aio.Image(blocking)

            async def work(number: int) -> None:
                for turn in range(20):
                    offset = (turn * 4 + number) * 4096
                    await image.pwrite(bytes([number]) * 4096, offset)
                    assert await image.pread(4096, offset) == bytes([number]) * 4096

            self.in_threads(4, lambda number: asyncio.run(work(number)))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            asyncio.run(self.touch())
        gc.collect()
        # Queues end with their loops, and those of jobs with their threads: soon.
        for _ in range(500):
            if len(os.listdir("/proc/self/fd")) <= before:
                break
            time.sleep(0.01)
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

    async def touch(self) -> None:
        async with await cowslip.aio.open("a.qcow2") as image:
            await image.pread(1, 0)

    def test_threads_and_a_loop_use_one_image_at_once(self) -> None:
        end = time.monotonic() + 1.5
        failures: list[BaseException] = []
        with cowslip.open("a.qcow2", writable=True) as blocking:

            def thread(number: int) -> None:
                memory = bytearray(MIB)
                try:
                    while time.monotonic() < end:
                        # Space that was given up is taken again, which needs the engine's lock.
                        blocking.discard(8 * MIB, 0)
                        blocking.pwrite(memory, number * 65536)
                        blocking.pread_into(memory, 0)
                        blocking.flush()
                except BaseException as raised:
                    failures.append(raised)

            async def work() -> None:
                image = cowslip.aio.Image(blocking)
                while time.monotonic() < end:
                    writes = (image.pwrite(b"x" * 100_000, at * 100_000) for at in range(50))
                    await asyncio.gather(*writes)

            threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
            for each in threads:
                each.start()
            asyncio.run(work())
            for each in threads:
                each.join()
        self.assertEqual(failures, [])
        self.assert_clean("a.qcow2")

    def test_a_job_is_awaited_and_a_cancelled_task_cancels_it(self) -> None:
        with cowslip.open("a.qcow2", writable=True) as image:
            for offset in range(0, 64 * MIB, MIB):
                image.pwrite(os.urandom(MIB), offset)

        async def work() -> None:
            figures = await cowslip.start(cowslip.convert, "a.qcow2", "b.raw", format="raw")
            self.assertEqual(figures.written, 64 * MIB)

            async def copy() -> None:
                await cowslip.start(cowslip.convert, "a.qcow2", "c.qcow2", compress=True)

            task = asyncio.create_task(copy())
            await asyncio.sleep(0.05)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertFalse(os.path.exists("c.qcow2"))

        asyncio.run(work())

    def test_a_queue_of_another_thread_is_refused(self) -> None:
        with cowslip.open("a.qcow2") as image:
            queue = cowslip._cowslip.Queue()
            token = queue.pread(image, 1, 0)
            outcome: list[object] = []

            def elsewhere() -> None:
                for call in (lambda: queue.pread(image, 1, 0), queue.complete):
                    try:
                        outcome.append(call())
                    except OSError as refused:
                        outcome.append(refused)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            self.assertTrue(all(isinstance(one, OSError) for one in outcome), outcome)
            with self.assertRaises(cowslip.InvalidError):
                image.close()
            done: list[tuple[int, object, object]] = []
            while not done:
                done = queue.complete()
            self.assertEqual(done, [(token, b"\0", None)])
            queue.close()
            with self.assertRaises(ValueError):
                queue.pread(image, 1, 0)


if __name__ == "__main__":
    unittest.main()
