"""Loads Lua scripts from a directory.

A script is one ``.lua`` file that opens with its contract: a summary, then the sections of
:data:`SECTIONS`, all as comments. A line ``--@include name`` inserts the file ``include/name.lua``; an
include that is named twice is inserted once, where it was named first.

EVALSHA runs a file from its first line at every call, so each function that it defines takes time although
most calls need few of them. A line ``--@uses name`` therefore inserts nothing: it makes what
``include/name.lua`` defines in the table ``dq`` (``function dq.place(…)``, ``dq.LIMIT = 5``) known to the
script. Such a statement runs when a call first reads its name. An include that has other statements, too,
runs as a whole. What it includes itself is inserted into the script, and what it uses is known to the
script, too.

A line ``--@cluster statement`` is that statement on a Redis Cluster, and a comment elsewhere.

A script or an include lists in its section ``DERIVES`` only the keys that its own lines touch.
:attr:`Contract.derives` of a loaded script also holds the keys of its includes.

A server that lost its script cache answers EVALSHA with NOSCRIPT. :meth:`Script.run` then sends the whole
text with EVAL, once. Code that uses a connection of its own sends ``Script.command(..., full=True)``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redis.exceptions import NoScriptError

from celery_dq.errors import ScriptError

if TYPE_CHECKING:
    from importlib.abc import Traversable

Argument: TypeAlias = "str | bytes | int | float"

SECTIONS = ("KEYS", "DERIVES", "ARGV", "RETURNS", "COST", "GUARANTEE")

_DIRECTIVE = re.compile(r"^--@(?P<kind>include|uses)[ \t]+(?P<name>\S*)[ \t]*(?:\n|\Z)", re.M)
_CLUSTER = re.compile(r"--@cluster[ \t]+")
_DEFINED = re.compile(r"^(?:function (dq\.\w+)\(|(dq\.[\w., ]+) = )", re.M)
_READ = re.compile(r"(?<![\w.])dq\.(?P<name>\w+)")
_CONTINUES = re.compile(r"--|\s|end\b|[})]|$")
_COMMENT = re.compile(r"--.*")
_ENTRY = re.compile(r"  (?P<name>\S.*?)(?::\s.*|\s\s+.*)?$")


class Redis(Protocol):
    """The interface of a client that runs scripts. redis-py's plain, Sentinel and cluster clients have it."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send the words of a command and return the reply."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """The contract of a script.

    An entry of a section is a line indented by two spaces, ``name: explanation``. Lines that are indented
    more continue it.

    Attributes:
        summary: the text above the sections.
        keys: the entries of ``KEYS``, in order.
        derives: the entries of ``DERIVES`` of the script and its includes, sorted.
        argv: the entries of ``ARGV``, in order.
        returns: the text of ``RETURNS``.
        cost: the text of ``COST``.
        guarantee: the text of ``GUARANTEE``.
    """

    summary: str
    keys: tuple[str, ...]
    derives: tuple[str, ...]
    argv: tuple[str, ...]
    returns: str
    cost: str
    guarantee: str

    @classmethod
    def parse(cls, name: str, source: str, includes: Mapping[str, str]) -> Contract:
        """Read the contract on top of a script.

        Args:
            name: the name of the script, for errors.
            source: its file.
            includes: name -> file of every include of the script, also of those that an include names.

        Raises:
            ScriptError: A section is missing or stands twice, or has no entry.
        """
        summary, sections = _sections(name, source)
        missing = [section for section in SECTIONS if not sections.get(section)]
        if missing or not summary:
            raise ScriptError(
                f"script {name!r}: its contract lacks {', '.join(missing) or 'a summary'}; "
                f"write 'none' into an empty section"
            )
        derives = set(_entries(name, "DERIVES", sections))
        derives.update(*(derived_by(f"include/{each}", text) for each, text in includes.items()))

        def prose(lines: list[str]) -> str:
            return " ".join(line.strip() for line in lines)

        return cls(
            summary=prose(summary),
            keys=_entries(name, "KEYS", sections),
            derives=tuple(sorted(derives)),
            argv=_entries(name, "ARGV", sections),
            returns=prose(sections["RETURNS"]),
            cost=prose(sections["COST"]),
            guarantee=prose(sections["GUARANTEE"]),
        )


@functools.lru_cache(maxsize=100)
def derived_by(name: str, source: str) -> tuple[str, ...]:
    """Return the entries of ``DERIVES`` on top of a file, without those of its includes.

    Args:
        name: the name of the file, for errors.
        source: the text of the file; without the section it derives no keys.

    Raises:
        ScriptError: A section stands twice, or ``DERIVES`` has no entry.
    """
    _, sections = _sections(name, source)
    return _entries(name, "DERIVES", sections) if "DERIVES" in sections else ()


def _sections(name: str, source: str) -> tuple[list[str], dict[str, list[str]]]:
    """Read the comment on top of a file: the lines of its summary, and of each section."""
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
    return summary, sections


def _entries(name: str, section: str, sections: dict[str, list[str]]) -> tuple[str, ...]:
    found = [_ENTRY.match(line) for line in sections[section] if not line.startswith("   ")]
    names = tuple(match["name"] for match in found if match is not None)
    if not names:
        raise ScriptError(f"script {name!r}: section {section} has no line '  name: explanation'")
    return () if names == ("none",) else names


@dataclasses.dataclass(frozen=True)
class Script:
    """A script in the form that is sent to the server.

    Attributes:
        name: Name of the script.
        source: Text with the includes inserted.
        contract: The contract on top of it.
        sha1: SHA-1 of the text, which names the script in the server.
    """

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
        """Return the words of the command that runs the script.

        Args:
            keys: The keys.
            args: The arguments.
            full: Whether to send the text (EVAL), after the server answered NOSCRIPT.
        """
        if full:
            return ("EVAL", self.source, len(keys), *keys, *args)
        return ("EVALSHA", self.sha1, len(keys), *keys, *args)

    def run(self, client: Redis, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run the script on ``client`` and return the raw reply. Errors of the client are not caught."""
        try:
            return client.execute_command(*self.command(keys, args))
        except NoScriptError:
            return client.execute_command(*self.command(keys, args, full=True))


