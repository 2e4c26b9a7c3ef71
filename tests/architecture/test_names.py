"""One word per idea: class names, banned words in names, and the one place that spells Redis keys."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.architecture.parsing import parse

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_dq"
#: All code: the package comes first, with paths below it; the others keep the name of their folder.
OTHER_CODE = ("tests", "benchmarks", "example_project")

#: Kombu names these roles, and each transport has its own. The last two are Django's.
ROLES_OF_LIBRARIES = {"Channel", "Message", "QoS", "Transport", "Meta", "Migration"}

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
    "crew": "workers",
    "desk": "partition scripts",
    "thief": "other",
    "nobody": "no worker, no call",
    "somebody": "another client",
    "everybody": "all workers",
}

#: (word, start of the path) -> why it may stand there.
ALLOWED = {
    ("lane", "app/"): "a queue, partition and priority of the producer's buffer",
    ("lane", "contrib/django/models.py"): "a queue, partition and priority of the producer's buffer",
    ("lane", "contrib/django/outbox/"): "a queue, partition and priority of the producer's buffer",
    ("lane", "producer/"): "a queue, partition and priority of the producer's buffer",
    ("lane", "tracing/spans.py"): "a queue, partition and priority of the producer's buffer",
    ("lanes", "producer/"): "the queues, partitions and priorities of the producer's buffer",
    ("put_back", "compat/prefork_pool.py"): "a private name of billiard",
    ("ring", "allocation/"): "a hash ring",
    ("lane", "tests/producer/"): "a queue, partition and priority of the producer's buffer",
    ("lanes", "tests/producer/"): "the queues, partitions and priorities of the producer's buffer",
}

#: Words that no text has, in code, comments or documentation.
GONE = re.compile(
    r"(?<![a-z])(?:nobody|somebody|everybody|anybody|whoever|whomever|anew|told|untold|keepers?|tellers?"
    r"|graveyards?|undertakers?|bur(?:y|ied|ies|ials?)|claimants?|nudg(?:es?|ed|ing)|mailrooms?|crews?"
    r"|offices?|desks?|thief|thieves|booths?|parked|led[ _-]queues?)(?![a-z])",
    re.IGNORECASE,
)
#: Endings of the files whose text is read.
TEXT_FILES = (".py", ".lua", ".rst", ".toml", ".cfg", ".conf", ".java")

#: A test that names its subject by a question hides it.
RIDDLE = re.compile(r"def (test_(?:\w+_)?(?:what|who|whatever|whoever)_\w*)")

CLASS = re.compile(r"^ *class (\w+)[:(]", re.M)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
#: The beginning of every key in Redis. Rules for users end in ``dq:*`` and name no key.
KEY_TEXT = re.compile(r"(?<![\w-])dq:(?!\*$)")
KEY_FILES = {"keys.py", "znodes.py"}


def words_of(name: str) -> list[str]:
    """The words of an identifier, in lower case; ZooKeeper is one word."""
    name = name.replace("ZooKeeper", "Zookeeper")
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


@cache
def banned_in(name: str) -> set[str]:
    """The banned words in an identifier."""
    words = words_of(name)
    joined = "_" + "_".join(words) + "_"
    return BANNED.keys() & words | {pair for pair in BANNED if "_" in pair and f"_{pair}_" in joined}


def names_in(source: str) -> set[str]:
    """The names that a Python file defines: classes, functions, parameters, variables, attributes."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def names_in_lua(source: str) -> set[str]:
    """The identifiers, keys and fields of a Lua script, without its comments."""
    return set(IDENTIFIER.findall(re.sub(r"--.*", "", source)))


@cache
def banned_uses(path: Path, source: str) -> set[tuple[str, str]]:
    """The names of a file that have a banned word, each with that word."""
    anywhere = {name for name in {path.stem, *IDENTIFIER.findall(source)} if banned_in(name)}
    names = anywhere and (names_in_lua(source) if path.suffix == ".lua" else names_in(source))
    return {(name, word) for name in {path.stem, *names} for word in banned_in(name)}


def misnamed(files: Iterable[tuple[Path, str]]) -> list[str]:
    """Every use of a banned word in a name: file, name, and the term to write."""
    found = {
        f"{path}: {name} ({word}: write {BANNED[word]})"
        for path, source in files
        for name, word in banned_uses(path, source)
        if not any(word == each and str(path).startswith(where) for each, where in ALLOWED)
    }
    return sorted(found)


