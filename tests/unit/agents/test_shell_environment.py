"""The environment ``shell``: commands in a sandbox, its tests, its snapshots, its setup."""

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from jax_agent_rl.agents import EnvironmentAgent
from jax_agent_rl.agents.command import shell as shell_module
from jax_agent_rl.agents.command.workspace import (
    WorkspaceLimits,
    file_entries,
    pack_tree,
    read_tree,
)
from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.strategies import TreeGrpo
from jax_agent_rl.config.rollout import TreeGrpoConfig
from jax_agent_rl.config.task import EnvironmentsConfig
from jax_agent_rl.environments import EnvironmentPools, LeasedEnvironment, get_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.tool_server.sandbox import Sandbox, open_sandbox
from jax_agent_rl.types import FinishReason, SamplingParams
from tests.agent_testbed import AgentHarness
from tests.capabilities import needs_bwrap
from tests.fakes import FakeCodec
from tests.messages import raises

CHECK = {"check.py": "assert open('/app/answer.txt').read() == '42\\n'"}
TASK = {"files": {"half.txt": "21"}, "tests": CHECK, "verifier": "python3 /tests/check.py"}


def bash(command: str) -> Reply:
    return Reply(f"Now:\n```bash\n{command}\n```\n")


async def shown(environment: LeasedEnvironment, command: str) -> str:
    observation = await environment.step(bash(command))
    return observation.messages[0]["content"]


@pytest.fixture
async def pools():
    pools = EnvironmentPools(timeout=60.0)
    yield pools
    await pools.close()


@needs_bwrap
async def test_commands_change_the_folder_and_tests_score_it(pools):
    async with pools.pool("shell").lease(TASK) as shell:
        assert (await shell.reset(**TASK)).messages == ()
        assert await shown(shell, "cat half.txt") == "21"
        assert await shown(shell, "cd /; export A=1; echo $A") == "1\n"
        assert await shown(shell, "cd /app; ls; echo $A") == "half.txt\n\n"
        assert await shown(shell, "echo 42 > answer.txt") == "(no output)"
        failed = await shown(shell, "ls; exit 3")
        assert failed == "answer.txt\nhalf.txt\n(exit status 3)"
        end = await shell.step(Reply("It is done."))
        assert end.done
        assert (await shell.conclude((), FinishReason.ENVIRONMENT_DONE))["score"] == 1.0


@needs_bwrap
async def test_a_command_that_takes_too_long_is_stopped_and_the_shell_goes_on(pools):
    async with pools.pool("shell").lease(TASK) as shell:
        await shell.reset(**TASK, command_seconds=4.0)
        assert "took too long" in await shown(shell, "echo 1 > early.txt; sleep 60")
        assert await shown(shell, "ls") == "early.txt\nhalf.txt\n"
        assert (await shell.conclude((), FinishReason.RESPONSE_LENGTH))["score"] == 0.0


@needs_bwrap
async def test_what_a_folder_cannot_keep_is_told_and_a_snapshot_is_without_it(pools):
    async with pools.pool("shell").lease(TASK) as shell:
        await shell.reset(**TASK)
        binds = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
        told = await shown(shell, f'mkfifo pipe; ln -s /etc out; python3 -c "{binds}"')
        assert "not kept" in told
        for name in ("pipe", "out", "socket"):
            assert name in told
        await shell.restore(await shell.snapshot())
        assert await shown(shell, "ls") == "half.txt\n"


@needs_bwrap
async def test_a_sparse_file_counts_with_its_whole_size(pools):
    async with pools.pool("shell").lease(TASK) as shell:
        await shell.reset(**TASK)
        assert "too large" in await shown(shell, "truncate -s 20M sparse")
        assert await shown(shell, "ls; truncate -s 1M sparse") == "half.txt\n"
        await shell.restore(await shell.snapshot())
        assert await shown(shell, "stat -c %s sparse") == f"{1 << 20}\n"


@needs_bwrap
async def test_more_files_than_a_folder_may_hold_are_refused_before_anything_runs(pools):
    files = {f"{number}.txt": "" for number in range(10_000)}
    with raises(EnvironmentFailedError, value="10000 entries", fix="workspace_entries"):
        async with pools.pool("shell").lease({"files": files}):
            pass


@needs_bwrap
async def test_the_setup_completes_the_folder_once_for_all_its_shells():
    row = {**TASK, "setup": "echo prepared > by_setup.txt"}
    pools = EnvironmentPools(timeout=60.0, warm_instances=1)
    for number in range(2):
        async with pools.pool("shell").lease(row) as shell:
            await shell.reset(**row)
            assert await shown(shell, "ls; rm by_setup.txt") == "by_setup.txt\nhalf.txt\n", number
    await pools.close()


@needs_bwrap
async def test_a_setup_that_fails_is_told_with_its_output(pools):
    with raises(EnvironmentFailedError, key="setup", value=("no such package", "exit status 1")):
        async with pools.pool("shell").lease({"setup": "echo no such package; exit 1"}):
            pass


