"""How foreign values are shown: URLs and settings without their secrets, names without control characters."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

HIDDEN = "**"
#: Most message ids in one log record.
MOST_IDS = 10
_SCHEME = re.compile(r"[\w.+-]+://")
#: Where the next URL of a list begins.
_NEXT = re.compile(r"[;,](?=[\w.+-]+://)")
#: The end of the credentials: the last one, because a password may hold characters that should be encoded.
_CREDENTIALS = re.compile(r".*(?:@|%40)", re.DOTALL)
#: Options of a URL whose values are shown. A misspelt password is a password, so others are not.
_HARMLESS = re.compile(
    r"virtual_host|db|protocol|ssl_cert_reqs|ssl_check_hostname|socket_\w+|health_check_interval"
)
#: Names of settings whose values are not shown, also when they are misspelt.
_SECRET = re.compile(r"pas|pwd|secret|token|auth|cred|sasl|user|private", re.IGNORECASE)


def shown_url(url: object) -> str:
    """Return a URL, or several, for an error or a log line: without user, password and unknown options."""
    return ";".join(map(_without_secrets, _NEXT.split(str(url))))


def _without_secrets(url: str) -> str:
    scheme = _SCHEME.match(url)
    start = scheme[0] if scheme else ""
    address, mark, query = _CREDENTIALS.sub(f"{HIDDEN}@", url[len(start) :]).partition("?")
    options = (each.partition("=") for each in query.split("&") if each)
    shown = (f"{name}={value if _HARMLESS.fullmatch(name) else HIDDEN}" for name, _, value in options)
    return f"{start}{address}{mark}{'&'.join(shown)}"


def why_unreadable(url: object, error: object) -> str:
    """Return why a URL cannot be read. The parser's own error may show a part of a password that it cut."""
    if _CREDENTIALS.search(str(url)) is None:
        return str(error)
    return (
        f"{shown_url(url)!r}: percent-encode the characters of user and password that are neither letters "
        "nor digits, such as %2F for a slash, and give the port as a number"
    )


def shown_setting(value: object) -> str:
    """Return the value of a setting for an error or a log line, without the secrets in it."""
    return repr(_masked(value))


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: HIDDEN if _SECRET.search(str(name)) else _masked(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(each) for each in value]
    if isinstance(value, str) and ("://" in value or "@" in value):
        return shown_url(value)
    return value


def shown_name(name: object) -> str:
    """Return a name that a message may hold for a line of text, without line ends and terminal sequences."""
    text = str(name)
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def shown_ids(ids: Sequence[str]) -> str:
    """Return the first of these message ids, and how many more there are."""
    more = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return ", ".join(ids[:MOST_IDS]) + more


def shown_json(document: Any, *, indent: int | None = 2) -> str:
    """Return a document as JSON that a terminal shows as it is, and a program reads."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def shell_word(name: object) -> str:
    """Return a name as one word of a command that is offered for pasting into a shell."""
    return shlex.quote(shown_name(name))


class _ShownArgument:
    """An argument of a log record that cannot leave its line; the record keeps the value itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __str__(self) -> str:
        return shown_name(self.value)

    def __repr__(self) -> str:
        # repr() escapes a text by itself, and so it is not escaped twice; that of other values may not.
        return shown_name(repr(self.value))


def _show_arguments(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(each if _is_harmless(each) else _ShownArgument(each) for each in record.args)
    return True


def _is_harmless(value: object) -> bool:
    # %d and %g need the numbers themselves. Other values become texts when a handler asks, which reports the
    # error of one that cannot; an error here would reach the caller.
    return value.isprintable() if isinstance(value, str) else isinstance(value, (int, float))


def shown_logger(name: str) -> logging.Logger:
    """Return the logger of a module, whose arguments cannot leave their line: messages name them, too.

    The text of a call is ours, and may have several lines; the traceback and the fields of ``extra`` stay as
    they are.
    """
    logger = logging.getLogger(name)
    # A filter is called in the process of the call, before each handler. It is added once: a module that is
    # loaded again has the same logger, and the filter is the same function.
    logger.addFilter(_show_arguments)
    return logger


def plain(value: Any) -> Any:
    """Return a snapshot as dicts, lists, texts and numbers. Times become texts in ISO 8601.

    Values of other types become their ``str``: a path, or a UUID or a Decimal in the arguments of a task.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
