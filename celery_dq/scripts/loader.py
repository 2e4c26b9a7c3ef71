"""Loads Lua scripts from a directory.

A script is one ``.lua`` file that opens with its contract: a summary, then the sections of
:data:`SECTIONS`, all as comments. A line ``--@include name`` puts the file ``include/name.lua`` there; an
include that is pulled in twice stands once, where it was pulled in first.

A server that lost its script cache answers EVALSHA with NOSCRIPT. :meth:`Script.run` then sends the whole
text with EVAL, once; who talks to the server on his own sends ``Script.command(..., full=True)``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from redis.exceptions import NoScriptError

from celery_dq.errors import ScriptError

Argument: TypeAlias = "str | bytes | int | float"

SECTIONS = ("KEYS", "DERIVES", "ARGV", "RETURNS", "COST", "GUARANTEE")

_INCLUDE = re.compile(r"--@include\s+(?P<name>\S*)\s*$")
_ENTRY = re.compile(r"  (?P<name>\S.*?)(?::\s.*|\s\s+.*)?$")


class Redis(Protocol):
    """What is needed of a client; redis-py's plain, Sentinel and cluster ones have it."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Sends the words of a command and returns the reply."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """What a script says of itself on top of its file.

    ``keys``, ``derives`` and ``argv`` hold the names of the entries, in order; an entry is a line indented by
    two spaces, ``name: explanation``, and deeper indented lines continue it.
    """

    summary: str
    keys: tuple[str, ...]
    derives: tuple[str, ...]
    argv: tuple[str, ...]
    returns: str
    cost: str
    guarantee: str

    @classmethod
    def parse(cls, name: str, source: str) -> Contract:
        """The contract on top of ``source``. Raises ScriptError when a section is missing or doubled."""
        summary: list[str] = []
        sections: dict[str, list[str]] = {}
        lines = summary
        for line in source.splitlines():
            if not line.startswith("--") or line.startswith("--@"):
                break
            text = line[2:].removeprefix(" ").rstrip()
            if text in SECTIONS:
                if text in sections:
                    raise ScriptError(f"script {name!r}: the contract has two sections {text}; join them")
                lines = sections[text] = []
            elif text:
                lines.append(text)
        missing = [section for section in SECTIONS if not sections.get(section)]
        if missing or not summary:
            raise ScriptError(
                f"script {name!r}: its contract lacks {', '.join(missing) or 'a summary'}; "
                f"write 'none' in a section that has nothing to say"
            )

        def entries(section: str) -> tuple[str, ...]:
            found = [_ENTRY.match(line) for line in sections[section] if not line.startswith("   ")]
            names = tuple(match["name"] for match in found if match is not None)
            if not names:
                raise ScriptError(f"script {name!r}: section {section} has no line '  name: explanation'")
            return () if names == ("none",) else names

        def prose(lines: list[str]) -> str:
            return " ".join(line.strip() for line in lines)

        return cls(
            summary=prose(summary),
            keys=entries("KEYS"),
            derives=entries("DERIVES"),
            argv=entries("ARGV"),
            returns=prose(sections["RETURNS"]),
            cost=prose(sections["COST"]),
            guarantee=prose(sections["GUARANTEE"]),
        )


@dataclasses.dataclass(frozen=True)
class Script:
    """A script as the server gets it: ``source`` holds the includes, ``sha1`` is its name in the server."""

    name: str
    source: str
    contract: Contract
    sha1: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha1", digest)

    def command(
        self, keys: Sequence[str], args: Sequence[Argument], full: bool = False
    ) -> tuple[Argument, ...]:
        """The words of the command; ``full`` sends the text, after the server did not know the script."""
        if full:
            return ("EVAL", self.source, len(keys), *keys, *args)
        return ("EVALSHA", self.sha1, len(keys), *keys, *args)

    def run(self, client: Redis, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs on ``client`` and returns the raw reply; errors of the server and the connection pass."""
        try:
            return client.execute_command(*self.command(keys, args))
        except NoScriptError:
            return client.execute_command(*self.command(keys, args, full=True))


class ScriptSet:
    """The scripts of one directory, each read when it is first asked for.

    Raises :exc:`~celery_dq.errors.ScriptError` for a script or include that is missing, includes that go in a
    circle (with the chain), and a contract that is not complete.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._loaded: dict[str, Script] = {}

    def __getitem__(self, name: str) -> Script:
        script = self._loaded.get(name)
        if script is None:
            own = self._read(name, (name,), self.directory / f"{name}.lua")
            contract = Contract.parse(name, own)
            script = Script(name, self._expand(own, (name,), set()), contract)
            self._loaded[name] = script
        return script

    def names(self) -> list[str]:
        """The names of all scripts in the directory, sorted."""
        return sorted(path.stem for path in self.directory.glob("*.lua"))

    def _expand(self, source: str, chain: tuple[str, ...], seen: set[str]) -> str:
        lines: list[str] = []
        for line in source.splitlines():
            found = _INCLUDE.match(line)
            if found is None:
                lines.append(line)
                continue
            name = found["name"]
            inner = (*chain, name)
            if name in chain[1:]:
                raise ScriptError(f"script includes go in a circle: {' -> '.join(inner)}")
            if name in seen:
                continue
            seen.add(name)
            text = self._read(name, inner, self.directory / "include" / f"{name}.lua")
            lines.append(self._expand(text, inner, seen))
        return "\n".join(lines)

    def _read(self, name: str, chain: tuple[str, ...], path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise ScriptError(
                f"script {name!r} is missing ({' -> '.join(chain)}): there is no file {path}"
            ) from None


def is_noscript(error: BaseException) -> bool:
    """Whether a server's error says that it does not know the script (yet, or any more)."""
    return isinstance(error, NoScriptError) or str(error).startswith("NOSCRIPT")
