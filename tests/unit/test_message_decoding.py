"""The fast and the general path decode the body of a message as kombu does."""

from __future__ import annotations

import datetime
import decimal
import uuid
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kombu import serialization
from kombu.compression import compress
from kombu.exceptions import ContentDisallowed
from kombu.message import Message as KombuMessage
from kombu.utils import json as kombu_json

from celery_dq.errors import CorruptRecord
from celery_dq.inspector.messages import read_info
from celery_dq.producer.kombu_sender import unpack_headers
from celery_dq.transport import envelope
from celery_dq.transport.in_flight import JSON, Message, StoredMessage
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.zookeeper.record import ZooKeeperRecord
from tests.hostile_messages import TYPED

VALUES = {
    "plain": [[42, "order", 1.5], {"merchant": "bakery"}, {"callbacks": None, "chain": None}],
    "texts": ["Grüße, 世界, 🎉 \u0000\u2028", "\\u005f", '"', ""],
    "typed": [
        b"raw",
        bytes(range(256)),
        decimal.Decimal("1.10"),
        uuid.UUID(int=7),
        datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2),
        {"nested": {"__type__": "no", "more": 1}},
    ],
    "empty": {},
    "zero": 0,
    "nothing": None,
    "large": {"n": 10**400, "inf": float("inf")},
}
HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "two": b"1 2",
    "a byte order mark": b"\xef\xbb\xbf[]",
    "not UTF-8": b'"\xff"',
    "UTF-16": "[1]".encode("utf-16"),
    "a half pair": b'"\\ud800"',
    "a half pair, raw": b'"\xed\xa0\x80"',
    "an escaped name of a type": b'{"__\\u0074ype__": "bytes", "\\u005f_value__": "x"}',
    "an unknown type": b'{"__type__": "unknown", "__value__": 1}',
    "a type that is none": b'{"__type__": [], "__value__": 1}',
    "a value that its type cannot be": b'{"__type__": "uuid", "__value__": {"hex": 1}}',
    "a value without methods": b'{"__type__": "bytes", "__value__": 1}',
    "a name twice": b'{"a": 1, "a": 2}',
    "a depth": b"[" * 100_000,
    "a long number": b"1" * 10_000,
    "a control character": b'"\x00"',
    "NaN": b"NaN",
}

#: Read by `vars`, because kombu's type stubs lack it.
REGISTRY: Any = vars(serialization)["registry"]


def received(
    body: str | bytes,
    content_type: str | None = JSON,
    encoding: str | None = "utf-8",
    headers: dict[str, Any] | None = None,
) -> Message:
    """Return the message that a consumer gets with this body."""
    packed = envelope.pack(headers or {}, {}, content_type, encoding)
    record = MessageRecord.unpack(MessageRecord("", "shop.order", 0, 0, 0, packed, body).pack())
    return Message(record, ClaimedEntry("id", "1", 0, "", record.pack()), "1/id", "push", None)


def outcome(decode: Any, message: Message) -> tuple[str, Any]:
    """Return the result of a function in a comparable form, or its exception."""
    try:
        value = decode(message)
    except Exception as error:
        return type(error).__name__, str(error)
    return type(value).__name__, repr(value)


def assert_as_kombu(message: Message) -> None:
    assert outcome(Message._decode, message) == outcome(KombuMessage._decode, message)


@pytest.fixture
def no_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kombu's own decoding fails."""

    def fail(message: Any) -> Any:
        raise AssertionError("the long way")

    monkeypatch.setattr(KombuMessage, "_decode", fail)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_json_takes_the_short_way(value: Any, no_long_way: None) -> None:
    text = kombu_json.dumps(value)
    assert repr(received(text).payload) == repr(value)
    assert repr(received(text.encode()).payload) == repr(value)


