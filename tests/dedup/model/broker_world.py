"""The story on the tenant broker, where calls are messages, and an awaited declined message gets a result."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.dedup.model.broker import Message
from tests.dedup.model.broker_oracle import BrokerOracle
from tests.dedup.model.driver import KEYS, LEASE, Call
from tests.dedup.model.world import World

dedup_requests = st.fixed_dictionaries(
    {
        "key": World.key_of,
        "policy": st.sampled_from(["decline", "decline", "replace"]),
        "waiting": st.sampled_from([1, 1, 1, 0]),
        "timeout": st.sampled_from([None, 6, 25]),
        "awaited": st.sampled_from(["no", "id", "result"]),
        "kind": st.sampled_from([""] * 6 + ["delayed", "expired"]),
    }
)


class BrokerWorld(BrokerOracle):
    @rule(
        batch=st.lists(dedup_requests, min_size=1, max_size=3),
        fate=World.fates,
        fetched=st.sampled_from([0, 0, 1, 4]),
    )
    def ask(self, batch: list[dict[str, Any]], fate: str, fetched: int) -> None:
        self.push([self.message(each) for each in batch], fate)
        if fetched:
            self.claim(self.owners[fetched % 2], fetched)

    @precondition(lambda self: any(not each.retried for each in self.any_held(working=True)))
    @rule(data=st.data(), kind=st.sampled_from(["", "delayed"]), fate=World.fates)
    def publish_retry(self, data: st.DataObject, kind: str, fate: str) -> None:
        """Publish a continuation before the ack; the run may have lost its key by then, and may die now."""
        runs = [each for each in self.any_held(working=True) if not each.retried]
        run = data.draw(st.sampled_from(runs))
        self.publish_for(run, run.token, kind, fate)
        run.retried = True
        self.meets(fate, run.owner)

    def publish_for(self, run: Message, token: int, kind: str = "", fate: str = "answered") -> None:
        wanted = {"key": run.key, "policy": "decline", "waiting": 1, "timeout": run.timeout}
        self.push(
            [self.message({**wanted, "awaited": "result", "kind": kind}, run.task, (run.id, token))], fate
        )

    @precondition(lambda self: any(not each.retried for each in self.any_held(working=True)))
    @rule(data=st.data(), how=st.sampled_from(["freed", "died", "cut off"]))
    def publish_retry_late(self, data: st.DataObject, how: str) -> None:
        """Publish a continuation of a run that has lost its key; or a second one, of a repeated run."""
        run = data.draw(st.sampled_from([x for x in self.any_held(working=True) if not x.retried]))
        token, other = run.token, 1 - self.owners.index(run.owner)
        if how == "freed":
            self.freed(run.key)
        else:
            if how == "died":
                self.publish_for(run, token)
                self.die(run.owner)
            self.time_passes(LEASE + 2, (other,))
        self.claim(self.owners[other], 4)
        again = run.id in self.messages and run.token and not run.reason
        if how != "died":
            self.publish_for(run, token)
            run.retried = run.retried or run.token == token
        elif again:
            self.publish_for(run, run.token)
            run.retried = True

    # -- consumers

    @rule(owner=World.who, want=st.integers(1, 4), fate=World.fates)
    def start(self, owner: int, want: int, fate: str) -> None:
        self.claim(self.owners[owner], want)
        self.meets(fate, self.owners[owner])

    def claim(self, owner: str, want: int) -> None:
        self.evict_overdue()
        self.keeps_lease(owner)
        for entry in self.driver.claim(owner, want):
            message = self.messages[entry.id]
            message.owner, message.token = owner, int(entry.claim)
            if message.reason:
                self.discards.remove(entry.id)
            elif entry.reason:
                self.expires(message, entry.reason)
            else:
                assert message.due <= self.now
                self.runs_now(message)
            assert entry.reason == message.reason
            if entry.reason.startswith("covered:"):
                self.ledger.receives_result(message.id, self.calls[entry.reason.partition(":")[2]].task)
        # A claim may find more expired messages than it takes.
        for message_id, reason in self.driver.discarded().items():
            if message_id not in self.discards:
                self.expires(self.messages[message_id], reason)
                self.discards.add(message_id)

    def expires(self, message: Message, reason: str) -> None:
        message.reason = reason
        assert reason == "expired"
        assert message.expired
        self.leave(message, over=False)
        self.ledger.excuses(message.task, "expired")

    def keeps_lease(self, owner: str) -> None:
        """Renew the lease of an owner. After a late renewal other owners may have been away as well."""
        if self.leases.get(owner, self.now + LEASE) - self.now < 0.4 * LEASE:
            self.reap_grace_until[owner] = self.now + LEASE
        self.leases[owner] = self.now + LEASE

    def runs_now(self, message: Message) -> None:
        outside = message.id in self.outside
        if not outside:
            assert self.machine(message.key).start(message.id, message.token, self.now)
        self.ledger.begins(message.id, message.task, message.key, message.token, outside=outside)

    def ends(self, message: Message, how: str) -> None:
        if not message.reason:
            run = self.ledger.run_of(message.id, message.token)
            self.ledger.ends(message.id, how, accepted=not run.void, token=message.token)
        self.stale.append((dataclasses.replace(message), message.token))

    @precondition(lambda self: self.any_held())
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.any_held()))
        for _ in range(2):
            assert self.driver.settle(message.owner, [(str(message.token), message.id)]) == 0
        message.settled = True

    @precondition(lambda self: self.any_held())
    @rule(data=st.data(), fate=World.fates)
    def finish(self, data: st.DataObject, fate: str) -> None:
        self.over(data.draw(st.sampled_from(self.any_held())), fate)

    def over(self, call: Call, fate: str = "answered") -> None:
        message = self.messages[call.id]
        tags = [(str(message.token), message.id)]
        assert self.driver.finish(message.owner, tags) == 0
        if fate == "resent":
            assert self.driver.finish(message.owner, tags) == 1
        self.finished(message)
        self.meets(fate, message.owner)

    def finished(self, message: Message) -> None:
        self.ends(message, "retried" if message.retried else "done")
        if message.reason.startswith("covered:"):
            self.ledger.is_settled(message.id, message.reason)
        self.leave(message, over=True)
        self.drop(message)

    @precondition(lambda self: self.any_held())
    @rule(data=st.data(), sure=World.seldom)
    def reject(self, data: st.DataObject, sure: bool) -> None:
        """Dead-letter a message, which ends it; a settled message has no record left to store."""
        if not sure:
            return
        message = data.draw(st.sampled_from(self.any_held()))
        reported = self.driver.dead_letter(message)
        assert reported == ("no record" if message.settled else "dead")
        if not message.settled:
            self.ledger.excuses(message.task, "dead")
            self.finished(message)

    @precondition(lambda self: self.any_held())
    @rule(data=st.data(), mode=st.sampled_from(["unstarted", "requeue", "crashed"]), fate=World.fates)
    def release(self, data: st.DataObject, mode: str, fate: str) -> None:
        self.releases(data.draw(st.sampled_from(self.any_held())), mode, fate)

    @precondition(lambda self: any(each.crashes for each in self.any_held(working=True)))
    @rule(data=st.data())
    def crash_again(self, data: st.DataObject) -> None:
        """Crash a worker by a message that did so before: it is dead, even if other calls wait behind it."""
        suspects = [each for each in self.any_held(working=True) if each.crashes]
        self.releases(data.draw(st.sampled_from(suspects)), "crashed")

    @precondition(lambda self: any(self.followers.get(x.id) for x in self.any_held(working=True)))
    @rule(data=st.data(), wanted=dedup_requests)
    def come_back_in_vain(self, data: st.DataObject, wanted: dict[str, Any]) -> None:
        """Release a run with followers that has lost its key to a later call."""
        held = [x for x in self.any_held(working=True) if self.followers.get(x.id)]
        run = data.draw(st.sampled_from(held))
        self.freed(run.key)
        self.push([self.message({**wanted, "key": run.key})], "answered")
        self.releases(run, "unstarted")

    def releases(self, message: Message, mode: str, fate: str = "answered") -> None:
        tags = [(str(message.token), message.id)]
        assert self.driver.release(message.owner, tags, mode) == 0
        if fate == "resent":
            assert self.driver.release(message.owner, tags, mode) == 1
        owner = message.owner
        self.ends(message, "released")
        self.released(message, crashed=mode == "crashed")
        self.meets(fate, owner)

    @precondition(lambda self: self.stale or self.zombies)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        """Use tags of an older claim, and of a worker that has not noticed the loss of its lease."""
        late = [(call.owner, str(token), call.id) for call, token in self.stale]
        owner, token, message_id = data.draw(
            st.sampled_from(late + [(who, str(run.token), run.call) for who, run in self.zombies])
        )
        tags = [(token, message_id)]
        assert self.driver.settle(owner, tags) == 1
        assert self.driver.finish(owner, tags) == 1
        assert self.driver.release(owner, tags, "crashed") == 1
        for who, run in self.zombies[:]:
            if (who, str(run.token), run.call) == (owner, token, message_id):
                self.zombies.remove((who, run))
                run.end = "done too late"

    @rule(owner=World.who)
    def renew(self, owner: int) -> None:
        """Send the heartbeat, which reaps the messages of owners that are silent for a lease, dead or not."""
        name = self.owners[owner]
        self.keeps_lease(name)
        judges = self.reap_grace_until.get(name, 0) <= self.now
        lost = [self.messages[each] for each in (self.driver.lost(but=name) if judges else ())]
        for message in lost:
            assert self.leases[message.owner] <= self.now
        if judges:
            self.leases = {each: until for each, until in self.leases.items() if until > self.now}
        assert self.driver.heartbeat(name) == len(lost)
        for message in lost:
            if not message.reason:
                run = self.ledger.run_of(message.id, message.token)
                if not run.end:
                    run.void = run.void or "lease lost"
                    self.zombies.append((message.owner, run))
            self.stale.append((dataclasses.replace(message), message.token))
            self.released(message, crashed=True)
        self.evict_overdue()

    def die(self, owner: str) -> None:
        self.owners[self.owners.index(owner)] = f"{owner}+"
        for message in self.mine(owner, working=True):
            self.ledger.ends(message.id, "died", accepted=False, token=message.token)
        for who, run in self.zombies[:]:
            if who == owner:
                self.zombies.remove((who, run))
                run.end = "died"

    # -- operators

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), sure=World.seldom)
    def cancel(self, data: st.DataObject, sure: bool) -> None:
        if sure:
            self.is_cancelled(self.messages[data.draw(st.sampled_from(sorted(self.messages)))])

    def waiting_behind_a_deadline(self) -> list[Message]:
        found = []
        for key in KEYS:
            head, *behind, token = self.stands(key)
            if token and self.messages[head].timeout:
                found += [self.messages[each] for each in behind if each]
        return found

    @precondition(lambda self: self.waiting_behind_a_deadline())
    @rule(data=st.data())
    def cancel_waiting_behind_run(self, data: st.DataObject) -> None:
        """Remove the call that waits behind a run, which may then not be evicted."""
        self.is_cancelled(data.draw(st.sampled_from(self.waiting_behind_a_deadline())))

    def is_cancelled(self, message: Message) -> None:
        reported = self.driver.cancel(message)
        if message.token:
            assert reported == "claimed"
        elif message.reason:
            assert reported == "discarded"
        else:
            assert reported in ("waiting", "delayed")
            self.leave(message, over=False)
            self.discard(message, "cancelled")
            for group in self.followers.values():
                if message.id in group:
                    group.remove(message.id)

    def freed(self, key: str) -> None:
        evicted = self.driver.evict(key)
        assert evicted == self.lose_key(key, "freed")

    # -- invariants

    @invariant()
    def keys_match_the_machines(self) -> None:
        super().keys_match_the_machines()
        look = self.driver.members.__getitem__
        assert look("messages") == set(self.messages)
        places = {key: self.stands(key)[:3] for key in KEYS}
        assert look("dedup_members") == {each for parts in places.values() for each in parts if each}
        assert look("blocked") == {each for parts in places.values() for each in parts[1:] if each}
        following = {x for group in self.followers.values() for x in group if not self.messages[x].reason}
        assert look("following") == following
        assert look("discards") == self.discards
        timed = {
            self.driver.scope_field(key)
            for key, parts in places.items()
            if any(parts[1:]) and self.stands(key).token and self.messages[parts[0]].timeout
        }
        assert look("evictions") == timed
        assert self.driver.verdicts == dict(self.counted)
        for _, marks, parts in self.driver.claims.values():
            for place, each in enumerate(parts):
                # A mark may stay after the last follower has left.
                assert not self.followers.get(each) or marks & 1 << place

    def play_on(self) -> None:
        for _ in range(100):
            if not self.messages:
                break
            for who, run in self.zombies:
                assert self.driver.finish(who, [(str(run.token), run.call)]) == 1
                run.end = "done too late"
            self.zombies.clear()
            for message in self.any_held():
                self.over(message)
            self.claim(self.owners[0], 4)
            self.time_passes(4)
            self.renew(0)
        assert not self.messages, "it does not come to an end"
        self.keys_match_the_machines()
