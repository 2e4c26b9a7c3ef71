"""Every ``celery dq`` command with frequent mistakes: an error with a remedy, and a status other than 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery
from click.testing import Result

import celery_dq
from celery_dq.cli import dq
from celery_dq.testing.processes import dead_port
from tests.dq_command import run_dq
from tests.preloaded import run_python

Run = Callable[..., Result]
MakeApp = Callable[[str], Any]


def invoke(app: Any, words: Sequence[str]) -> Result:
    return run_dq(app, *words, status=None, answer="")


@pytest.fixture(scope="module")
def make_app() -> Iterator[MakeApp]:
    made = []

    def make_app(broker: str) -> Any:
        app = Celery("shop", broker=broker, set_as_current=False)
        app.conf.update(task_publish_retry_policy={"max_retries": 0}, dq_buffer_folder="")
        celery_dq.setup(app)
        made.append(app)
        return app

    yield make_app
    for app in made:
        app.close()


#: Wrong command lines for a queue "push" with waiting tasks of "acme", and a part of the error text.
MISTAKES: list[tuple[str, str]] = [
    ("queues pusj", "There is no queue 'pusj'. Did you mean 'push'?"),
    ("queues push EMPTY", "There is no queue ''. Known queues: 'push'."),
    ("partitions pusj", "Did you mean 'push'?"),
    ("partitions push --set 0", "1<=x<=4096"),
    ("partitions push --set 2 --timeout -1", "is not in the range"),
    ("partitions --set 2", "--set needs a QUEUE"),
    ("tenants pusj", "Did you mean 'push'?"),
    ("top --interval 0", "0.1<=x<=3600"),
    ("top", "needs a terminal"),
    ("doctor --watch --interval 0", "x>=0.1"),
    ("queues push --forget", "is in use"),
    ("queues --forget", "needs NAMES"),
    ("peek push/1", "'push' has no partition 1"),
    ("tenants push --limit 0", "1<=x<=1000000"),
    ("tenants push --limit -1", "1<=x<=1000000"),
    ("tenants push --limit many", "not a valid integer"),
    ("peek pusj", "Did you mean 'push'?"),
    ("peek push --limit -1", "1<=x<=1000000"),
    ("peek push --limit 0", "1<=x<=1000000"),
    ("peek push --limit 99999999999999999999999", "1<=x<=1000000"),
    ("peek push --tenant acmee", "Did you mean 'acme'?"),
    ("peek push --tenant \x01", "control characters"),
    ("peek push --tenant acme --delayed", "cannot be listed by tenant"),
    ("peek \udcff", "There is no queue"),
    ("find nonsense", "in no queue"),
    ("find EMPTY", "give a text, not empty"),
    ("find \udcff", "not valid Unicode"),
    ("explain nonsense", "was never published"),
    ("explain EMPTY", "give a text, not empty"),
    ("explain", "Give either a TASK_ID, or --tenant"),
    ("explain --queue push", "Give either a TASK_ID, or --tenant"),
    ("explain --tenant acme", "--tenant needs --queue"),
    ("explain --tenant acmee --queue push", "Did you mean 'acme'?"),
    ("explain --tenant acme --queue pusj", "Did you mean 'push'?"),
    ("explain x --tenant acme --queue push", "Give either a TASK_ID, or --tenant"),
    ("cancel push", "exactly one of"),
    ("cancel pusj x", "Did you mean 'push'?"),
    ("cancel push nonsense", "--in-advance"),
    ("cancel push known nonsense", "nonsense: unknown"),
    ("cancel push EMPTY", "give a text, not empty"),
    ("cancel push --tenant acmee", "Did you mean 'acme'?"),
    ("cancel push --task-name notifi", "Did you mean 'notify'?"),
    ("cancel push --tenant acme --in-advance", "needs TASK_IDS"),
    ("reschedule nonsense --countdown 5", "it is in no queue"),
    ("reschedule known", "either --eta or --countdown"),
    ("reschedule known --eta soon", "'soon' is not a time"),
    ("reschedule known --countdown -5", "not a duration"),
    ("reprioritise nonsense 5", "it is in no queue"),
    ("edit nonsense --args []", "it is in no queue"),
    ("edit known --args 7", "give a list"),
    ("edit known --kwargs {", "is not JSON"),
    ("edit known", "Name --args, --kwargs or both"),
    ("reprioritise known 10", "0<=x<=9"),
    ("reprioritise known high", "not a valid integer"),
    ("move push pushh --task-id x", "--create makes the queue"),
    ("move push push --task-id x", "is the source itself"),
    ("move push EMPTY --task-id x", "There is no queue ''"),
    ("move push EMPTY --task-id x --create", "give a text, not empty"),
    ("move push new", "--create"),
    ("move push new --create", "exactly one of"),
    ("move push new --create --task-id nonsense", "No message of task nonsense waits"),
    ("move push new --create --tenant acmee", "Did you mean 'acme'?"),
    ("migrate", "Missing argument 'SOURCE'"),
    ("migrate amqp://127.0.0.1:1", "A migration leads from"),
    ("migrate redis://127.0.0.1:1 --yes", "cannot be reached"),
    ("migrate redis://127.0.0.1:1 redis://127.0.0.1:1", "A migration leads from"),
    ("migrate dq-redis://127.0.0.1:1 redis://127.0.0.1:1 --yes", "cannot be reached"),
    ("migrate dq-redis://127.0.0.1:1", "A migration leads from"),
    ("migrate redis://127.0.0.1:1 --stock-options nonsense", "is not JSON"),
    ("migrate redis://127.0.0.1:1 --stock-options []", "is not a JSON object"),
    ("migrate redis://127.0.0.1:1 --priorities up", "is not one of"),
    ("purge pusj --yes", "Did you mean 'push'?"),
    ("purge push", "--yes makes the change without a question"),
    ("quotas list push", "'celery dq quotas get QUEUE' lists"),
    ("quotas get pusj", "Did you mean 'push'?"),
    ("quotas get push \x01", "control characters"),
    ("quotas get push acmee", "Did you mean 'acme'? The default would apply to it: "),
    ("quotas set push", "at least one"),
    ("quotas set pusj acme --rate 5", "Did you mean 'push'?"),
    ("quotas set push acme --rate fast", "from 0.000001 to 100000 per second"),
    ("quotas set push acme --rate 0", "celery dq pause push --tenant acme', or --paused"),
    ("quotas set push acme --rate 0/s", "celery dq pause push --tenant acme', or --paused"),
    ("quotas set push acme --rate -5", "--rate -5: give a rate above 0"),
    ("quotas set push acme --rate nan", "is not a rate"),
    ("quotas set push acme --rate 1e9", "from 0.000001 to 100000"),
    ("quotas set push acme --rate 50/w", "'50/s'"),
    ("quotas set push acme --rate EMPTY", "is not a rate"),
    ("quotas set push acme --burst 0", "from 1 to 1000000"),
    ("quotas set push acme --burst nan", "from 1 to 1000000"),
    ("quotas set push acme --burst lots", "not a valid float"),
    ("quotas set push acme --burst 10", "burst = 10 has no effect without a rate: set a rate, too"),
    ("quotas set push --burst 10", "burst = 10 has no effect without a rate: set a rate, too"),
    ("quotas set push acme --burst 10 --rate unlimited", "burst = 10 has no effect without a rate"),
    ("quotas set push acme --weight 0", "from 0.001 to 1000"),
    ("quotas set push acme --weight 1e300", "from 0.001 to 1000"),
    ("quotas set push acme --concurrency 0", "from 1 to 1000000"),
    ("quotas set push acme --concurrency -1", "from 1 to 1000000"),
    ("quotas set push acme --concurrency 1.5", "whole number from 1 to 1000000"),
    ("quotas set push acme --concurrency 9999999999", "from 1 to 1000000"),
    ("quotas set push acme --max-waiting 0", "from 1 to 1000000000"),
    ("quotas set push acme --max-waiting -1", "from 1 to 1000000000"),
    ("quotas set push acme --max-waiting 1.5", "whole number from 1 to 1000000000, or 'unlimited'."),
    ("quotas set push acme --max-waiting 1e9", "whole number from 1 to 1000000000, or 'unlimited'."),
    ("quotas set push acme --max-waiting 9999999999", "from 1 to 1000000000"),
    ("quotas set push acme --when-full drop", "'refuse', 'wait', 'discard', 'dead_letter'"),
    ("quotas set push acme --when-full wait", "has no effect without max_waiting: set max_waiting, too"),
    ("quotas set push --when-full wait", "has no effect without max_waiting: set max_waiting, too"),
    ("quotas rm push acmee", "no quota of its own"),
    ("quotas rm push", "No default is set live in 'push'; in force: rate=unlimited"),
    ("quotas rm pusj", "Did you mean 'push'?"),
    ("pause", "Missing argument"),
    ("pause pusj", "Did you mean 'push'?"),
    ("pause push --tenant acmee", "Did you mean 'acme'?"),
    ("pause push --tenant absent", "--in-advance"),
    ("pause push --until tomorrow", "'tomorrow' is not a time such as"),
    ("pause push --until 1999-12-31T23:00Z", "is over by the clock of the server; give a later one"),
    ("pause push --for soon", "'soon' is not a duration"),
    ("pause push --for 0", "needs a longer time"),
    ("pause push --for 1h --until 2100-01-01", "not both"),
    ("resume pusj", "Did you mean 'push'?"),
    ("resume push", "Queue 'push' is not paused."),
    ("resume push --tenant acmee", "Did you mean 'acme'?"),
    ("resume push --tenant acme", "is not paused"),
    ("quotas apply pushh", "Did you mean 'push'?"),
    ("quotas export pusj", "Did you mean 'push'?"),
    ("quotas export push --output /nowhere/q.json", "No such file"),
    ("quotas import /nowhere/q.json", "does not exist"),
    ("quotas import -", "needs --yes or --dry-run"),
    ("quotas import - --yes", "is not JSON: Expecting value: line 1 column 1"),
    ("quotas copy push", "Give --to, --to-environment, or both."),
    (
        "quotas copy push --to sandbox",
        "no queue 'sandbox'. For the environment, give --to-environment sandbox",
    ),
    ("quotas copy push --to-environment onlyne", "'onlyne' is not one of"),
    ("quotas copy push --to-environment online", "is the source itself"),
    ("quotas copy pusj --to push", "Did you mean 'push'?"),
    ("quotas copy push --to pusj", "Did you mean 'push'?"),
    ("quotas copy push --to push", "is the source itself"),
    ("dead list pusj", "Did you mean 'push'?"),
    ("dead list push --limit 0", "1<=x<=1000000"),
    ("dead show push nonsense", "no dead letter 'nonsense'"),
    ("dead show pusj x", "Did you mean 'push'?"),
    ("dead edit push nonsense --priority 1", "no dead letter 'nonsense'"),
    ("dead edit pusj x --priority 1", "Did you mean 'push'?"),
    ("dead replay push", "either a MESSAGE_ID"),
    ("dead replay push nonsense", "no dead letter 'nonsense'"),
    ("dead replay push EMPTY", "give a text, not empty"),
    ("dead replay push x --all", "either a MESSAGE_ID"),
    ("dead replay pusj --all", "Did you mean 'push'?"),
    ("dead purge push nonsense", "no dead letter 'nonsense'"),
    ("dead recover pusj --yes", "Did you mean 'push'?"),
    ("dead purge pusj --all", "Did you mean 'push'?"),
    ("audit --queue pusj", "Did you mean 'push'?"),
    ("audit --since never", "'never' is not a time such as"),
    ("audit --limit 0", "1<=x<=1000000"),
    ("leaders pusj", "'pusj' never had a leader."),
    ("leaders EMPTY", "give a text, not empty"),
    ("workers w1", "unexpected extra argument"),
    ("dedup list pusj", "Did you mean 'push'?"),
    ("dedup list push --limit 0", "1<=x<=1000000"),
    ("dedup release push nonsense", "No task holds the dedup lock 'nonsense'"),
    ("dedup release push EMPTY", "give a text, not empty"),
    ("dedup verdicts pusj", "Did you mean 'push'?"),
    ("dedup repetition push", "Missing option"),
    ("dedup repetition push --consumers 0", "1<=x<=1000000"),
    ("dedup repetition push --consumers 1 --sample 0", "1<=x<=1000000"),
    ("dedup repetition push --consumers 1 --plot x.nonsense", "--plot"),
    ("dedup repetition push --consumers 1 --plot /nowhere/x.png", "/nowhere"),
    ("spill", "dq_buffer_folder is not set"),
    ("spill quarantine show", "Missing argument"),
    ("spill quarantine replay", "either NAMES or --all"),
    ("spill quarantine rm x --all", "either NAMES or --all"),
    ("spill replay --timeout -1", "x>=0"),
    ("spill replay", "dq_buffer_folder is not set"),
    ("zookeeper 127.0.0.1:1 /mail --timeout 0.1", "127.0.0.1:1"),
    ("zookeeper 127.0.0.1:1 mail", "PATH"),
    ("zookeeper EMPTY /mail", "names no ZooKeeper"),
    ("zookeeper :::: /mail", "HOSTS"),
    ("zookeeper localhost:port /mail", "HOSTS"),
    ("zookeeper 127.0.0.1:1 /mail --timeout 0", "x>0"),
    ("zookeeper 127.0.0.1:1 /mail --limit 0", "1<=x<=1000000"),
    ("zookeeper 127.0.0.1:1 /mail --kind heap", "is not one of"),
    ("zookeeper 127.0.0.1:1 /mail --locks locks", "--locks"),
    ("alive", "give FILE, or set dq_probe_file"),
    ("alive /nowhere/probe", "there is no file /nowhere/probe"),
    ("alive /nowhere/probe --within 0", "x>0"),
    ("ready", "give FILE, or set dq_probe_file"),
    ("ready /dev/null", "cannot be read"),
    ("status push", "unexpected extra argument"),
    ("exporter --port 70000", "0<=x<=65535"),
    ("web --port 99999", "0<=x<=65535"),
    ("web --host 0.0.0.0", "give --auth FILE"),
    ("web --auth /nowhere/passwords", "the file cannot be read"),
    ("nonsense", "No such command"),
]


@pytest.fixture
def busy(shop: Any) -> Any:
    """An app with two waiting tasks of one tenant. The id of the first is "known"."""
    shop.conf.update(task_publish_retry_policy={"max_retries": 0})
    shop.tasks["notify"].apply_async(("acme",), task_id="known")
    shop.tasks["notify"].delay("acme")
    return shop


@pytest.mark.parametrize("command", sorted({line.split(" ")[0] for line, _ in MISTAKES}))
def test_a_mistake_is_a_sentence_and_not_status_0(busy: Any, command: str) -> None:
    for line, words in MISTAKES:
        if line.split(" ")[0] == command:
            result = invoke(busy, ["" if word == "EMPTY" else word for word in line.split(" ")])
            assert (result.exit_code != 0, words in result.output) == (True, True), (line, result.output)


def every_command(
    group: click.Group = dq, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name), command


def test_the_mistakes_reach_every_command() -> None:
    tried = {tuple(line.split(" ")[:size]) for line, _ in MISTAKES for size in (1, 2, 3)}
    untried = [("spill", "list"), ("spill", "quarantine", "list")]
    assert [path for path, _ in every_command() if path not in tried] == untried


#: Valid values for the arguments of each command, to test it on a wrong broker.
GIVEN = {"queue": "push", "tenant": "acme", "task_id": "x", "task_ids": "x", "to": "other", "names": "push"}
GIVEN |= {"message_id": "x", "key": "k", "hosts": "127.0.0.1:1", "path": "/mail", "queues": "push"}
GIVEN |= {"file": "/dev/null", "priority": "5", "name": "x.bad"}
GIVEN |= {"source": "redis://127.0.0.1:1", "target": "dq-redis://127.0.0.1:1"}
OPTIONS = {("quotas", "set"): ["--rate", "5"], ("move",): ["--task-id", "x"], ("purge",): ["--yes"]}
OPTIONS |= {("quotas", "import"): ["--yes"], ("quotas", "copy"): ["--to", "other"]}
OPTIONS |= {("reschedule",): ["--countdown", "5"]}
OPTIONS |= {("dead", "edit"): ["--priority", "1"], ("edit",): ["--args", "[]"]}
# The dashboard and the exporter serve without their broker. Here a refusal ends the commands.
OPTIONS |= {("web",): ["--host", "0.0.0.0"], ("exporter",): ["--port", "70000"]}
OPTIONS |= {("dedup", "repetition"): ["--consumers", "1"], ("zookeeper",): ["--timeout", "0.1"]}


@pytest.mark.parametrize("scheme", ["dq-redis", "redis", "amqp", "memory", "dq-zookeeper", "dq_redis", "foo"])
def test_a_broker_that_is_away_or_of_another_kind(make_app: MakeApp, scheme: str) -> None:
    with dead_port() as port:
        app = make_app(f"{scheme}://127.0.0.1:{port}/0")
        for path, command in every_command():
            arguments = [GIVEN[each.name] for each in command.params if isinstance(each, click.Argument)]
            result = invoke(app, [*path, *arguments, *OPTIONS.get(path, ())])
            assert len(result.output) > 20, path
            # A coordinator keeps the dedup locks of other brokers; the buffer and the doctor need no broker.
            assert result.exit_code != 0 or path[0] in ("spill", "doctor", "dedup"), (path, result.output)


def test_a_database_that_does_not_exist(make_app: MakeApp, broker_url: str) -> None:
    app = make_app(f"{broker_url.rpartition('/')[0]}/99")
    result = invoke(app, ["queues"])
    assert (result.exit_code, "from 0 to 15" in result.output) == (1, True), result.output


def test_a_correct_command_succeeds(busy: Any) -> None:
    assert "rate=5/s" in invoke(busy, ["quotas", "set", "push", "acme", "--rate", "5"]).output
    assert "burst=10" in invoke(busy, ["quotas", "set", "push", "acme", "--burst", "10"]).output
    assert "burst=3" in invoke(busy, ["quotas", "set", "push", "--rate", "5", "--burst", "3"]).output
    assert (
        "burst=1"
        in invoke(busy, ["quotas", "set", "push", "x", "--rate", "unlimited", "--burst", "1"]).output
    )
    assert invoke(busy, ["quotas", "rm", "push"]).exit_code == 0
    for word in ("none", "None", "UNLIMITED"):
        given = invoke(busy, ["quotas", "set", "push", "", "--rate", word, "--concurrency", word])
        assert "rate=unlimited burst=1 weight=1 concurrency=unlimited" in given.output
    assert '\n"": rate=unlimited' in invoke(busy, ["quotas", "get", "push"]).output
    early = invoke(busy, ["quotas", "set", "push", "newcomer", "--rate", "0.5"])
    assert (early.exit_code, "'newcomer' has no message" in early.output) == (0, True)
    assert invoke(busy, ["pause", "push", "--tenant", "later", "--in-advance"]).exit_code == 0
    cancelled = invoke(busy, ["cancel", "push", "known", "not-yet", "--in-advance", "--json"])
    assert json.loads(cancelled.stdout) == {"known": "waiting", "not-yet": "tombstone"}
    busy.tasks["notify"].apply_async(("acme",), task_id="not-yet")
    assert busy.dq.queues["push"].find("not-yet").state == "discarded"
    assert "within 3h" in invoke(busy, ["cancel", "push", "other-id", "--in-advance"]).output


@pytest.mark.parametrize("words", ["worker -P solo", "inspect ping", "call shop.add"])
def test_the_celery_command_explains_a_misspelt_scheme_to_an_app_without_setup(
    tmp_path: Path, words: str
) -> None:
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\napp = Celery(broker='dq_redis://localhost/0')\n"
    )
    done = run_python("-m", "celery", "-A", "shop", *words.split(), folder=tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("a URL's scheme cannot hold an underscore; did you mean dq-redis://?")