@pytest.mark.parametrize("compression", [None, "gzip", "bzip2"])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("value", [VALUES["plain"], VALUES["texts"], 0], ids=["plain", "texts", "zero"])
def test_every_serializer(serializer: str, value: Any, compression: str | None) -> None:
    content_type, encoding, body = REGISTRY.dumps(value, serializer)
    headers: dict[str, Any] = {}
    if compression is not None:
        body, headers["compression"] = compress(body, compression)
    message = received(body, content_type, encoding, headers)
    message.accept = {content_type}
    assert message.payload == value
    assert_as_kombu(message)


@pytest.mark.parametrize("content_type", [JSON, "application/data", "text/plain", "application/JSON", None])
@pytest.mark.parametrize("encoding", ["utf-8", "binary", "latin-1", "utf-16", "none-such", None])
@pytest.mark.parametrize(
    "body", [b'["Gr\xc3\xb6\xc3\x9fe"]', "Größe".encode("latin-1")], ids=["JSON", "Latin"]
)
def test_every_type_and_encoding(body: bytes, content_type: str | None, encoding: str | None) -> None:
    for accept in (None, set(), {JSON}, {"text/plain", "application/data"}):
        message = received(body, content_type, encoding)
        message.accept = accept
        assert_as_kombu(message)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes(body: bytes) -> None:
    assert_as_kombu(received(body))
    with_text = received(body.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode())
    assert_as_kombu(with_text)


def test_text_that_is_no_utf_8() -> None:
    message = received('["\ud800"]')
    assert message.errors
    assert_as_kombu(message)


def test_content_that_kombu_forbids_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    message = received(b"[]")
    message.accept = {"application/x-python-serialize"}
    with pytest.raises(ContentDisallowed):
        message.decode()
    message.accept = None
    monkeypatch.setattr(REGISTRY, "_disabled_content_types", {JSON})
    with pytest.raises(ContentDisallowed):
        message.decode()
    assert_as_kombu(message)


def test_json_for_another_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY._decoders, JSON, lambda body: "theirs")
    assert received(b"[]").decode() == "theirs"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.uuids(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value(value: Any) -> None:
    assert_as_kombu(received(kombu_json.dumps(value)))


@given(st.binary())
def test_any_bytes(body: bytes) -> None:
    assert_as_kombu(received(body))


DECODERS = (
    MessageRecord.unpack,
    ZooKeeperRecord.unpack,
    DedupSection.unpack,
    envelope.unpack,
    unpack_headers,
    lambda raw: read_info(raw) and None,
    lambda raw: StoredMessage(
        raw, b"", priority=0, due_us=1, returned=True, deliveries=1, tag="", queue="q", channel=None
    ),
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*TYPED.values()]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.binary()
    | st.builds(
        lambda head, rest: b"\x01" + head + rest,
        st.binary(min_size=26, max_size=26),
        st.binary(max_size=200),
    )
    | st.builds(lambda parts: kombu_json.dumps(parts).encode("utf-8", "surrogatepass"), JSON_VALUES)
    | st.builds(
        lambda mask, *parts: kombu_json.dumps([mask, *parts]).encode("utf-8", "surrogatepass"),
        st.integers(-1, 2**25),
        st.dictionaries(st.sampled_from(["eta", "id", "compression", "x"]), JSON_VALUES, max_size=3),
        st.dictionaries(st.sampled_from(["delivery_info", "priority", "x"]), JSON_VALUES, max_size=3),
        JSON_VALUES,
        JSON_VALUES,
    )
)
def test_a_decoder_raises_nothing_but_that_the_data_are_corrupt(raw: bytes) -> None:
    for decode in DECODERS:
        with suppress(CorruptRecord):
            decode(raw)


class Unspeakable(Exception):
    """An error whose own text fails, as that of a value that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_text_is_named() -> None:
    assert str(CorruptRecord.of("a header", Unspeakable())) == (
        "a header cannot be read: Unspeakable: (its text cannot be made)"
    )
    error = CorruptRecord("as it was")
    assert CorruptRecord.of("a header", error) is error
