"""The table of mutations fits the code, and covers the promises of the guide."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.__main__ import MISSED, SEEN, Judge
from tests.mutations.mutation import PROMISES, ROOT, Mutation, misfits
from tests.mutations.table import MUTATIONS


def test_every_mutation_changes_one_place_and_names_its_tests() -> None:
    assert misfits(MUTATIONS) == []


def test_a_mutation_that_does_not_fit_is_reported() -> None:
    first = MUTATIONS[0]
    gone = first._replace(what="gone", old="no such text")
    untested = first._replace(what="untested", tests=("tests/no_such_file.py",))
    pointless = Mutation("no promise", "pointless", first.file, first.old, first.old, first.tests)
    assert len(misfits([gone, untested, pointless, first, first])) == 5


def promises(page: str) -> list[str]:
    """Return the rows of a page's table of promises, without the header."""
    text = (ROOT / page).read_text(encoding="utf-8")
    begins, ends = text.index("What is promised"), text.index("Limits\n------")
    return [row.strip() for row in text[begins:ends].split("   * - ")][2:]


def test_every_promise_of_the_guide_has_three_mutations() -> None:
    rows = promises("docs/guides/guarantees-and-limits.rst")
    named = {name: text for name, text in PROMISES.items() if text}
    assert [row for row in rows if not row.startswith(tuple(named.values()))] == []
    assert [name for name, text in named.items() if not any(row.startswith(text) for row in rows)] == []
    counts = Counter(each.promise for each in MUTATIONS)
    assert {name: counts[name] for name in PROMISES if counts[name] < 3} == {}


def test_the_promises_of_the_readme_are_those_of_the_guide() -> None:
    rows = promises("README.rst")
    assert len(rows) == 6
    assert [row for row in rows if row not in promises("docs/guides/guarantees-and-limits.rst")] == []


@pytest.mark.parametrize(
    ("broken", "unbroken", "verdict"),
    [
        (1, 0, SEEN),
        (0, 0, MISSED),
        (1, 1, f"{MISSED}: fails without the mutation"),
        (1, None, f"{MISSED}: does not end in time without the mutation"),
        (None, 0, f"{SEEN}: hung"),
        (None, 1, f"{MISSED}: fails without the mutation"),
        (None, None, f"{MISSED}: does not end in time without the mutation"),
        (4, 4, f"{MISSED}: pytest ended with 4"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_mutation_is_seen_only_by_tests_that_pass_without_it(
    tmp_path: Path, broken: int | None, unbroken: int | None, verdict: str, strict: bool
) -> None:
    code = tmp_path / "celery_dq" / "code.py"
    code.parent.mkdir()
    code.write_text("good")

    def run(copy: Path, tests: tuple[str, ...]) -> int | None:
        assert tests == ("tests/test_code.py",)
        return {"good": unbroken, "bad": broken}[(copy / "celery_dq" / "code.py").read_text()]

    mutation = Mutation("once", "it breaks", "code.py", "good", "bad", ("tests/test_code.py",))
    expected = SEEN if broken == 1 and not strict else verdict
    assert Judge(run, strict).verdict(tmp_path, mutation) == expected
    assert code.read_text() == "good"
