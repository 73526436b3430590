"""The ledger, the footprints and the verdict of a chaos run: each finds what it is there for."""

import asyncio
import re
import secrets
import signal
import socket
import sys
from dataclasses import replace

import pytest

from jax_agent_rl.errors import LaunchError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import DropReason, SamplingParams
from tests.chaos.faults import Child
from tests.chaos.invariants import Ledger, WatchedAccounting, WatchedClient
from tests.chaos.leaks import MARK, Leaks, ResourceUsage, find_leaks, growth, marked
from tests.chaos.run import ChaosResult, failures
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises
from tests.ports import free_port

LISTENER = """
import socket, sys, time
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
time.sleep(60)
"""
GOOD = ChaosResult(
    seconds=10.0,
    trained_per_second=1.0,
    stop_seconds=0.1,
    findings={"lost": 0, "duplicated": 0, "inexact": 0, "stale_served": 0, "unbalanced_steps": 0},
    complaints=(),
    faults={},
    requests_spoilt={},
    servers_lost=0,
    max_attempts=1,
    max_tool_attempts=1,
    mean_attempts=1.0,
    trained_after=1,
    crashed="",
    usage=(),
)


def ledger_and_accounting():
    ledger = Ledger(seed=0)
    return ledger, WatchedAccounting(ledger)


def test_every_trajectory_has_the_fate_that_was_booked():
    ledger, accounting = ledger_and_accounting()
    for name in "abcd":
        accounting.start(f"g-{name}")
    accounting.train(["g-a"])
    accounting.drop(["g-b"], DropReason.CANCELLED)
    accounting.drop(["g-c"], DropReason.BACKEND_ERROR)
    ledger.finish_step(accounting)
    summary = ledger.summary()
    assert (summary["started"], summary["trained"], summary["unbalanced_steps"]) == (4, 1, 0)
    assert summary["dropped"] == {"backend_error": 1, "cancelled": 1}
    assert summary["lost"] == 2, "one whose fate is open, and one that an engine's failure cost"


def test_a_trajectory_that_is_started_again_after_its_end_is_a_duplicate():
    ledger, accounting = ledger_and_accounting()
    accounting.start("g-a")
    accounting.train(["g-a"])
    accounting.start("g-a")
    assert ledger.summary()["duplicated"] == 1


@pytest.mark.parametrize(
    "tamper", [lambda a: setattr(a, "trained", 7), lambda a: setattr(a, "started", 7)]
)
def test_accounts_that_do_not_balance_are_found_at_the_step(tamper):
    ledger, accounting = ledger_and_accounting()
    accounting.start("g-a")
    ledger.finish_step(accounting)
    tamper(accounting)
    ledger.finish_step(accounting)
    assert ledger.unbalanced
    assert ledger.steps == 2
    assert ledger.complaints


class Stale(ScriptedBackend):
    """Says it took weights and goes on with the old ones."""

    async def update_weights(self, update):
        old_version = self._version
        await super().update_weights(update)
        self._version = old_version


@pytest.mark.parametrize(("kind", "stale"), [(ScriptedBackend, False), (Stale, True)])
async def test_tokens_of_weights_that_were_replaced_before_their_request_are_found(kind, stale):
    codec = FakeCodec()
    ledger = Ledger(seed=0)
    backend = kind(codec, ["hello there"])
    client = WatchedClient(ledger, servers=[AsyncServer(backend)])
    await client.pool.update_weights(WeightUpdate(version=3, kind="arrays", payload=None))
    await client.generate("a", prompt_ids=(5,), sampling_params=SamplingParams(max_tokens=9))
    assert bool(ledger.stale_served) is stale


