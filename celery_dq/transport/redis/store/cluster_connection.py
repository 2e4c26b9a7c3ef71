"""A connection to a whole Redis Cluster, with the interface of a redis-py connection to one server.

Each command goes to the master of its slot. Answers are read in the order in which the commands were sent,
whichever nodes they come from, so that pipelines and scripts work as on one server.

A command that a node has *not executed* (its slot has moved or moves now, or the cluster has no master for
it) is sent again until the caller's deadline, the socket timeout. A command whose *answer is lost* is not,
unless the caller says that it may run twice: its answer is :class:`~.slot_map.NodeUnreachable`. The commands
for other nodes are not affected.

A script touches more keys than the one it names. While the keys of its slot move one by one, no node has all
of them, so scripts are not sent after an ``ASK``: they wait for the end of the move.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    TryAgainError,
)
from redis.retry import Retry

from celery_dq.compat.redis_sockets import socket_of
from celery_dq.hash_slots import slot_of
from celery_dq.transport.redis.store.script_calls import has_arrived
from celery_dq.transport.redis.store.slot_map import (
    NodeAddress,
    NodeClosedConnection,
    NodeUnreachable,
    SlotMap,
    final_answer,
)

#: Longest time in seconds to wait out a fail-over or a moving slot, when the socket has no timeout.
DEFAULT_PATIENCE_S = 15.0
#: Seconds until a command is sent again that no node could execute.
RETRY_AFTER_S = 0.05
#: Errors of commands that were not executed.
NOT_EXECUTED = (MovedError, AskError, TryAgainError, ClusterDownError, BusyLoadingError, MasterDownError)

_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)
#: Commands without a key. Any node can answer them.
WITHOUT_KEY = frozenset(
    [
        "ACL",
        "CLIENT",
        "CLUSTER",
        "COMMAND",
        "CONFIG",
        "DBSIZE",
        "ECHO",
        "HELLO",
        "INFO",
        "PING",
        "ROLE",
        "TIME",
    ]
)
#: The slot whose master carries the broadcasts. Publishers and subscribers meet there, so that a broadcast
#: does not depend on the links between the nodes.
BROADCAST_SLOT = slot_of("_kombu.binding.celery.pidbox")
#: Scripts, which touch more keys than the one they name.
SCRIPTED = frozenset(("EVAL", "EVALSHA"))


class _Part:
    """The commands of one node that belong together: one command, or a transaction.

    Attributes:
        commands: The words of each command.
        slot: Their slot; None when any node can answer.
        deadline: Monotonic time until which they are sent again.
        may_repeat: Whether they may run twice.
        line: The connection that they were sent on; None when they were not sent.
        answers: The answers so far.
        asks: Whether the node serves the slot only to those who ask for it.
        failure: Why it has no answer yet.
        was_closed: Whether the failure is that the node closed the connection on which it was sent.
    """

    __slots__ = (
        "answers", "asks", "commands", "deadline", "failure", "line", "may_repeat", "slot", "was_closed",
    )  # fmt: skip

    def __init__(self, commands: list[Sequence[Any]], slot: int | None, deadline: float, may_repeat: bool):
        self.commands = commands
        self.slot = slot
        self.deadline = deadline
        self.may_repeat = may_repeat
        self.line: _OpenNode | None = None
        self.answers: list[Any] = []
        self.asks = False
        self.failure: Exception | None = None
        self.was_closed = False

    @property
    def is_answered(self) -> bool:
        return len(self.answers) == len(self.commands)

    @property
    def may_follow_ask(self) -> bool:
        return len(self.commands) == 1 and name_of(self.commands[0]) not in SCRIPTED

    def fail(self, error: Exception) -> None:
        self.answers = [error] * len(self.commands)


class _OpenNode:
    """The connection to one node, with the parts that have no answer yet."""

    __slots__ = ("connection", "has_written", "node", "parts")

    def __init__(self, node: NodeAddress, connection: Any) -> None:
        self.node = node
        self.connection = connection
        self.parts: deque[_Part] = deque()
        #: Whether commands were sent since the last ``WAIT``.
        self.has_written = False


#: Parts, and a function that makes the answers for the caller of theirs.
_Request = tuple[list[_Part], Callable[[list[_Part]], list[Any]]]


class ClusterConnection:
    """Connections to the nodes of one cluster, each opened at its first command.

    Args:
        slots: The map of the cluster.
        node_class: Class of the connections to nodes.
        socket_timeout: Seconds to wait for an answer, and for the end of a fail-over.
        **kwargs: Further arguments of the connections.
    """

    def __init__(
        self, *, slots: SlotMap, node_class: Any, socket_timeout: float | None = None, **kwargs: Any
    ) -> None:
        self.slots = slots
        self.pid = os.getpid()
        self.db = 0
        self.retry = Retry(NoBackoff(), 0)
        #: Whether commands may be sent again whose answers are lost. The one who takes the connection out of
        #: its pool sets it.
        self.may_repeat = False
        #: How often a connection to a node was opened.
        self.connects = 0
        self._patience_s = socket_timeout or DEFAULT_PATIENCE_S
        self._node_class = node_class
        self._arguments = {**kwargs, "socket_timeout": socket_timeout, "retry": self.retry}
        self._lines: dict[NodeAddress, _OpenNode] = {}
        self._requests: deque[_Request] = deque()
        self._answers: deque[Any] = deque()

    # -- the interface of a redis-py connection: state

    @property
    def awaited(self) -> Any:
        """The connection to the node that sends the next answer; None without an expected one."""
        for parts, _ in self._requests:
            for part in parts:
                if part.line is not None and not part.is_answered:
                    return part.line.connection
        return None

    @property
    def _sock(self) -> Any:
        awaited = self.awaited
        return None if awaited is None else socket_of(awaited)

    def connect(self) -> None:
        """Learn the slots of the cluster, unless they are known.

        Raises:
            redis.ConnectionError: No node answers.
        """
        if not self.slots.masters:
            try:
                self.slots.refresh(self._connect)
            except NodeUnreachable as exc:
                raise redis.ConnectionError(str(exc)) from exc

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        """Close the connections to all nodes; commands without an answer may or may not have run."""
        lines, self._lines = list(self._lines.values()), {}
        self._requests.clear()
        self._answers.clear()
        self.may_repeat = False
        for line in lines:
            line.connection.disconnect()

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether an answer can be read. Connections that a node has closed are forgotten."""
        if self._requests or self._answers:
            return bool(self._answers) or has_arrived(self)
        for line in list(self._lines.values()):
            if has_arrived(line.connection):
                self._forget(line)
        return False

    def should_reconnect(self) -> bool:
        """Return False: each connection to a node is opened again when it is needed."""
        return False

    def set_re_auth_token(self, token: Any) -> None:
        """Give the nodes a new token of a credential provider at the next :meth:`re_auth`."""
        for line in self._lines.values():
            line.connection.set_re_auth_token(token)

    def re_auth(self) -> None:
        """Log in to the nodes again with the new token, if there is one."""
        for line in self._lines.values():
            line.connection.re_auth()

    # -- the interface of a redis-py connection: commands

    def send_command(self, *args: Any, **kwargs: Any) -> None:
        """Send one command."""
        self._send([args])

    def pack_commands(self, commands: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
        """Return the commands as they are, because their nodes are not known yet."""
        return list(commands)

    def send_packed_command(self, command: Sequence[Sequence[Any]], check_health: bool = True) -> None:
        """Send commands as :meth:`pack_commands` returns them."""
        self._send(command)

    def read_response(self, disable_decoding: bool = False, **kwargs: Any) -> Any:
        """Return the answer to the first command that has none.

        Raises:
            redis.ResponseError: The answer is an error, or the node did not answer (`NodeUnreachable`).
        """
        if not self._answers:
            parts, join = self._requests.popleft()
            try:
                for part in parts:
                    self._complete(part, disable_decoding)
            except BaseException:
                self.disconnect()  # answers may be left that the next command would take for its own
                raise
            self._answers.extend(join(parts))
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    # -- sending

    def _send(self, commands: Sequence[Sequence[Any]]) -> None:
        deadline, parts = time.monotonic() + self._patience_s, list[_Part]()
        for request in self._requests_of(commands, deadline):
            self._requests.append(request)
            parts += request[0]
        self._send_parts(parts)

    def _requests_of(self, commands: Sequence[Sequence[Any]], deadline: float) -> Iterable[_Request]:
        block: list[Sequence[Any]] | None = None
        slot: int | None = None
        for command in commands:
            name = name_of(command)
            if name == "MULTI":
                block = []
            elif name == "EXEC" and block is not None:
                yield self._transaction(block, deadline)
                block = None
            elif block is not None:
                block.append(command)
            elif name in ("WAIT", "SCRIPT"):
                yield self._for_nodes(name, command, deadline)
            else:
                # A command without a key, such as TIME, is about the keys of the command before it.
                found = slot_of_command(command)
                slot = slot if found is None else found
                yield [_Part([command], slot, deadline, self.may_repeat)], _own_answers

    def _transaction(self, block: list[Sequence[Any]], deadline: float) -> _Request:
        """Split a transaction by slots: each part is atomic for itself."""
        places: dict[int | None, list[int]] = {}
        slot: int | None = next((slot_of_command(each) for each in block if len(each) > 1), None)
        for place, command in enumerate(block):
            found = slot_of_command(command)
            slot = slot if found is None else found
            places.setdefault(slot, []).append(place)
        parts = [
            _Part([("MULTI",), *(block[place] for place in own), ("EXEC",)], slot, deadline, False)
            for slot, own in places.items()
        ]

        def join(answered: list[_Part]) -> list[Any]:
            queued: list[Any] = [None] * len(block)
            done: list[Any] = [None] * len(block)
            failure = None
            for part, own in zip(answered, places.values(), strict=True):
                result = part.answers[-1]
                for number, place in enumerate(own):
                    queued[place] = part.answers[1 + number]
                    done[place] = None if isinstance(result, Exception) else result[number]
                failure = failure or (result if isinstance(result, Exception) else None)
            return [b"OK", *queued, failure or done]

        return parts, join

    def _for_nodes(self, name: str, command: Sequence[Any], deadline: float) -> _Request:
        """Send a command to several nodes: ``WAIT`` to those that have executed commands, others to all.

        ``WAIT`` does not see commands that are sent with it: the answers to its writes must be read before.
        """
        if name == "WAIT":
            lines = [line for line in self._lines.values() if line.has_written]
            parts = [_Part([command], None, deadline, False) for _ in lines]
            for part, line in zip(parts, lines, strict=True):
                part.line = line
                line.has_written = False
        else:
            parts = []
            for node in self.slots.masters:
                part = _Part([command], None, deadline, False)
                try:
                    part.line = self._line(node)
                except _LOST as exc:
                    part.fail(_unreachable(node, exc))
                parts.append(part)
        if not parts:
            parts = [_Part([command], None, deadline, False)]
        return parts, lambda answered: [joined_answer(name, [part.answers[0] for part in answered])]

    def _send_parts(self, parts: Iterable[_Part]) -> None:
        """Send parts, those of one node together. Parts whose node cannot be reached stay unsent."""
        groups: dict[_OpenNode, list[_Part]] = {}
        failed: dict[NodeAddress | None, Exception] = {}
        for part in parts:
            if part.is_answered:
                continue
            line = part.line
            if line is None:
                node = self._node_of(part)
                if node not in failed:
                    try:
                        line = self._line(node)
                    except AuthenticationError:
                        raise
                    except _LOST as exc:
                        failed[node] = exc
                if line is None:
                    part.failure, part.was_closed = failed[node], False
                    continue
            part.line = line
            groups.setdefault(line, []).append(part)
        for line, own in groups.items():
            is_idle = not line.parts
            line.parts.extend(own)
            line.has_written = line.has_written or any(name_of(p.commands[0]) != "WAIT" for p in own)
            words = [each for part in own for each in (*([("ASKING",)] * part.asks), *part.commands)]
            try:
                # In one write, see `pack` of pipelined_connection; redis-py has commands of two words.
                packed = b"".join(line.connection.pack_commands(words))
                # A health check reads the next answer, so it needs a connection without any.
                line.connection.send_packed_command((packed,), check_health=is_idle)
            except _LOST as exc:
                self._lose(line, exc)

    def _node_of(self, part: _Part) -> NodeAddress | None:
        if part.slot is not None:
            return self.slots.node_of(part.slot)
        return next(iter(self._lines), None) or random.choice(self.slots.masters)

    def _line(self, node: NodeAddress | None) -> _OpenNode:
        if node is None:
            raise redis.ConnectionError("the cluster has no master for the slot")
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _OpenNode(node, self._connect(node))
            self.connects += 1
        return line

    def _connect(self, node: NodeAddress) -> Any:
        connection = self._node_class(host=node.host, port=node.port, **self._arguments)
        connection.connect()
        return connection

    # -- answers

    def _complete(self, part: _Part, disable_decoding: bool) -> None:
        """Read answers until those of this part are there."""
        while not part.is_answered:
            line = part.line
            if line is None:
                self._try_again(part)
                continue
            first = line.parts[0]
            try:
                if first.asks:
                    line.connection.read_response()
                    first.asks = False
                answer = line.connection.read_response(disable_decoding=disable_decoding)
            except redis.ResponseError as exc:
                answer = exc
            except _LOST as exc:
                self._lose(line, exc)
                continue
            first.answers.append(answer)
            if first.is_answered:
                line.parts.popleft()
                self._look_for_redirection(first, line)

    def _look_for_redirection(self, part: _Part, line: _OpenNode) -> None:
        """Prepare a part to be sent again whose commands the node has not executed."""
        errors = [each for each in part.answers if isinstance(each, NOT_EXECUTED)]
        if not errors or isinstance(errors[0], NodeUnreachable):
            return
        error = errors[0]
        part.answers, part.line, part.failure, part.was_closed = [], None, error, False
        if time.monotonic() >= part.deadline:
            return  # `_try_again` gives it up
        if isinstance(error, MovedError):
            self.slots.moved(error.slot_id, NodeAddress(error.host or line.node.host, error.port))
            self._send_parts([part])
        elif isinstance(error, AskError) and part.may_follow_ask:
            try:
                part.line, part.asks = self._line(NodeAddress(error.host or line.node.host, error.port)), True
            except _LOST as exc:
                part.failure = exc
            else:
                self._send_parts([part])

    def _try_again(self, part: _Part) -> None:
        """Send a part that no node has executed, after a moment; give it up after its deadline."""
        now = time.monotonic()
        if now >= part.deadline:
            found = part.failure
            node = self.slots.node_of(part.slot) if part.slot is not None else None
            is_answer = isinstance(found, redis.ResponseError)
            kind = NodeClosedConnection if part.was_closed else NodeUnreachable
            part.fail(final_answer(found, part.slot) if is_answer else _unreachable(node, found, kind))
            return
        time.sleep(min(RETRY_AFTER_S * (0.5 + random.random()), part.deadline - now))
        failed = self.slots.node_of(part.slot) if part.slot is not None else None
        try:
            self.slots.refresh(self._connect, without=failed)
        except NodeUnreachable as exc:
            part.failure, part.was_closed = exc, False
        else:
            self._send_parts([part])

    def _lose(self, line: _OpenNode, exc: Exception) -> None:
        """Close a broken connection. Its commands may have run."""
        self._forget(line)
        for part in line.parts:
            part.answers, part.line, part.failure = [], None, exc
            part.was_closed = isinstance(exc, redis.ConnectionError)
            part.asks = False
            if not part.may_repeat:
                part.fail(_unreachable(line.node, exc))
        line.parts.clear()

    def _forget(self, line: _OpenNode) -> None:
        if self._lines.get(line.node) is line:
            del self._lines[line.node]
        line.connection.disconnect()


def _own_answers(parts: list[_Part]) -> list[Any]:
    return parts[0].answers


def _unreachable(
    node: NodeAddress | None, exc: Exception | None, kind: type[NodeUnreachable] = NodeUnreachable
) -> NodeUnreachable:
    where = "The Redis Cluster has no master for the slot" if node is None else f"Node {node} did not answer"
    return kind(f"{where} ({exc}); other nodes of the Redis Cluster may answer")


def name_of(command: Sequence[Any]) -> str:
    """Return the name of a command in upper case; redis-py joins it with its subcommand in one word."""
    return str(command[0]).partition(" ")[0].upper()


def slot_of_command(command: Sequence[Any]) -> int | None:
    """Return the slot of a command; None when any node can answer it."""
    name = name_of(command)
    if name in WITHOUT_KEY:
        return None
    if name in ("PUBLISH", "PUBSUB"):
        return BROADCAST_SLOT
    if name in SCRIPTED:
        return slot_of(_raw(command[3])) if int(command[2]) else None
    return slot_of(_raw(command[1])) if len(command) > 1 else None


def _raw(key: Any) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def joined_answer(name: str, answers: Sequence[Any]) -> Any:
    """Return one answer for a command that several nodes have answered.

    ``WAIT`` confirms as many replicas as each master has at least. A script is known when each node knows it.
    """
    failed = next((each for each in answers if isinstance(each, Exception)), None)
    if failed is not None:
        return failed
    if name == "WAIT":
        return min(answers)
    if isinstance(answers[0], list):
        return [min(each) for each in zip(*answers, strict=True)]
    return answers[0]
