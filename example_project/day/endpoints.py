"""The merchants' endpoints: small HTTP servers in a separate process.

``python -m day.endpoints --ledger redis://... --day dq`` prints one line of JSON with the ports by class of
merchant, and serves until its standard input closes. A request is recorded in the ledger before its answer,
so the ledger has all requests that a worker may consider delivered.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

from redis.asyncio import Redis

from day.ledger import Arrival, Keys
from day.plan import CLASSES, FAILING, HANGING, QUIET
from shop.webhook import MAX_ATTEMPTS

HOSTS = {QUIET: 4}
"""Ports per class, default 1. The quiet merchants share the servers of a few hosting companies."""


class Writer:
    """Writes to the ledger, with one round trip for all entries that wait."""

    def __init__(self, url: str, day: str) -> None:
        # No timeout, because an arrival that is sent again would count twice.
        self._client = Redis.from_url(url, socket_timeout=None)
        self._keys = Keys(day)
        self._waiting: list[tuple[Arrival, bool, asyncio.Future[None]]] = []
        self._some = asyncio.Event()

    async def write(self, arrival: Arrival, settled: bool) -> None:
        """Write one arrival; return when the ledger has it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((arrival, settled, done))
        self._some.set()
        await done

    async def run(self) -> None:
        """Write until cancelled."""
        while await self._some.wait():
            batch, self._waiting = self._waiting, []
            self._some.clear()
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.rpush(self._keys.arrivals, *[json.dumps(asdict(arrival)) for arrival, _, _ in batch])
                if settled := [arrival.id for arrival, is_settled, _ in batch if is_settled]:
                    pipe.sadd(self._keys.settled, *settled)
                await pipe.execute()
            for _, _, done in batch:
                if not done.done():
                    done.set_result(None)


class Endpoint:
    """The server of one class of merchant."""

    def __init__(self, name: str, writer: Writer) -> None:
        self._name = name
        self._latency = CLASSES[name].latency
        self._writer = writer

    def status(self, notice: str, attempt: int) -> int:
        """Return the answer to a request, which depends on notice and attempt only."""
        if self._name == HANGING:
            return 0
        if self._name == FAILING and hashlib.blake2b(f"{notice}/{attempt}".encode()).digest()[0] < 150:
            return 500
        return 200

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the single request of a connection."""
        try:
            headers = await read_request(reader)
            notice, attempt = headers["x-notice"], int(headers["x-attempt"])
            status = self.status(notice, attempt)
            arrival = Arrival(notice, attempt, int(headers["x-worker"]), time.time(), status)
            await self._writer.write(arrival, settled=status == 200 or attempt >= MAX_ATTEMPTS)
            if status == 0:
                await reader.read()  # the client sends no more data, so this ends with its timeout
                return
            await asyncio.sleep(random.uniform(*self._latency))
            writer.write(b"HTTP/1.1 %d .\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the worker closed the connection, for example because it was killed
        finally:
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> Mapping[str, str]:
    """Read a request with its body; return its headers, names in lower case."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    headers: dict[str, str] = {}
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    await reader.readexactly(int(headers.get("content-length", "0")))
    return headers


async def main(url: str, day: str) -> None:
    """Start all endpoints, print the ports, and serve until standard input closes."""
    writer = Writer(url, day)
    writing = asyncio.create_task(writer.run())
    ports: dict[str, list[int]] = {}
    for name in CLASSES:
        for _ in range(HOSTS.get(name, 1)):
            server = await asyncio.start_server(Endpoint(name, writer).serve, "127.0.0.1", 0, backlog=512)
            ports.setdefault(name, []).append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait({closed, writing}, return_when=asyncio.FIRST_COMPLETED)
    writing.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--day", required=True)
    options = parser.parse_args()
    asyncio.run(main(options.ledger, options.day))
