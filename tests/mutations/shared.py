"""The parts that all packages share: private names of other libraries, state of one process, wake-ups."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

NAMES = "tests/unit/test_private_names.py"
WAKER = "tests/unit/test_waker.py"
WAKE_FLAG = "tests/unit/test_wake_flag.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "recovery",
        "a worker whose lease has expired counts as alive in the status",
        "app/checks/status.py",
        "not any(consumer.lease_s > 0 for consumer in each.consumers)",
        "not each.consumers",
        ("tests/integration/test_status.py", "-k", "with_and_without"),
    ),
    Mutation(
        "rate",
        "an import of quotas keeps those that the file does not have",
        "inspector/live_quotas.py",
        "tenants = sorted({*before.tenants, *after.tenants})",
        "tenants = sorted(after.tenants)",
        ("tests/integration/test_quota_documents.py", "-k", "same_quotas or copy_makes"),
    ),
    Mutation(
        "rate",
        "a file of quotas may name a tenant twice",
        "inspector/live_quotas.py",
        "if len(found) < len(pairs):",
        "if len(found) > len(pairs):",
        ("tests/integration/test_quota_documents.py", "-k", "names_its_place"),
    ),
    Mutation(
        "shared",
        "a missing name of another library stops no process",
        "compat/guard.py",
        "        if problem:\n",
        "        if False:\n",
        (NAMES,),
    ),
    Mutation(
        "shared",
        "the parameters of a function of another library may differ",
        "compat/guard.py",
        "    if name.parameters:\n",
        "    if False:\n",
        (NAMES,),
    ),
    Mutation(
        "shared",
        "a newer release of a library counts as read",
        "compat/table.py",
        "if not oldest <= release <= newest:",
        "if not oldest <= release:",
        (NAMES,),
    ),
    Mutation(
        "shared",
        "the doctor does not look at the releases of libraries",
        "app/checks/doctor.py",
        "    settings_checks.library_versions,\n",
        "",
        ("tests/integration/test_doctor.py", "-k", "not_read"),
    ),
    Mutation(
        "shared",
        "a wake-up during the answer to another is lost",
        "waker.py",
        "        self.is_pending = False\n        self._on_wake()",
        "        self._on_wake()\n        self.is_pending = False",
        (WAKER,),
    ),
    Mutation(
        "shared",
        "a forked child wakes its parent's event loop",
        "waker.py",
        "if pair is None or self.is_pending or not self._owner.is_current:",
        "if pair is None or self.is_pending:",
        (WAKER,),
    ),
    Mutation(
        "shared",
        "a forked child keeps its parent's state beside its own",
        "per_process.py",
        "self._values.pop(inherited, None)",
        "pass",
        ("tests/unit/test_per_process.py",),
    ),
    Mutation(
        "shared",
        "a flag that is set twice raises",
        "wake_flag.py",
        "contextlib.suppress(RuntimeError)",
        "contextlib.suppress(KeyError)",
        (WAKE_FLAG, "-k", "set_twice"),
    ),
    Mutation(
        "shared",
        "a fetcher on ZooKeeper waits for the signal handler that interrupts its wake-up",
        "transport/zookeeper/fetcher.py",
        "self._waker = WakeFlag()",
        'self._waker = __import__("threading").Event()',
        ("tests/zookeeper_transport/test_signals.py",),
    ),
)
