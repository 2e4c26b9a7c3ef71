"""One word per idea: class names, banned words in names, and the one place that spells Redis keys."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_dq"

#: Kombu names these roles, and each transport has its own.
ROLES_OF_KOMBU = {"Channel", "Message", "QoS", "Transport"}

#: Word (or words joined by "_") in a name -> the term that takes its place.
BANNED = {
    "keeper": "heartbeat",
    "teller": "script pipeline",
    "intake": "channel consumer",
    "office": "elector, term",
    "offices": "electors",
    "bury": "dead-letter",
    "buried": "dead-lettered",
    "burial": "dead letter",
    "burials": "dead letters",
    "graveyard": "dead letters",
    "undertaker": "discard handler",
    "bell": "waker, wake-up",
    "ring": "wake",
    "rung": "woken",
    "nudge": "wake-up handed over",
    "told": "reported, notified",
    "untold": "unsent",
    "tell": "send, report",
    "tells": "sends, reports",
    "say": "report",
    "says": "reports",
    "said": "reported",
    "speak": "send",
    "hear": "receive",
    "heard": "received",
    "parked": "paused (tenants), waiting (calls)",
    "lane": "subscription (singleton queues), sequence (producers)",
    "lanes": "subscriptions",
    "governs": "is singleton",
    "lament": "report",
    "reign": "term",
    "outlast": "wait for expiry",
    "wish": "dedup request",
    "slip": "dedup request",
    "ticket": "dedup request",
    "grant": "dedup result",
    "face": "api",
    "hungry": "may have work",
    "give_back": "release",
    "take_back": "restore, requeue",
    "put_back": "requeue",
    "sole": "single",
    "soles": "singles",
    "wires": "context",
    "appt": "next look",
    "lenient": "reap grace",
    "claimants": "dedup members",
    "led_queue": "singleton queue",
    "yard": "worker app",
    "mailroom": "kombu queue",
}

#: (word, start of the path) -> why it may stand there.
ALLOWED = {
    ("lane", "app/"): "a queue, partition and priority of the producer's buffer",
    ("lane", "producer/"): "a queue, partition and priority of the producer's buffer",
    ("lanes", "producer/"): "the queues, partitions and priorities of the producer's buffer",
    ("put_back", "compat/pool_flush.py"): "a private name of billiard",
    ("ring", "allocation/"): "a hash ring",
}

#: The beginning of every key in Redis. Rules for users end in ``dq:*`` and name no key.
KEY_TEXT = re.compile(r"(?<![\w-])dq:(?!\*$)")
KEY_FILES = {"keys.py", "znodes.py"}


def words_of(name: str) -> list[str]:
    """The words of an identifier, in lower case; ZooKeeper is one word."""
    name = name.replace("ZooKeeper", "Zookeeper")
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def banned_in(name: str) -> set[str]:
    """The banned words in an identifier."""
    joined = "_" + "_".join(words_of(name)) + "_"
    return {word for word in BANNED if f"_{word}_" in joined}


def names_in(source: str) -> Iterator[str]:
    """The names that a Python file defines: classes, functions, parameters, variables, attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def names_in_lua(source: str) -> Iterator[str]:
    """The identifiers, keys and fields of a Lua script, without its comments."""
    yield from re.findall(r"[A-Za-z_]\w*", re.sub(r"--.*", "", source))


def misnamed(files: Iterable[tuple[Path, str]]) -> list[str]:
    """Every use of a banned word in a name: file, name, and the term to write."""
    found = set()
    for path, source in files:
        names = names_in_lua(source) if path.suffix == ".lua" else names_in(source)
        for name in {path.stem, *names}:
            for word in banned_in(name):
                if not any(word == each and str(path).startswith(where) for each, where in ALLOWED):
                    found.add(f"{path}: {name} ({word}: write {BANNED[word]})")
    return sorted(found)


def defined_twice(files: Iterable[tuple[Path, str]]) -> dict[str, list[str]]:
    """The class names that more than one file defines."""
    homes = defaultdict(list)
    for path, source in files:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path))
    return {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in ROLES_OF_KOMBU}


def keys_spelled(files: Iterable[tuple[Path, str]]) -> list[str]:
    """Texts that spell a key of Redis."""
    found = []
    for path, source in files:
        tree = ast.parse(source)
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docs else None
            if isinstance(text, str) and KEY_TEXT.search(text):
                found.append(f"{path}: {text!r}")
    return found


def sources(*kinds: str) -> list[tuple[Path, str]]:
    """The files of the package, with paths below it."""
    return [
        (path.relative_to(PACKAGE), path.read_text())
        for kind in kinds
        for path in sorted(PACKAGE.rglob(f"*.{kind}"))
    ]


def test_no_class_name_is_defined_twice() -> None:
    assert defined_twice(sources("py")) == {}


def test_no_name_has_a_banned_word() -> None:
    assert misnamed(sources("py", "lua")) == []


def test_keys_are_spelled_in_one_place() -> None:
    files = [(path, source) for path, source in sources("py") if str(path) not in KEY_FILES]
    assert keys_spelled(files) == []


def test_every_exception_is_needed() -> None:
    used = {
        (word, where)
        for path, source in sources("py", "lua")
        for name in {path.stem, *(names_in_lua(source) if path.suffix == ".lua" else names_in(source))}
        for word in banned_in(name)
        for each, where in ALLOWED
        if word == each and str(path).startswith(where)
    }
    assert {key for key in ALLOWED if (PACKAGE / key[1].partition("/")[0]).exists()} - used == set()


def test_the_checks_refuse_what_they_are_for() -> None:
    bad = "class LeaseKeeper:\n    def give_it_back(self, ticket):\n        self._bell = 'dq:online:push'\n"
    here = Path("transport/bad.py")
    assert len(misnamed([(here, bad)])) == 3
    assert misnamed([(Path("lua/bad.lua"), "local parked = 1 -- the teller\n")]) != []
    assert misnamed([(Path("graveyard.py"), "")]) != []
    assert misnamed([(here, "class ZooKeeperFetcher:\n    def heartbeat(self): ...\n")]) == []
    assert defined_twice([(here, bad), (Path("other.py"), bad)]) == {"LeaseKeeper": [str(here), "other.py"]}
    assert keys_spelled([(here, bad)]) == ["transport/bad.py: 'dq:online:push'"]
