"""A TCP proxy that can hold all traffic back while connections stay open."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Proxy:
    """Forwards a local port to another one, in a separate thread.

    While black-holed, bytes are held back as in a network (they arrive late, or never), and new connections
    are accepted but not served.
    """

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self._host = host
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._answers = asyncio.Event()
        self._pairs: set[asyncio.StreamWriter] = set()
        #: Strong references, because the loop has only weak ones to its tasks.
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self.port = 0

    def start(self) -> Proxy:
        """Start to listen. `port` is known when this returns."""
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the proxy did not start")
        return self

    def black_hole(self) -> None:
        """Hold all traffic back, in both directions."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def hold_answers(self) -> None:
        """Hold back what the server sends; requests pass."""
        self._loop.call_soon_threadsafe(self._answers.clear)

    def restore(self) -> None:
        """Forward all traffic again, after the bytes that were held back."""
        self._loop.call_soon_threadsafe(self._open.set)
        self._loop.call_soon_threadsafe(self._answers.set)

    def sever(self) -> None:
        self._loop.call_soon_threadsafe(self._sever)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    # In the proxy's thread.

    def overhear(self, data: bytes) -> None:
        """Receive each chunk that passes, in both directions. Subclasses may override this."""

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._open.set()
        self._answers.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, self._host, 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._close(server))
        self._loop.close()

    async def _close(self, server: asyncio.Server) -> None:
        # Accept pending connections first, because asyncio forgets them when the server is closed.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        server.close()
        # The next round of the loop closes the connections that were aborted in this one.
        await asyncio.sleep(0)  # lets that round run

    def _sever(self) -> None:
        for writer in list(self._pairs):
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio reports an error when a task that it created itself is cancelled.
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        # Here, because the task may be cancelled before its first step.
        self._serving.pop(task).transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._target_port)
        except OSError:
            return
        self._pairs |= {writer, there_writer}
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._pairs -= {writer, there_writer}
            there_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                if writer in self._serving.values():
                    await self._answers.wait()
                self.overhear(data)
                writer.write(data)
                await writer.drain()
        # One side has ended. Forward the end after the bytes that were under way.
        await self._open.wait()
        with contextlib.suppress(OSError):
            writer.close()
