"""A compressed body is decompressed up to a bound, because a few bytes can stand for gigabytes."""

from __future__ import annotations

import json
import lzma

import pytest
from kombu import compression

from celery_dq.app.api import message_edits
from celery_dq.app.api.message_edits import JSON, read_body, shown_arguments, with_arguments
from celery_dq.errors import InvalidMessage
from celery_dq.transport import envelope

KINDS = ["gzip", "zlib", "bzip2", "lzma"]


def packed(kind: str) -> bytes:
    return envelope.pack({"compression": kind, "task": "job", "id": "1"}, {}, JSON, "utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_is_read_and_edited_in_its_compression(kind: str) -> None:
    body, kind = compression.compress(json.dumps([["a", "z" * 3000], {}, {}]).encode(), kind)
    assert read_body(packed(kind), body, {JSON}) == [["a", "z" * 3000], {}, {}]
    head, changed = with_arguments(packed(kind), body, {"args": ["b"]}, {JSON}, {})
    assert shown_arguments(head, changed) == (["b"], {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_above_the_bound_is_not_decompressed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_edits, "MAX_BODY", 1_000_000)
    bomb, kind = compression.compress(bytes(1_000_001), kind)
    assert len(bomb) < 2_000
    with pytest.raises(InvalidMessage, match="more than 1,000,000 bytes"):
        read_body(packed(kind), bomb, {JSON})
    assert shown_arguments(packed(kind), bomb) == (None, None)
    with pytest.raises(InvalidMessage, match="it ends early"):
        read_body(packed(kind), bomb[: len(bomb) // 2], {JSON})


def test_a_dictionary_above_the_bound_is_not_allocated() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    body = lzma.compress(b'[["a"], {}, {}]', filters=filters)
    with pytest.raises(InvalidMessage, match="Memory usage limit"):
        read_body(packed("lzma"), body, {JSON})


def test_a_compression_without_a_bound_is_not_decompressed() -> None:
    compression.register(lambda body: body, lambda body: body, "application/x-own")
    with pytest.raises(InvalidMessage, match="its size cannot be bounded"):
        read_body(packed("application/x-own"), b"x", {JSON})