def test_a_run_in_which_everything_held_has_no_failures():
    assert failures(GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"findings": {**GOOD.findings, "lost": 2}}, "lost is 2, must be 0"),
        ({"findings": {**GOOD.findings, "stale_served": 1}}, "stale_served is 1"),
        ({"leaks": Leaks(processes=["12: sleep"])}, "left behind: processes .'12: sleep'"),
        ({"leaks": Leaks(ports=[80])}, "left behind: ports .80"),
        ({"leaks": Leaks(tasks=["t"])}, "left behind: tasks"),
        ({"crashed": "OSError: no"}, "ended early: OSError: no"),
        ({"trained_after": 0}, "nothing was trained after the last fault"),
        ({"max_attempts": 21}, "sent 21 times"),
        ({"max_tool_attempts": 5}, "sent 5 times, may be repeated 3 times"),
    ],
)
def test_whatever_did_not_hold_is_named(change, said):
    (failure,) = failures(replace(GOOD, **change))
    assert re.search(said, failure)


def prints(*sizes, descriptors=10, tasks=5):
    return [
        ResourceUsage(rss_bytes=size << 20, descriptors=descriptors, tasks=tasks) for size in sizes
    ]


def test_memory_that_grows_to_the_end_is_found_and_a_warm_up_or_a_peak_is_not():
    # By hand: of 125 … 199, which follow the warm-up, the medians of the first and the last 18 are
    # 133.5 and 190.5.
    rising = prints(*range(100, 200))
    assert failures(replace(GOOD, usage=rising)) == [
        "memory grew by 42.7%, from [133.5, 190.5] MiB"
    ]
    warm = prints(*[50] * 20, *[100] * 40, 900, *[100] * 39)
    assert growth(warm)["rss_growth"] == 0
    assert failures(replace(GOOD, usage=warm)) == []
    assert growth(prints(100, 100)) == {}


def test_descriptors_and_tasks_that_pile_up_are_found():
    rising = [ResourceUsage(rss_bytes=1 << 20, descriptors=10 + n, tasks=5 + n) for n in range(80)]
    assert [failure.split()[0] for failure in failures(replace(GOOD, usage=rising))] == [
        "descriptors",
        "tasks",
    ]


async def test_a_child_is_killed_and_comes_back_at_its_port_and_carries_its_mark(tmp_path):
    mark = secrets.token_hex(8)
    port = free_port()
    command = [sys.executable, "-c", LISTENER, str(port)]
    child = Child("listener", command, port=port, env={MARK: mark}, log=tmp_path / "log")
    try:
        await child.start()
        (first,) = marked(mark)
        await child.kill()
        assert not marked(mark)
        await child.start()
        (second,) = marked(mark)
        assert first != second
        assert child.starts == 2
        child.send(signal.SIGSTOP)
        assert await child.stop(), "stopped processes are woken to end"
    finally:
        await child.kill()
    assert not marked(mark)


async def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path):
    command = [sys.executable, "-c", "import sys; print('no such tool'); sys.exit(3)"]
    child = Child("broken", command, port=1, env={}, log=tmp_path / "log")
    with raises(LaunchError, key="broken", value=(3, "no such tool")):
        async with asyncio.timeout(60):
            await child.start()


async def test_what_a_run_leaves_behind_is_found_and_its_processes_are_killed(tmp_path):
    mark = secrets.token_hex(8)
    running_tasks = asyncio.all_tasks()

    async def find(*ports: int):
        return await find_leaks(mark=mark, ports=ports, folder=tmp_path, tasks_before=running_tasks)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "weights").touch()
        waiting = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        sleeping = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
        environment = {MARK: mark}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *sleeping, env=environment, stdout=pipe, start_new_session=True
        )
        assert process.stdout is not None
        await (
            process.stdout.readline()
        )  # /proc shows no environment yet while a program is being loaded
        leaks = await find(port)
    assert (leaks.ports, leaks.files, leaks.tasks, leaks.count) == (
        [port],
        ["weights"],
        ["forgotten"],
        4,
    )
    assert leaks.processes[0].startswith(f"{process.pid}: ")
    assert await process.wait() == -signal.SIGKILL
    waiting.cancel()
    (tmp_path / "weights").unlink()
    assert (await find()).count == 0  # not the port: somebody else may have it by now
