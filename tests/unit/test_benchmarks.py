"""The evaluation of benchmark figures: the worst window, the table of ratios, and the README."""

from __future__ import annotations

import json
import socket
from inspect import signature
from pathlib import Path

import pytest
import tomllib

from benchmarks.__main__ import main
from benchmarks.at_claim import read_held
from benchmarks.fleet import PLANS, Plan, distinct, fleet, size_of
from benchmarks.many_queues import QUEUES, contenders
from benchmarks.many_quotas import accuracy
from benchmarks.measure import BENCHMARKS, Report, Series, chosen
from benchmarks.peer_apps import PEER_APPS
from benchmarks.peers import CELERY, PROMISES
from benchmarks.quotas import rates_of, worst_excess
from benchmarks.readme import GUIDE, HEADLINES, PARTS, marked, write_figures
from benchmarks.shop import WAIT
from benchmarks.summary import curve, summary
from benchmarks.trickle import waits

CLAIMS = {
    str(tenants): {
        "stock": {"rate": [100.0, 110.0], "p99": [5.0, 10.0]},
        "dq": {"rate": [rate, rate], "p99": [2.0, 4.0], "cpu": [cpu]},
    }
    for tenants, rate, cpu in ((10, 2000.0, 10.0), (100, 1900.0, 10.0), (60_000, 1000.0, 12.0))
}


@pytest.mark.parametrize(
    ("arrivals", "excess"),
    [
        ([], float("-inf")),
        # 10/s with a burst of 2: the burst, then one each 100 ms
        ([0, 0, 0.1, 0.2], 0.0),
        ([0, 0.1, 0.2], -1.0),
        # the third comes half an interval early, the fourth at once with it
        ([0, 0, 0.05], 0.5),
        ([0, 0, 0.05, 0.05], 1.5),
        # a full burst after a pause is within the quota
        ([0, 0, 1.0, 1.0, 1.1], 0.0),
        # in any order
        ([0.05, 0, 0], 0.5),
    ],
)
def test_the_worst_window(arrivals: list[float], excess: float) -> None:
    assert worst_excess(arrivals, rate=10, burst=2) == pytest.approx(excess)


def test_the_accuracy_of_quotas() -> None:
    exact = [index * 3.0 + 1 for index in range(22)]
    late = [moment + (1.2 if moment > 60 else 0.0) for moment in exact]  # the last one in the window
    found = accuracy([exact, late], rate=1 / 3, burst=2, begin=3.0, end=63.0)
    assert found.served == pytest.approx(40 / 60)
    assert found.beyond == 1
    assert found.worst == pytest.approx(57 / 58.2 - 1)
    assert found.off == pytest.approx(0)
    # the message after the late one comes 1.2 s early, beside the burst
    assert found.excess == pytest.approx(-1)
    assert accuracy([[4.0]], 1 / 3, 2, 3.0, 63.0).worst == -1


def test_a_quota_that_stops_within_the_window_is_beyond() -> None:
    # its intervals are exact, but ten messages are missing
    found = accuracy([[index * 3.0 + 1 for index in range(11)]], rate=1 / 3, burst=2, begin=0.0, end=63.0)
    assert found.beyond == 1
    assert found.worst == pytest.approx(0)
    assert found.off == pytest.approx(-10)


def test_rates_add_up() -> None:
    rates = list(rates_of(100, 5000).values())
    assert (min(rates), max(rates)) == (1.0, 500.0)
    assert sum(rates) == pytest.approx(5000, rel=0.02)


def test_an_in_flight_message_reports_the_time_of_its_claim() -> None:
    entry = bytes.fromhex("3ff000000000000040000000000000004008000000000000003ff0000000000000")
    assert read_held(entry + "größe".encode()) == (2.0, (3, "größe"))


def test_a_series_of_one_has_no_range() -> None:
    assert [str(Series(row)) for row in ([], [2.0], [1.0, 3.0])] == ["-", "2", "2 (1-3)"]


