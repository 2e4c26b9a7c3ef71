"""The dashboard: permissions, hidden arguments, deadlines."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_VIEWS = "contrib/django/dashboard/views.py"
_READS = "contrib/django/dashboard/broker_reads.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "shared",
        "the dashboard asks for no permission",
        _VIEWS,
        "        if not missing:\n",
        "        if True:\n",
        ("tests/dashboard/test_changes.py", "-k", "needs_its_permission"),
    ),
    Mutation(
        "shared",
        "a read-only dashboard makes changes",
        _VIEWS,
        'self.request.method == "POST" and self.read_only',
        'self.request.method == "PUT" and self.read_only',
        ("tests/dashboard/test_changes.py", "-k", "read_only"),
    ),
    Mutation(
        "shared",
        "the dashboard does not check the CSRF token",
        _VIEWS,
        "    @method_decorator(csrf_protect)\n",
        "",
        ("tests/dashboard/test_standalone.py", "-k", "changes_and_passwords"),
    ),
    Mutation(
        "shared",
        "the dashboard does not show the pause of a queue",
        "contrib/django/dashboard/queues.py",
        "if queue.pause is not None:",
        "if False:",
        ("tests/dashboard/test_changes.py", "-k", "paused_queue"),
    ),
    Mutation(
        "shared",
        "arguments are shown without the setting",
        _VIEWS,
        "self.dq.options.web.show_arguments and self._may(",
        "self._may(",
        ("tests/dashboard/test_security.py", "-k", "arguments"),
    ),
    Mutation(
        "shared",
        "viewers with and without the right to see arguments share a page",
        _VIEWS,
        "key = (self.page, given.urlencode(), arguments)",
        "key = (self.page, given.urlencode())",
        ("tests/dashboard/test_security.py", "-k", "arguments"),
    ),
    Mutation(
        "shared",
        "the text of an exception is not hidden",
        "contrib/django/dashboard/messages.py",
        'kind, _, exception = reason.partition(": ")',
        'return reason\n    kind, _, exception = reason.partition(": ")',
        ("tests/dashboard/test_security.py", "-k", "arguments"),
    ),
    Mutation(
        "shared",
        "a filter of dead letters tells hidden arguments",
        "contrib/django/dashboard/letter_filter.py",
        "            if wanted.allows(letter):",
        "            if wanted.allows(each):",
        ("tests/dashboard/test_security.py", "-k", "arguments"),
    ),
    Mutation(
        "shared",
        "one name that is not Unicode hides all queues",
        "app/api/broker.py",
        "            return False\n        return True\n",
        "        return True\n",
        ("tests/dashboard/test_security.py", "-k", "not_unicode"),
    ),
    Mutation(
        "shared",
        "a change by the dashboard is audited without its user",
        _VIEWS,
        'with dq.audit.through("dashboard", by=user):',
        'with dq.audit.through("dashboard"):',
        ("tests/dashboard/test_changes.py", "-k", "visible_at_once"),
    ),
    Mutation(
        "shared",
        "headers of tools are not hidden",
        "contrib/django/dashboard/messages.py",
        "value if name in KNOWN_HEADERS else HIDDEN",
        "value",
        ("tests/dashboard/test_security.py", "-k", "arguments"),
    ),
    Mutation(
        "shared",
        "a page waits for a silent broker",
        _READS,
        "if not done.wait(max(latest - time.monotonic(), 0.0)):",
        "if not done.wait(20):",
        ("tests/dashboard/test_failures.py", "-k", "in_time or unknown"),
    ),
    Mutation(
        "shared",
        "each viewer of a page reads the broker",
        _READS,
        "if is_first := found is None or not found.is_fresh:",
        "if is_first := True:",
        ("tests/dashboard/test_cost.py", "-k", "viewers"),
    ),
    Mutation(
        "shared",
        "a page shows the state before the change that was just made",
        _READS,
        "                self._reads.clear()\n",
        "                pass\n",
        ("tests/dashboard/test_changes.py", "-k", "visible_at_once"),
    ),
    Mutation(
        "shared",
        "a search for a tenant looks at all of them",
        "inspector/tenant_pages.py",
        "if looked_at == MOST_LOOKS or",
        "if False or",
        ("tests/dashboard/test_cost.py", "-k", "60000"),
    ),
    Mutation(
        "shared",
        "a quota that has changed since its preview is overwritten",
        "contrib/django/dashboard/tenants.py",
        'if seen != form.get("seen", seen):',
        "if False:",
        ("tests/dashboard/test_changes.py", "-k", "since_the_preview"),
    ),
)