#: The place of the library in a script, while the script is put together. The last one is where it begins.
_LIBRARY = "\0"


@dataclasses.dataclass
class _Parts:
    """The includes of a script: those that are inserted, and name -> text of those that it uses."""

    inserted: set[str] = dataclasses.field(default_factory=set)
    used: dict[str, str] = dataclasses.field(default_factory=dict)


def _library(script: str, source: str, used: Mapping[str, str]) -> str:
    """Return the text of the table ``dq``, which runs a statement of an include when its name is first read.

    The statements stand in a function of their own, so their functions find each local of the script at once.
    A function of the script itself searches the list of all locals that any function has named until then.
    """
    homes: dict[str, int] = {}
    parts = [part for text in used.values() for part in _parts_of(text)]
    for place, (names, _) in enumerate(parts):
        for name in names:
            if homes.setdefault(name, place) != place:
                raise ScriptError(f"script {script!r}: dq.{name} is defined twice in its includes")
    read = _names_read_by(source).union(*map(_names_read_by, used.values()))
    if unknown := sorted(read - set(homes)):
        raise ScriptError(f"script {script!r}: no include that it uses defines dq.{', dq.'.join(unknown)}")
    by_length: dict[int, str] = {}
    shared: dict[int, str] = {}
    for name, place in homes.items():
        names, text = parts[place]
        found = f"{text}return dq.{name}\n"
        if len(names) > 1:
            found, shared[place] = f"place = {place}\n", text
        by_length[len(name)] = by_length.get(len(name), "") + f"if name == '{name}' then\n{found}end\n"
    return (
        f"local dq = {{}}\nsetmetatable(dq, {{__index = function(_, name)\nlocal length, place = #name, -1\n"
        f"{_search('length', by_length)}{_search('place', shared)}return rawget(dq, name)\nend}})\n"
    )


