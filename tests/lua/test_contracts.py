"""The contract at the top of a script describes its body."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from celery_dq.inspector.queue_counters import COUNTERS
from celery_dq.keys import PartitionKeys
from celery_dq.scripts.loader import Script, derived_by
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.move_calls import (
    Outbox,
    departed,
    drop_exported,
    export_messages,
    import_messages,
    open_tenants,
    set_map,
    store_tenant_settings,
)
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import ScriptCall, load_scripts

SCRIPTS = load_scripts()
KEYS = PartitionKeys("online", "push")
TYPES = {"HASH", "ZSET", "LIST", "STRING", "CHANNEL", "SET"}
PLACES = {"turn", "throttled", "at_concurrency", "paused", "resource_sets"}


FOLDER = Path(str(SCRIPTS.directory))
FILES = sorted(FOLDER.rglob("*.lua"))


def without_comments(source: str) -> str:
    return "\n".join(line.split("--")[0] for line in source.splitlines())


def code_of(script: Script) -> str:
    return without_comments(script.source)


def keys_in(code: str) -> set[str]:
    found = set(re.findall(r"P \.\. '([a-z_]+:?)'", code))
    if "P .. place" in code:
        found |= PLACES
    return found


def names_of(entries: Iterable[str]) -> set[str]:
    return {each.split()[0].split("<")[0] for each in entries}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_file_declares_the_keys_that_its_own_lines_derive(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert names_of(derived_by(path.stem, source)) == keys_in(without_comments(source))


@pytest.mark.parametrize("name", SCRIPTS.names())
class TestContract:
    def test_has_one_key(self, name: str) -> None:
        assert SCRIPTS[name].contract.keys == ("state HASH",)
        assert set(re.findall(r"KEYS\[(\d+)\]", code_of(SCRIPTS[name]))) == {"1"}

    def test_derives_the_keys_of_the_body(self, name: str) -> None:
        assert names_of(SCRIPTS[name].contract.derives) == keys_in(code_of(SCRIPTS[name]))

    def test_derived_keys_exist_with_their_types(self, name: str) -> None:
        for entry in SCRIPTS[name].contract.derives:
            key, kind = entry.split()
            attribute, parametrised = re.sub(r":<.*", "", key), ":<" in key
            documented: Any = getattr(PartitionKeys, attribute)
            assert kind in TYPES
            assert (documented.__doc__ or documented.fget.__doc__).startswith(kind + ":"), entry
            spelled = getattr(KEYS, attribute)("x") if parametrised else getattr(KEYS, attribute)
            assert spelled == KEYS.prefix + re.sub("<.*>", "x", key)

    def test_reads_the_arguments_it_declares(self, name: str) -> None:
        contract = SCRIPTS[name].contract
        fixed = next((i for i, each in enumerate(contract.argv) if "*" in each), len(contract.argv))
        read = {int(each) for each in re.findall(r"ARGV\[(\d+)\]", code_of(SCRIPTS[name]))}
        assert all(each <= len(contract.argv) for each in read)
        counters = {i + 1 for i, each in enumerate(contract.argv) if each.startswith(("n", "count"))}
        assert set(range(1, fixed + 1)) - counters <= read


def test_the_python_layer_sends_the_declared_arguments() -> None:
    partition = Partition(KEYS, SCRIPTS)
    tag = ("1", "a")
    homes, outbox = PartitionMap(4), Outbox("1", "t", 2, 0, "0", ((b"", b""),))
    calls: list[tuple[ScriptCall[Any], int]] = [
        (partition.declare_partitions(homes), 4),
        (set_map(partition, homes, homes), 3),
        (export_messages(partition, "t", 2, ["a"]), 4 + 1),
        (import_messages(partition, partition, outbox, homes, 0), 8 + 2),
        (drop_exported(partition, outbox), 1),
        (departed(partition, [("t", False)]), 1 + 2),
        (open_tenants(partition, homes, [("t", "0")]), 3 + 2),
        (partition.push([OutgoingRecord(1, "a", b"")]), 6 + 3),
        (partition.claim("c", lease_ms=1, want=1, settle=[tag], finish=[tag, tag]), 9 + 1 + 2 + 1 + 4),
        (partition.take("c", ["a"], lease_ms=1), 3 + 1),
        (partition.ack("c", settle=[tag], finish=[tag, tag]), 1 + 1 + 2 + 1 + 4),
        (partition.release("c", [tag], mode="requeue"), 5 + 2),
        (partition.requeue_and_pause("c", tag, record=b"", for_us=1), 6 + 2),
        (partition.heartbeat("c", lease_ms=1), 6),
        (partition.resign("c"), 2),
        (partition.fence(1), 3),
        (partition.hand_over_wakeup("c"), 1),
        (partition.set_quota("t", None), 5),
        (partition.divide_quota("t", b"before", b"after"), 5),
        (store_tenant_settings(partition, (b"", b""), [("t:t", b"", b"", b"", b"", b"")]), 3 + 6),
        (partition.bring_settings_quota(None, by="w", memory_ms=1), 5),
        (partition.pause("t"), 7),
        (partition.resume(None), 7),
        (partition.place_held_back(["t"]), 3 + 1),
        (partition.cancel(["a"]), 3 + 1),
        (partition.cancel_tenant("t"), 3),
        (partition.purge(), 1),
        (partition.edit("a", priority=3), 6),
        (partition.edit_record("a", b"before", b"after"), 6),
        (partition.dead_letter("c", tag, reason="r", worker="w"), 6),
        (partition.replay("a"), 5),
        (partition.forget_dead(["a"]), 1 + 1),
        (partition.recover(["a"]), 2 + 1),
        (partition.take("c", ["a"], lease_ms=1), 3 + 1),
        (partition.evict("t", "k"), 2),
        (partition.explain_tenant("t"), 1),
        (partition.locate("a"), 1),
        (partition.oldest_waiting(["t", "u"]), 3 + 2),
        (partition.oldest_waiting(place="turn"), 3),
        (partition.backlogs("turn", 0), 4),
    ]
    assert {call.script.name for call, _ in calls} == set(SCRIPTS.names())
    for call, sent in calls:
        assert len(call.args) == sent, call.script.name
        assert call.keys == (KEYS.state,)
        single = [each for each in call.script.contract.argv if "*" not in each]
        assert len(single) <= sent


def test_a_chunk_that_is_too_long_is_refused() -> None:
    partition = Partition(KEYS, SCRIPTS)
    for acks in ({"settle": [("1", "a")] * 1001}, {"finish": [("1", "a")] * 1001}):
        with pytest.raises(ValueError, match="1001 in one call"):
            partition.ack("c", **acks)


def test_the_fields_of_the_state_are_documented_where_its_key_is() -> None:
    sources = "\n".join(without_comments(path.read_text()) for path in FILES)
    used = set(re.findall(r"\bstate\.(\w+)", sources))
    for words in re.findall(r"\b(?:read_state\(|'H\w+', KEYS\[1\],)((?:\s*'\w+',?)+)", sources):
        used.update(re.findall(r"'(\w+)'", words))
    listed = set(re.findall(r"``(\w+)``", PartitionKeys.state.__doc__ or ""))
    counted = {each.name for each in COUNTERS if each.is_stored}
    assert used - listed - counted == set(), "name them in the docstring of PartitionKeys.state"
    gone = [word for word in sorted(listed | counted) if not re.search(rf"\b{word}\b", sources)]
    assert gone == [], "no script has such a field"


def test_no_script_searches_the_keyspace() -> None:
    for name in SCRIPTS.names():
        assert not re.search(r"'(KEYS|SCAN|HGETALL|SMEMBERS|HKEYS|HVALS)'", SCRIPTS[name].source), name
