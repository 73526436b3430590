"""The short form of ``benchmarks/tool_server.py``, which runs the same for ten minutes with 256
trajectories.
"""

from pathlib import Path

from jax_agent_rl.utils.plugins import load_user_module
from tests.capabilities import needs_bwrap

pytestmark = needs_bwrap
soak = load_user_module(
    str(Path(__file__).parents[3] / "benchmarks" / "tool_server.py"), key="benchmark"
).soak


async def test_many_hostile_trajectories_leave_nothing_behind():
    report = await soak(seconds=4, trajectories=12, idle_seconds=2)
    assert report.problems == []
    assert report.environments["opened"] > 12
    assert report.environments["lost"] == 0


async def test_nor_do_they_when_workers_die():
    report = await soak(seconds=4, trajectories=8, kill_every=1.5, idle_seconds=2)
    assert report.problems == []
    assert report.environments["lost"] > 0