def defined_twice(files: Iterable[tuple[Path, str]]) -> dict[str, list[str]]:
    """The class names that more than one file defines."""
    homes = defaultdict(list)
    for path, source in files:
        for name in CLASS.findall(source):
            homes[name].append(str(path))
    return {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in ROLES_OF_LIBRARIES}


def keys_spelled(files: Iterable[tuple[Path, str]]) -> list[str]:
    """Texts that spell a key of Redis."""
    found = []
    for path, source in files:
        if not KEY_TEXT.search(source):
            continue
        tree = parse(source)
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


def gone_words(files: Iterable[tuple[Path, str]]) -> list[str]:
    """Every use of a word that is gone: file, line and word."""
    return [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"
        for path, text in files
        for found in GONE.finditer(text)
    ]


@cache
def sources(*kinds: str) -> list[tuple[Path, str]]:
    """The files of the package, with paths below it."""
    return [
        (path.relative_to(PACKAGE), path.read_text())
        for kind in kinds
        for path in sorted(PACKAGE.rglob(f"*.{kind}"))
    ]


@cache
def other_sources() -> list[tuple[Path, str]]:
    """The Python files beside the package, with paths below the repository."""
    return [
        (path.relative_to(ROOT), path.read_text())
        for folder in OTHER_CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def all_texts() -> Iterator[tuple[Path, str]]:
    """The text of all files of the repository but this one."""
    tops = [path for path in ROOT.iterdir() if path.is_file()]
    below = [
        path for folder in ("celery_dq", "docs", *OTHER_CODE) for path in sorted((ROOT / folder).rglob("*"))
    ]
    for path in [*tops, *below]:
        written = "_build" not in path.parts and path.suffix in TEXT_FILES
        if written and path.is_file() and path != Path(__file__):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_no_class_name_is_defined_twice() -> None:
    assert defined_twice(sources("py")) == {}


def test_no_name_has_a_banned_word() -> None:
    assert misnamed([*sources("py", "lua"), *other_sources()]) == []


def test_no_text_has_a_word_that_is_gone() -> None:
    assert gone_words(all_texts()) == []


def test_every_test_names_its_subject() -> None:
    riddles = [name for _, source in other_sources() for name in RIDDLE.findall(source)]
    assert riddles == [], "give the test the name of its subject instead of `what` or `who`"
    assert RIDDLE.findall("def " + "test_what_is_it()") == ["test_what_is_it"]


def test_keys_are_spelled_in_one_place() -> None:
    files = [(path, source) for path, source in sources("py") if str(path) not in KEY_FILES]
    assert keys_spelled(files) == []


def test_every_exception_is_needed() -> None:
    used = {
        (word, where)
        for path, source in [*sources("py", "lua"), *other_sources()]
        for _, word in banned_uses(path, source)
        for each, where in ALLOWED
        if word == each and str(path).startswith(where)
    }
    # The folder of an exception may be missing as long as it is not built.
    built = {
        key for key in ALLOWED if any((root / key[1].partition("/")[0]).exists() for root in (PACKAGE, ROOT))
    }
    assert built - used == set()


def test_the_checks_refuse_their_examples() -> None:
    bad = "class LeaseKeeper:\n    def give_it_back(self, ticket):\n        self._bell = 'dq:online:push'\n"
    here = Path("transport/bad.py")
    assert len(misnamed([(here, bad)])) == 3
    assert misnamed([(Path("lua/bad.lua"), "local parked = 1 -- the teller\n")]) != []
    assert misnamed([(Path("graveyard.py"), "")]) != []
    assert misnamed([(Path("tests/test_desk.py"), "")]) != []
    assert gone_words([(here, "#\n# Whoever is_told it; a stold crewman\n")]) == [
        f"{here}:2: Whoever",
        f"{here}:2: told",
    ]
    assert misnamed([(here, "class ZooKeeperFetcher:\n    def heartbeat(self): ...\n")]) == []
    assert defined_twice([(here, bad), (Path("other.py"), bad)]) == {"LeaseKeeper": [str(here), "other.py"]}
    assert keys_spelled([(here, bad)]) == ["transport/bad.py: 'dq:online:push'"]