@needs_bwrap
async def test_a_snapshot_brings_another_shell_into_the_same_state(pools):
    pool = pools.pool("shell")
    async with pool.lease(TASK) as parent, pool.lease(TASK) as fork:
        await parent.reset(**TASK)
        await fork.reset(**TASK)
        await shown(
            parent, "mkdir -p a/b; echo 1 > a/b/c; chmod 700 a/b/c; ln -s a/b/c link; rm half.txt"
        )
        snapshot = await parent.snapshot()
        await fork.restore(snapshot)
        assert await fork.snapshot() == snapshot

        listing = "find . -printf '%p %m %s %l\\n' | sort; cat link"
        assert await shown(fork, listing) == await shown(parent, listing)
        await shown(fork, "echo 2 > a/b/c")
        assert await shown(parent, "cat link") == "1\n", "each has a folder of its own"


@needs_bwrap
async def test_shells_share_a_sandbox_while_there_are_any(monkeypatch: pytest.MonkeyPatch):
    sandboxes: list[weakref.ref[Sandbox]] = []
    limits: list[int] = []

    async def watched_open(**settings: Any) -> Sandbox:
        sandbox = await open_sandbox(**settings)
        sandboxes.append(weakref.ref(sandbox))
        limits.append(settings["max_running"])
        return sandbox

    monkeypatch.setattr(shell_module, "open_sandbox", watched_open)
    pools = EnvironmentPools(timeout=60.0)
    async with pools.pool("shell").lease(TASK) as one, pools.pool("shell").lease(TASK) as other:
        await asyncio.gather(one.reset(**TASK), other.reset(**TASK))
        assert len(sandboxes) == 1
    await pools.close()
    del one, other, pools
    gc.collect()
    assert sandboxes[0]() is None
    assert limits[0] >= EnvironmentsConfig().max_instances, "each runs a command at any time"


LIMITS = WorkspaceLimits(max_bytes=4096, max_entries=4)


def tree(*entries: list[Any], contents: bytes = b"") -> bytes:
    return json.dumps(entries).encode() + b"\n" + contents


HOSTILE = {
    "garbage": b"\xff\xfe",
    "no list": b'{"a": 1}\n',
    "nested": b"[" * 5000,
    "no entry": tree(["socket", "a", 1]),
    "out of the folder": tree(["file", "../a", 0o644, 1], contents=b"x"),
    "absolute": tree(["file", "/etc/passwd", 0o644, 1], contents=b"x"),
    "a link out": tree(["link", "a", "/etc/passwd"]),
    "setuid": tree(["file", "a", 0o4755, 1], contents=b"x"),
    "twice": tree(["folder", "a", 0o755], ["folder", "a", 0o755]),
    "in no folder": tree(["file", "a/b", 0o644, 1], contents=b"x"),
    "longer than it is": tree(["file", "a", 0o644, 9], contents=b"x"),
    "more than it says": tree(["file", "a", 0o644, 1], contents=b"xy"),
    "too large": tree(["file", "a", 0o644, 5000], contents=b"x" * 5000),
    "too many": tree(*[["folder", f"f{number}", 0o755] for number in range(5)]),
    "a size below 0": tree(["file", "a", 0o644, -1]),
}


@pytest.mark.parametrize("packed", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_snapshot_that_is_no_working_folder_is_refused(packed: bytes):
    with pytest.raises(ValueError):
        read_tree(packed, LIMITS, "/app")


def test_a_working_folder_comes_back_as_it_was():
    entries = tuple(file_entries({"a/b": b"\0\xff\n", "c": b""}))
    assert read_tree(pack_tree(entries), LIMITS, "/app") == entries


def test_a_shell_can_be_prepared_by_its_files_and_takes_snapshots():
    cls = get_environment("shell")
    assert cls.takes_snapshots
    assert set(cls.prepared_by) == {"task", "files", "setup"}


COMMANDS = [
    "echo {seed} >> log.txt; wc -l < log.txt",
    "cat log.txt",
    "echo 42 > answer.txt",
]


@needs_bwrap
async def test_a_tree_of_forked_shells_is_the_tree_of_replayed_ones():
    codec = FakeCodec()
    row = {
        "prompt": [{"role": "user", "content": "solve it"}],
        "agent_name": "environment_agent",
        "extra_info": {"environment_kwargs": {"name": "shell", **TASK}},
    }

    def say(request):
        turn = int(request.request_id.rpartition("/")[2])
        if turn == len(COMMANDS):
            return codec.reply_ids("done")
        command = COMMANDS[turn].format(seed=request.sampling.seed)
        return codec.reply_ids(f"```bash\n{command}\n```")

    async def no_score(trajectory):
        return trajectory

    groups = []
    for snapshot_mb in (64, 0):
        pools = EnvironmentPools(timeout=60.0, snapshot_mb=snapshot_mb)
        it = AgentHarness(EnvironmentAgent, say, codec=codec, shared={"environments": pools})
        collector = RolloutCollector(
            it.context,
            score=no_score,
            max_in_flight=4,
            seed=0,
            strategy=TreeGrpo(TreeGrpoConfig(m=1, n=3, k=4)),
        )
        (group,) = await collector.collect(
            [row], group_size=4, sampling=SamplingParams(max_tokens=100), step=0
        )
        groups.append(group.trajectories)
        await pools.close()

    forked, replayed = groups
    assert len(forked) == 4
    inherited_turns = [t.fork.turns if t.fork else 0 for t in forked]
    assert sum(inherited_turns)
    assert [t.turns for t in forked] == [t.turns for t in replayed]
    assert [t.messages for t in forked] == [t.messages for t in replayed]
    assert {t.turn_scores[-1] for t in forked} == {1.0}
    restored = [t.metrics.get("restored_turns", 0.0) for t in forked]
    assert restored == [float(turns) for turns in inherited_turns]