def test_a_report_as_rest() -> None:
    report = Report("name", ["lower is better"], ["what", "ms"])
    report.row("short", 1)
    report.row("a longer one", 22)
    rule = "============  =="
    assert report.rst().splitlines() == [
        rule,
        "what          ms",
        rule,
        "short         1",
        "a longer one  22",
        rule,
        "",
        "Lower is better.",
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    commands = {
        who: {"consume commands": rate, "consume": {"EVALSHA": 3}}
        for who, rate in (("stock", 9.0), ("dq", 0.5))
    }
    buffering = {who: {"rate": [rate]} for who, rate in (("stock", 1.0), ("dq", 2.0), ("buffered", 30.0))}
    for name, data in (("claims", CLAIMS), ("commands", commands), ("buffering", buffering)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_ratios_are_those_of_rounds(results: Path) -> None:
    rows = {row[0]: row[1:] for row in summary(results).rows}
    assert rows["claim + ack, 10 tenants, messages/s"] == [
        "105 (100-110)",
        "2,000 (2,000-2,000)",
        "19.1 (18.2-20)x",
        "claims",
    ]
    assert rows["dwell p99, 10 tenants, ms (less is better)"][2] == "0.4 (0.4-0.4)x"
    assert rows["consume commands per message (less is better)"][2] == "0.0556x"
    assert rows["``apply_async``, buffered on disk, to the broker/s"][2] == "30x"
    # A quantity without a measurement has no row.
    assert not [what for what in rows if "latency" in what or "trips" in what]


def test_the_curve_is_reported_when_both_ends_are_there() -> None:
    assert curve(CLAIMS) == "60,000 tenants against 10: rate 0.5 (0.5-0.5)x, Redis CPU per message 1.2x"
    assert curve({"10": CLAIMS["10"]}) == ""


def test_the_readme_and_the_guide_show_the_results(results: Path, tmp_path: Path) -> None:
    readme, guide, figures = tmp_path / "README.rst", tmp_path / "guide.rst", tmp_path / "figures"
    for file in (readme, guide):
        file.write_text("Title\n\n.. ratios-start\n\nold\n\n.. ratios-end\n\nrest\n")
    write_figures(results, readme, guide, figures)
    written = [readme.read_text(), guide.read_text()]
    for text in written:
        assert text.startswith("Title\n\n.. ratios-start\n\n====")
        assert text.endswith(
            "took turns; a ratio compares two rounds of one turn.\n\n.. ratios-end\n\nrest\n"
        )
        assert "60,000 tenants" in text
        assert " 100 tenants" not in text
    # The README has headlines only.
    assert ["consume commands" in text for text in written] == [False, True]
    assert (figures / "tenants.png").read_bytes().startswith(b"\x89PNG")
    write_figures(results, readme, guide, figures)
    assert [readme.read_text(), guide.read_text()] == written


def test_the_guide_shows_the_tables_of_benchmarks(tmp_path: Path) -> None:
    readme, guide = tmp_path / "README.rst", tmp_path / "guide.rst"
    blocks = ".. quotas-start\n\nold\n\n.. quotas-end\n\n.. peers-start\n\n.. peers-end\n"
    for file in (readme, guide):
        file.write_text(f".. ratios-start\n\n.. ratios-end\n\n{blocks}rest\n")
    (tmp_path / "quotas.json").write_text("{}")
    (tmp_path / "quotas.rst").write_text("====\nnew\n====\n")
    write_figures(tmp_path, readme, guide, tmp_path / "figures")
    assert guide.read_text().endswith(
        ".. quotas-start\n\n====\nnew\n====\n\n.. quotas-end\n\n.. peers-start\n\n.. peers-end\nrest\n"
    )


def test_ratios_stay_until_they_are_measured_again(results: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.rst"
    readme.write_text(".. ratios-start\n\n.. ratios-end\n")
    write_figures(results, readme, readme, tmp_path / "figures")
    before = marked(readme.read_text())["ratios"]
    (results / "claims.json").unlink()
    (results / "commands.json").write_text(
        json.dumps({"stock": {"publish trips": 2.0}, "dq": {"publish trips": 1.0}})
    )
    write_figures(results, readme, readme, tmp_path / "figures")
    after = marked(readme.read_text())["ratios"]
    assert set(before.splitlines()) < set(after.splitlines())
    assert "publish trips per message" in after


def test_every_benchmark_is_in_the_guide() -> None:
    guide = GUIDE.read_text()
    assert [name for name in BENCHMARKS if f"``{name}``" not in guide] == []
    assert set(marked(guide)) - {"ratios"} <= set(BENCHMARKS)


def test_a_part_of_a_benchmark() -> None:
    cases = ("10/s, 1 worker", "10/s, 4 workers", "1,000/s, 1 worker")
    assert chosen(cases, "") == list(cases)
    assert chosen(cases, "10/s") == list(cases[:2])
    with pytest.raises(ValueError, match=r"no case contains '5/s': choose from 10/s, 1 worker; "):
        chosen(cases, "5/s")


@pytest.mark.parametrize("names", [[], ["memory"], ["trickle", "memory"]])
def test_only_some_benchmarks_have_parts(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*names, "--only", "10/s"])
    assert "--only measures a part of claims, trickle, many_queues, many_quotas" in capsys.readouterr().err


def test_the_files_of_a_part_have_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def trickled(quick: bool, only: str = "") -> Report:
        seen.append((quick, only))
        return Report("trickle", header=["msgs/s"])

    monkeypatch.setitem(BENCHMARKS, "trickle", trickled)
    main(["trickle", "--only", "10/s", "--out", str(tmp_path)])
    assert seen == [(False, "10/s")]
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["trickle-part-10-s.json", "trickle-part-10-s.rst"]


def test_an_unknown_case_is_an_error_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["trickle", "--only", "3 workers", "--out", str(tmp_path)])
    assert "error: --only '3 workers': no case contains '3 workers': choose from" in capsys.readouterr().err


def test_the_rows_of_a_part_replace_those_of_its_cases(tmp_path: Path) -> None:
    def table(note: str, *rows: tuple[str, str, str, int]) -> str:
        report = Report("trickle", [note], ["msgs/s", "workers", "broker", "ms"])
        for row in rows:
            report.row(*row)
        return report.rst()

    guide, old = tmp_path / "guide.rst", table("old", ("10", "1", "dq", 1), ("10", "4", "dq", 2))
    guide.write_text(f".. ratios-start\n\n.. ratios-end\n\n.. trickle-start\n\n{old}\n.. trickle-end\n")
    (tmp_path / "trickle-part-4-workers.json").write_text("{}")
    (tmp_path / "trickle-part-4-workers.rst").write_text(
        table("new", ("10", "4", "dq", 3), ("500", "4", "dq", 4))
    )
    expected = table("new", ("10", "1", "dq", 1), ("10", "4", "dq", 3), ("500", "4", "dq", 4))
    for _ in range(2):
        write_figures(tmp_path, guide, guide, tmp_path / "figures")
        assert marked(guide.read_text())["trickle"].strip() == expected.strip()


def test_many_queues_are_measured_beside_one() -> None:
    assert list(contenders(QUEUES, "3000").values()) == [(1, "dq"), (3000, "dq")]
    assert list(contenders(QUEUES, "100 ")) == [
        "1 queues, stock",
        "1 queues, dq",
        "100 queues, stock",
        "100 queues, dq",
    ]


def test_each_benchmark_in_parts_has_names_of_rows() -> None:
    assert {name for name, run in BENCHMARKS.items() if "only" in signature(run).parameters} == set(PARTS)


def test_the_table_of_the_readme_has_every_headline() -> None:
    readme = (Path(__file__).parents[2] / "README.rst").read_text()
    assert [what for what in HEADLINES if f"\n{what}  " not in readme] == []


def test_an_empty_folder_leaves_the_readme_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.rst"
    readme.write_text(".. ratios-start\n\nold\n\n.. ratios-end\n")
    with pytest.raises(ValueError, match="no results"):
        write_figures(tmp_path, readme, readme, tmp_path)
    assert "old" in readme.read_text()


def test_each_peer_has_its_promises_and_can_be_installed() -> None:
    assert set(PROMISES) == {*CELERY, *PEER_APPS}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    peers = [each.replace("-", "_") for each in project["dependency-groups"]["peers"]]
    assert [name for name in PEER_APPS if not any(each.startswith(name) for each in peers)] == []


def test_waits_are_counted_until_no_more_come() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reports,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as task,
    ):
        reports.bind(("127.0.0.1", 0))
        for wait in (0.1, 0.2, 0.3):
            task.sendto(WAIT.pack(wait), reports.getsockname())
        assert list(waits(reports, 2)) == [0.1, 0.2]
        reports.settimeout(0.01)
        assert list(waits(reports, 2)) == [0.3]


