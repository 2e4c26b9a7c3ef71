"""Awaited results: ``await result.aget()``, by PUB/SUB where the result backend is Redis.

Celery's backend publishes each state under the key of the result. One connection of a loop subscribes to the
keys that are awaited there, and others read the states that exist already. Nothing polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from celery import states
from celery.exceptions import TimeoutError as ResultTimeout
from celery.result import (  # type: ignore[attr-defined]  # the last is not in its stubs
    EagerResult,
    assert_will_not_block,
)
from redis.asyncio import Redis

from celery_dq.app.api.api import dq_of
from celery_dq.compat.celery_calls import has_meta, keep_meta
from celery_dq.per_loop import PerLoop
from celery_dq.transport.redis.store.asyncio_connections import (
    asyncio_pool,
    close_sentinels,
    in_time,
)

_BACKEND = "celery.backends.redis"
#: Name of the attribute under which a backend has the results of its loops; None when it has no asyncio.
_ATTRIBUTE = "dq_loop_results"
#: Options of ``get`` that change nothing here.
_UNUSED = frozenset(("interval", "no_ack", "follow_parents", "disable_sync_subtasks"))
#: Maximum number of states that a loop reads at the same time.
READS_AT_ONCE = 8
#: Seconds without a message after which the states of awaited results are read, because a connection may die
#: in silence.
QUIET_S = 30.0
#: Attempts in a row to reach Redis, and the longest pause between them, as of Celery's backend.
ATTEMPTS, LONGEST_PAUSE_S = 20, 1.0


async def get_result(result: Any, timeout: float | None, propagate: bool, options: Mapping[str, Any]) -> Any:
    """Await the return value of a result, see :func:`celery_dq.app.publishing.async_methods.aget`."""
    plain = partial(result.get, timeout=timeout, propagate=propagate, **options)
    if isinstance(result, EagerResult) or result.ignored:
        return plain()
    results = _results_of(result.backend)
    if results is None or options.keys() - _UNUSED:
        return await asyncio.to_thread(plain)
    if options.get("disable_sync_subtasks", True):
        assert_will_not_block()
    if not has_meta(result):
        dq_of(result.app).buffer.flush_soon()
        follows = propagate and options.get("follow_parents", True)
        try:
            # Celery takes a timeout of 0 for none, too.
            async with asyncio.timeout(timeout or None):
                await _until_final(results, result, [*_parents_of(result)] if follows else [])
        except TimeoutError:
            raise ResultTimeout("The operation timed out.") from None
    return result.get(propagate=propagate, follow_parents=False, disable_sync_subtasks=False)


def _parents_of(result: Any) -> Iterator[Any]:
    """Yield the results of the tasks before this one in a chain; those of a group are single ones."""
    node = result.parent
    while node is not None:
        yield from getattr(node, "results", (node,))
        node = node.parent


async def _until_final(results: PerLoop[LoopResults], result: Any, parents: Sequence[Any]) -> None:
    """Await the final state of a result, and keep it there.

    Raises:
        Exception: A task before it has failed. One that was revoked leaves its error in no later result.
    """
    if not parents:
        keep_meta(result, await _final_state(results, _key_of(result)))
        return
    awaited = {
        asyncio.ensure_future(_final_state(results, _key_of(each))): each for each in (result, *parents)
    }
    try:
        while not has_meta(result):
            ended, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for future in ended:
                node = awaited.pop(future)
                keep_meta(node, future.result())
                if node is not result:
                    node.maybe_throw()
    finally:
        for future in awaited:
            future.cancel()


def _key_of(result: Any) -> bytes:
    key: bytes = result.backend.get_key_for_task(result.id)
    return key


def _results_of(backend: Any) -> PerLoop[LoopResults] | None:
    """Return the results that the loops await from a backend; None when it has no asyncio."""
    known = vars(backend)
    if _ATTRIBUTE not in known:
        is_redis = any(each.__module__ == _BACKEND for each in type(backend).__mro__)
        pool = getattr(backend.client, "connection_pool", None) if is_redis else None
        serves = pool is not None and asyncio_pool(pool) is not None
        known[_ATTRIBUTE] = PerLoop(partial(LoopResults, backend)) if serves else None
    results: PerLoop[LoopResults] | None = known[_ATTRIBUTE]
    return results


async def _final_state(results: PerLoop[LoopResults], key: bytes) -> dict[str, Any]:
    loop_results = await results.get()
    failures = 0
    while True:
        try:
            meta = await loop_results.final_state(key)
            if meta is not None:
                return meta
            failures = 0
        except (redis.ConnectionError, redis.TimeoutError):
            failures += 1
            if failures == ATTEMPTS:
                raise
        await asyncio.sleep(min(failures / 10, LONGEST_PAUSE_S))


class _Awaited:
    """One key: whether it is subscribed, and the coroutines that await its final state."""

    def __init__(self) -> None:
        self.subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.states: set[asyncio.Future[dict[str, Any]]] = set()

    def fail(self, error: BaseException) -> None:
        """Raise an error in the coroutines."""
        futures: tuple[asyncio.Future[Any], ...] = (self.subscribed, *self.states)
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that no coroutine awaits this one


class LoopResults:
    """The results that coroutines of one event loop await from one Redis.

    Args:
        backend: The result backend of Celery, which is one on Redis.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        pool = backend.client.connection_pool
        self._timeout_s: float | None = pool.connection_kwargs.get("socket_timeout")
        self._client: Any = Redis(connection_pool=asyncio_pool(pool))
        #: The connection with the subscriptions; None before the first one, and after a lost connection. Not
        #: the one of redis-py, which opens itself again, in its reader and in its writers at the same time.
        self._subscribed: Any = None
        self._awaited: dict[bytes, _Awaited] = {}
        self._reader: asyncio.Task[None] | None = None
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        #: One command at a time on the connection of the subscriptions.
        self._writes = asyncio.Lock()

    async def final_state(self, key: bytes) -> dict[str, Any] | None:
        """Await the state of a task that has ended; None when the connection was lost meanwhile.

        Args:
            key: The key of its result.

        Raises:
            redis.ConnectionError: The connection was lost before Redis had answered.
            redis.TimeoutError: Redis does not answer.
        """
        awaited = self._awaited.get(key)
        is_first = awaited is None
        if awaited is None:
            awaited = self._awaited[key] = _Awaited()
        state: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        awaited.states.add(state)
        try:
            if is_first:
                await self._subscribe(key, awaited)
            # A state that is stored before the subscription is read, and a later one is published.
            await asyncio.shield(awaited.subscribed)
            meta = await self._read(key)
            if meta is None:
                with suppress(redis.ConnectionError, redis.TimeoutError):
                    meta = await state
            return meta
        finally:
            awaited.states.discard(state)
            if not awaited.states and self._awaited.get(key) is awaited:
                del self._awaited[key]
                await self._unsubscribe(key)

    async def _subscribe(self, key: bytes, awaited: _Awaited) -> None:
        try:
            async with self._writes:
                if self._awaited.get(key) is not awaited:
                    raise redis.ConnectionError("the connection was lost before the subscription")
                await in_time(self._timeout_s, self._send_subscribe(key))
        except BaseException as error:
            if self._awaited.get(key) is awaited:
                del self._awaited[key]
            awaited.fail(error if isinstance(error, Exception) else redis.ConnectionError())
            raise

    async def _send_subscribe(self, key: bytes) -> None:
        if self._subscribed is None:
            connection = self._client.connection_pool.make_connection()
            try:
                await connection.connect()
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._subscribed = connection
            self._reader = asyncio.create_task(self._read_messages(connection))
            # Not by the task itself, which may be cancelled before its first step.
            self._reader.add_done_callback(self._begin_again)
        elif not self._subscribed.is_connected:
            raise redis.ConnectionError("the connection with the subscriptions is lost")
        await self._subscribed.send_command("SUBSCRIBE", key)

    async def _unsubscribe(self, key: bytes) -> None:
        async with self._writes:
            # Another coroutine may have subscribed again. A lost connection has no subscription.
            if key not in self._awaited and self._subscribed is not None and self._subscribed.is_connected:
                with suppress(redis.RedisError, OSError):
                    await in_time(self._timeout_s, self._subscribed.send_command("UNSUBSCRIBE", key))

    async def _read(self, key: bytes) -> dict[str, Any] | None:
        """Return the stored state of a task that has ended; None before its end."""
        return self._ended(await self._get(key))

    async def _get(self, key: bytes) -> Any:
        async with self._reads:
            return await in_time(self._timeout_s, self._client.get(key))

    def _ended(self, stored: Any) -> dict[str, Any] | None:
        meta: dict[str, Any] | None = self._backend.decode_result(stored) if stored else None
        return meta if meta is not None and meta["status"] in states.READY_STATES else None

    async def _read_messages(self, connection: Any) -> None:
        """Pass on what Redis publishes, until the loop ends or the connection is lost."""
        try:
            while True:
                message = await connection.read_response(
                    timeout=QUIET_S, disconnect_on_error=False, push_request=True
                )
                if message is None:
                    for key in tuple(self._awaited):
                        self._pass_on(key, await self._get(key))
                    continue
                kind, key, data = message
                awaited = self._awaited.get(key)
                if kind == b"subscribe" and awaited and not awaited.subscribed.done():
                    awaited.subscribed.set_result(None)
                elif kind == b"message":
                    self._pass_on(key, data)
        finally:
            with suppress(redis.RedisError, OSError):
                await connection.disconnect()

    def _begin_again(self, reader: asyncio.Task[None]) -> None:
        """Let the coroutines subscribe again on another connection."""
        error = None if reader.cancelled() else reader.exception()
        if error is None or type(error) is redis.RedisError:  # the latter, when a writer has closed it
            error = redis.ConnectionError("the connection with the subscriptions is lost")
        lost, self._awaited, self._subscribed = self._awaited, {}, None
        for awaited in lost.values():
            awaited.fail(error)

    def _pass_on(self, key: bytes, stored: Any) -> None:
        awaited = self._awaited.get(key)
        if awaited is None:
            return
        try:
            meta = self._ended(stored)
        except Exception as error:
            awaited.fail(error)  # such as a serializer that is not accepted; the other results go on
            return
        if meta is None:
            return
        for state in awaited.states:
            if not state.done():
                state.set_result(meta)

    async def close(self) -> None:
        """Close all connections."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        pool = self._client.connection_pool
        with suppress(redis.RedisError, OSError):
            await pool.disconnect()
        await close_sentinels(pool)