# Most scripts use the same includes.
@functools.lru_cache(maxsize=100)
def _parts_of(text: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return the statements of an include with the names that they define in ``dq``.

    An include that has other statements is one part.
    """
    parts = [""]
    for line in text.splitlines():
        if _DEFINED.match(line):
            parts.append("")
        elif not _CONTINUES.match(line):
            parts = ["", text]
            break
        parts[-1] += line + "\n"

    def defined_by(part: str) -> tuple[str, ...]:
        return tuple(name for found in _DEFINED.finditer(part) for name in _READ.findall(found[0]))

    return tuple((defined_by(part), part) for part in parts[1:])


@functools.lru_cache(maxsize=100)
def _names_read_by(text: str) -> frozenset[str]:
    """Return the names of ``dq`` that a text reads or defines."""
    return frozenset(_READ.findall(_COMMENT.sub("", text)))


def _search(variable: str, branches: Mapping[int, str]) -> str:
    """Return statements that find the branch of a number in few steps. Its number may be none of them."""

    def search(numbers: Sequence[int]) -> str:
        if len(numbers) == 1:
            return f"if {variable} == {numbers[0]} then\n{branches[numbers[0]]}end\n"
        half = len(numbers) // 2
        low, high = search(numbers[:half]), search(numbers[half:])
        return f"if {variable} < {numbers[half]} then\n{low}else\n{high}end\n"

    return search(sorted(branches)) if branches else ""


class ScriptSet(dict[str, Script]):
    """The scripts of one directory, which are all read when the set is made.

    So an incomplete installation is an error at the start of a worker, and an upgrade of the files does not
    affect a running process.

    Args:
        directory: Folder of the ``.lua`` files, which may be in a zip archive.
        names: Names of the scripts to load.
        on_cluster: Whether the scripts run on a Redis Cluster.

    Raises:
        ScriptError: A script or include is missing, includes are circular (the text names the chain), or a
            contract is not complete.
    """

    def __init__(self, directory: Traversable, *names: str, on_cluster: bool = False) -> None:
        self.directory = directory
        self.on_cluster = on_cluster
        self._includes: dict[str, str] = {}
        super().__init__((name, self._load(name)) for name in names)

    def names(self) -> list[str]:
        """Return the names of all scripts of the set, sorted."""
        return sorted(self)

    def _load(self, name: str) -> Script:
        own = self._read(name, (name,), self.directory / f"{name}.lua")
        parts = _Parts()
        source = self._expand(own, (name,), parts)
        if parts.used:
            before, behind = source.rsplit(_LIBRARY, 1)
            source = before + _library(name, source, parts.used) + behind
        source = source.replace(_LIBRARY, "")
        includes = {each: self._includes[each] for each in (*parts.inserted, *parts.used)}
        return Script(name, source, Contract.parse(name, own, includes))

    def _expand(self, source: str, chain: tuple[str, ...], parts: _Parts) -> str:
        def expanded(found: re.Match[str]) -> str:
            name, is_used = found["name"], found["kind"] == "uses"
            inner = (*chain, name)
            if name in chain[1:]:
                raise ScriptError(f"script includes are circular: {' -> '.join(inner)}")
            if name in parts.inserted or name in parts.used:
                return _LIBRARY if is_used else ""
            text = self._include(name, inner)
            if not is_used:
                parts.inserted.add(name)
                return self._expand(text, inner, parts) + "\n"
            directives = "".join(each[0] for each in _DIRECTIVE.finditer(text))
            inserted = self._expand(directives, inner, parts)
            parts.used[name] = _DIRECTIVE.sub("", text)
            return inserted + _LIBRARY

        return _DIRECTIVE.sub(expanded, source)

    def _include(self, name: str, chain: tuple[str, ...]) -> str:
        if name not in self._includes:
            self._includes[name] = self._read(name, chain, self.directory / "include" / f"{name}.lua")
        return self._includes[name]

    def _read(self, name: str, chain: tuple[str, ...], path: Traversable) -> str:
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise ScriptError(
                f"the script {name!r} of celery-dq is missing ({' -> '.join(chain)}): there is no file "
                f"{path}; the installation is incomplete, install celery-dq again"
            ) from None
        return _CLUSTER.sub("", text) if self.on_cluster else text


def is_noscript(error: BaseException) -> bool:
    """Return whether an error of the server says that the script is not in its cache."""
    return isinstance(error, NoScriptError) or str(error).startswith("NOSCRIPT")