def test_the_guide_shows_the_table_of_the_model() -> None:
    guide = Path(__file__).parents[2] / "docs/guides/a-million-messages.rst"
    shown = guide.read_text().partition(".. fleet-start\n")[2].partition(".. fleet-end\n")[0]
    # after a change: `python -m benchmarks fleet`, and its table from benchmarks/out/fleet.rst
    assert shown.strip() == fleet(False).rst().strip()


def test_a_fleet_grows_with_its_messages() -> None:
    plan = PLANS[1]
    size, double = size_of(plan), size_of(plan._replace(messages_per_s=2 * plan.messages_per_s))
    cores, workers = "Redis, cores busy with messages", "worker main processes"
    assert double[cores] == pytest.approx(2 * size[cores])
    assert double[workers] == pytest.approx(2 * size[workers], abs=1)
    assert double["heartbeats/s"] == size["heartbeats/s"] == 60_000 * 4 / 15
    # each connection has two ends
    ends = size["masters"] * (size["connections of a master"] - size["publishing processes"])
    assert ends == pytest.approx(size[workers] * size["connections of a worker"])


def test_a_fleet_needs_a_partition_for_each_worker() -> None:
    with pytest.raises(ValueError, match="512 partitions cannot keep 467 masters, 1150 workers busy"):
        size_of(Plan("few", 1_000_000, 60_000, 512))


def test_choices_fall_on_distinct_boxes() -> None:
    assert [distinct(choices, 4) for choices in (0, 1, 2)] == [0, 1, 1.75]
    assert distinct(1000, 4) == pytest.approx(4)
