"""Trees in environments: with snapshots they are, bit by bit, the trees that replays give."""

from collections import Counter

import pytest

from jax_agent_rl.collect.strategies import Strategy
from jax_agent_rl.environments import Environment, Observation, base
from tests.agent_testbed import assert_forks_are_exact
from tests.fakes import FakeCodec
from tests.unit.collect.test_branching import NAMES, STRATEGIES, Stage

TURNS = 5


class Walk(Environment):
    """Adds up the lengths of the replies; its state is all that it was told."""

    takes_snapshots = True
    calls: Counter[str]

    async def reset(self, *, start: int):
        self.calls["reset"] += 1
        self.replies = [str(start)]
        return Observation.say("walk")

    async def step(self, reply):
        self.calls["step"] += 1
        self.replies.append(reply.content)
        place = sum(map(len, self.replies))
        return Observation.say(
            f"you are at {place}", score=float(place), done=len(self.replies) > TURNS
        )

    async def conclude(self, messages, reason):
        return {"score": len(self.replies)}

    async def snapshot(self):
        self.calls["snapshot"] += 1
        return "\n".join(self.replies).encode()

    async def restore(self, snapshot):
        self.calls["restore"] += 1
        self.replies = snapshot.decode().split("\n")


ROW = {
    "prompt": [{"role": "user", "content": "go"}],
    "agent_name": "environment_agent",
    "extra_info": {"environment_kwargs": {"name": "walk", "start": 3}},
}


async def grow(strategy: Strategy, size: int, monkeypatch, *, codec: FakeCodec, snapshots: bool):
    """Return the trajectories of a group, and the calls of its environments."""
    cls = type("Walk", (Walk,), {"calls": Counter(), "takes_snapshots": snapshots})
    monkeypatch.setattr(base, "ENVIRONMENTS", {**base.ENVIRONMENTS, "walk": cls})

    def say(request):
        turn = request.request_id.rpartition("/")[2]
        words = "step " * (1 + request.sampling.seed % 4)
        return stage.codec.reply_ids(f"{words}{turn} {request.sampling.seed}")

    stage = Stage(strategy, script=say, codec=codec)
    (group,) = await stage.collect(ROW, group_size=size)
    assert_forks_are_exact(group.trajectories, stage.requests)
    assert stage.environments.snapshots.num_bytes == 0, "nothing branches off them any more"
    return group.trajectories, cls.calls


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES, ids=NAMES)
async def test_a_tree_of_snapshots_is_the_tree_of_replays(strategy, size, monkeypatch):
    codec = FakeCodec()  # the same words are the same ids in both runs
    forked, calls = await grow(strategy, size, monkeypatch, codec=codec, snapshots=True)
    replayed, calls_of_replays = await grow(
        strategy, size, monkeypatch, codec=codec, snapshots=False
    )
    assert len(forked) == size
    for one, other in zip(forked, replayed, strict=True):
        assert one.trajectory_id == other.trajectory_id
        assert one.fork == other.fork
        assert one.turns == other.turns
        assert one.prompt_ids == other.prompt_ids
        assert one.response_mask == other.response_mask
        assert one.messages == other.messages
        assert one.finish_reason == other.finish_reason

    inherited_turns = sum(t.fork.turns for t in forked if t.fork)
    assert inherited_turns
    assert calls["step"] == calls_of_replays["step"] - inherited_turns
    assert calls["restore"] == sum(bool(t.fork and t.fork.turns) for t in forked)
    assert calls["reset"] == size
