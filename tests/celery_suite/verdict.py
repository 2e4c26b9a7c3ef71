"""Compares the outcomes of one suite over two brokers."""

from __future__ import annotations

from collections.abc import Mapping

from tests.celery_suite.plugin import Outcome

_LATE_SUBSCRIPTION = (
    "The subscription to a result waits until its caller asks for the result, so that no call waits for the "
    "result backend. The test looks for the subscription before that."
)
_OTHER_SCHEME = "The test skips itself for every URL scheme but redis://."
#: Tests that pass on stock and not on celery-dq on purpose, with the reasons.
KNOWN = {
    "test_scheduled": "A task with an ETA waits in the broker until it is due; no worker has it to report.",
    "test_asyncresult_forget_cancels_subscription": _LATE_SUBSCRIPTION,
    "test_asyncresult_get_cancels_subscription": _LATE_SUBSCRIPTION,
    "test_reconnect_cleanup_is_bounded": _OTHER_SCHEME,
    "test_cold_shutdown_teardown_is_bounded": _OTHER_SCHEME,
}


class Verdict:
    """The outcomes of one suite over two brokers.

    Args:
        stock: The outcomes over Celery's own transport.
        ours: The outcomes over celery-dq.
    """

    def __init__(self, stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> None:
        self._stock = stock
        self._ours = ours

    @property
    def differences(self) -> list[str]:
        """Return the tests that pass on stock and do not pass on celery-dq, including known ones."""
        return [
            test
            for test, outcome in self._stock.items()
            if outcome.outcome == "passed" and self._outcome_on_ours(test) != "passed"
        ]

    @property
    def faults(self) -> list[str]:
        """Return the differences without a known reason."""
        return [test for test in self.differences if _reason(test) is None]

    def after_another_run(self, stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> Verdict:
        """Return the verdict with the outcomes of a repetition instead of the first ones."""
        return Verdict({**self._stock, **stock}, {**self._ours, **ours})

    def __str__(self) -> str:
        lines = [f"stock: {_count(self._stock)}", f"ours:  {_count(self._ours)}"]
        for test in self.differences:
            reason = _reason(test)
            lines.append(f"PASSES ON STOCK, {self._outcome_on_ours(test).upper()} ON OURS: {test}")
            lines.append(f"    known: {reason}" if reason else _last_lines(self._ours.get(test)))
        for test, outcome in self._ours.items():
            on_stock = self._stock.get(test)
            if outcome.outcome == "passed" and on_stock is not None and on_stock.outcome != "passed":
                lines.append(f"passes on ours, {on_stock.outcome} on stock: {test}")
            elif on_stock is not None and {outcome.outcome, on_stock.outcome} <= {"failed", "hung"}:
                lines.append(f"fails on both: {test}")
        lines.append(f"{len(self.faults)} tests pass on stock and not on ours, without a known reason.")
        return "\n".join(lines)

    def _outcome_on_ours(self, test: str) -> str:
        found = self._ours.get(test)
        return "missing" if found is None else found.outcome


def _reason(test: str) -> str | None:
    name = test.rpartition("::")[2].partition("[")[0]
    return KNOWN.get(name)


def _count(outcomes: Mapping[str, Outcome]) -> str:
    names = [each.outcome for each in outcomes.values()]
    found = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(sorted(names)))
    return f"{len(names)} tests: {found}; {sum(each.seconds for each in outcomes.values()):.0f} s"


def _last_lines(outcome: Outcome | None) -> str:
    lines = outcome.text.strip().splitlines()[-6:] if outcome else []
    return "\n".join(f"    {line}" for line in lines)
