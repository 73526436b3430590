"""The staleness bound, by a machine that does everything in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jax_agent_rl.collect.buffer import RolloutBuffer, versions
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    Group,
    StopReason,
    TokenOutput,
    Trajectory,
    Turn,
)
from tests.examples import examples
from tests.messages import raises


def group_of(number: int, *token_versions: int) -> Group:
    """One member with a token of each version; none: the group has lost its member."""
    count = len(token_versions)
    output = TokenOutput(
        token_ids=(5,) * count,
        log_probs=(-1.0,) * count,
        policy_versions=token_versions,
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    members = [
        Trajectory.from_turns(
            prompt_ids=(1,),
            turns=(Turn(output=output, appended_ids=(7,)),),
            trajectory_id=f"g-{number}-0",
            group_id=f"g-{number}",
            agent_name="a",
            finish_reason=FinishReason.ANSWER,
        )
        for _ in range(min(count, 1))
    ]
    return Group(group_id=f"g-{number}", trajectories=tuple(members))


class Training(RuleBasedStateMachine):
    """A rollout and a learner that do whatever the buffer lets them."""

    @initialize(
        batch=st.integers(1, 3),
        staleness=st.integers(0, 3),
        oversample=st.integers(0, 2),
        drop=st.booleans(),
    )
    def begin(self, batch: int, staleness: int, oversample: int, drop: bool):
        self.make = lambda: RolloutBuffer(
            batch=batch,
            staleness=staleness,
            stragglers="drop" if drop else "wait",
            oversample=oversample if drop else 0,
        )
        self.buffer = self.make()
        self.drop = drop
        self.bound = (staleness + 1) * batch + (oversample if drop else 0)
        self.next = 0
        self.born: dict[int, int] = {}  # running groups: the version of their first token
        self.held: dict[int, Group] = {}
        self.trained: set[int] = set()
        self.given_up = 0
        self.discarded = 0
        self.cancelled = 0

    @precondition(lambda self: self.buffer.room)
    @rule(count=st.sampled_from([1, 99]))
    def admit(self, count: int):
        for _ in range(min(count, self.buffer.room)):
            ticket = self.buffer.admit(self.next)
            assert ticket.version == self.buffer.version
            self.born[self.next] = ticket.version
            self.next += 1

    @precondition(lambda self: not self.buffer.room)
    @rule()
    def nothing_is_admitted_without_room(self):
        with raises(ValueError, value="slots"):
            self.buffer.admit(self.next)

    @precondition(lambda self: self.born)
    @rule(choice=st.integers(0, 99), later=st.integers(0, 3), tokens=st.integers(0, 2))
    def complete(self, choice: int, later: int, tokens: int):
        number = sorted(self.born)[
            -1 - choice % len(self.born)
        ]  # small choices are the newest: others are stragglers
        first = min(self.born.pop(number) + later, self.buffer.version)
        sampled_by = (first, self.buffer.version)[:tokens]
        assert self.buffer.complete(number, group_of(number, *sampled_by)), (
            "it was no straggler that expired"
        )

    @precondition(lambda self: self.buffer.taken < self.buffer.batch)
    @rule()
    def take(self):
        missing = self.buffer.batch - self.buffer.taken
        groups = self.buffer.take(missing)
        if groups is None:
            assert self.buffer.ready < missing or (not self.drop and self.buffer.running), (
                "waiting would be for ever"
            )
            return
        assert len(groups) == missing
        assert not groups.keys() & self.trained
        for group in groups.values():
            for sampled_by in versions(group.trajectories):
                assert 0 <= self.buffer.version - sampled_by <= self.buffer.staleness
        self.held |= groups

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject):
        number = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[number]
        self.buffer.discard([number], DropReason.ZERO_VARIANCE)
        self.discarded += 1

    @precondition(lambda self: len(self.held) == self.buffer.batch)
    @rule()
    def finish_step(self):
        expired = self.buffer.finish_step(self.buffer.version + 1)
        if not self.drop:
            assert not expired.running and not expired.ready, "the learner waited for nothing"
        for number in expired.running:
            assert self.buffer.version - self.born.pop(number) > self.buffer.staleness
        self.given_up += len(expired.running) + len(expired.ready)
        self.trained |= self.held.keys()
        self.held = {}

    @precondition(lambda self: self.buffer.ready >= self.buffer.batch)
    @rule()
    def step(self):
        if not self.held:
            self.take()
        if len(self.held) == self.buffer.batch:
            self.finish_step()

    @precondition(lambda self: not self.held and self.buffer.version > 3)
    @rule()
    def resume(self):
        state = self.buffer.state()
        self.buffer = self.make()
        self.buffer.restore(state)
        self.cancelled += len(state["open"])
        self.born = {}
        assert self.buffer.room == self.bound
        assert not self.buffer.open

    @invariant()
    def the_capacity_is_never_exceeded(self):
        assert len(self.buffer.open) <= self.bound == self.buffer.capacity
        assert self.buffer.room == self.bound - len(self.buffer.open)

    @invariant()
    def started_is_trained_and_dropped_and_open(self):
        buffer = self.buffer
        assert (
            buffer.started
            == self.next
            == buffer.trained + buffer.dropped.total() + len(buffer.open)
        )
        assert buffer.trained == len(self.trained)
        assert (buffer.running, buffer.taken) == (len(self.born), len(self.held))
        assert buffer.dropped[DropReason.STALE] == self.given_up
        assert buffer.dropped[DropReason.ZERO_VARIANCE] == self.discarded
        assert buffer.dropped[DropReason.CANCELLED] == self.cancelled


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=examples(150), stateful_step_count=60)


def running(buffer: RolloutBuffer, *numbers: int) -> None:
    for number in numbers:
        buffer.admit(number)


def ready(buffer: RolloutBuffer, *numbers: int) -> None:
    for number in numbers:
        buffer.complete(number, group_of(number, buffer.version))


def test_the_learner_waits_where_two_of_the_oldest_would_be_left_for_one_step():
    """S = 2, batches of 1: of three groups of version 0, one has to go in each of the steps 0, 1
    and 2.
    """
    buffer = RolloutBuffer(batch=1, staleness=2)
    running(buffer, 0, 1, 2)
    ready(buffer, 2)
    assert list(buffer.take(1)) == [2]
    buffer.finish_step(1)
    running(buffer, 3)
    ready(buffer, 3)
    assert buffer.take(1) is None, "groups 0 and 1 would both be due in the last step"
    buffer.complete(1, group_of(1, 0, 1))
    assert list(buffer.take(1)) == [1]


def test_without_waiting_the_oldest_are_given_up_when_they_are_stale():
    buffer = RolloutBuffer(batch=1, staleness=0, stragglers="drop", oversample=2)
    running(buffer, 0, 1, 2)
    ready(buffer, 1, 2)
    assert list(buffer.take(1)) == [1]
    expired = buffer.finish_step(1)
    assert (expired.running, list(expired.ready)) == ((0,), [2])
    assert buffer.dropped == {DropReason.STALE: 2}
    assert buffer.room == 3


def test_a_group_of_weights_older_than_its_engine_said_is_never_handed_out():
    buffer = RolloutBuffer(batch=1, staleness=1, version=5)
    running(buffer, 0, 1)
    assert not buffer.complete(0, group_of(0, 5, 3))
    assert buffer.complete(1, group_of(1, 4))
    assert buffer.dropped == {DropReason.STALE: 1}


def test_a_group_that_lost_every_member_is_handed_out_too():
    """The step consumes it, as the synchronous trainer would."""
    buffer = RolloutBuffer(batch=1, staleness=0)
    running(buffer, 0)
    buffer.complete(0, group_of(0))
    assert list(buffer.take(1)) == [0]


def test_the_oldest_go_first_and_in_order_of_their_numbers():
    buffer = RolloutBuffer(batch=2, staleness=1)
    running(buffer, 0, 1, 2, 3)
    ready(buffer, 3, 2)
    buffer.take(2)
    buffer.finish_step(1)
    running(buffer, 4, 5)
    ready(buffer, 4, 5)
    buffer.complete(1, group_of(1, 0))
    assert buffer.take(2) is None, "group 0 has its last chance in this step"
    buffer.complete(0, group_of(0, 0, 1))
    assert list(buffer.take(2)) == [0, 1]


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (lambda b: b.finish_step(1), {"value": "0 groups", "fix": "consume 2"}),
        (lambda b: b.discard([0], DropReason.STALE), {"value": "groups [0]"}),
        (lambda b: b.admit(0), {"value": ("group 0", "twice")}),
        (lambda b: b.restore(b.state()), {"value": "1 groups"}),
    ],
)
def test_mistakes_are_refused(mistake, named: dict):
    buffer = RolloutBuffer(batch=2, staleness=1)
    running(buffer, 0)
    with raises(ValueError, **named):
        mistake(buffer)


def test_a_version_that_is_left_out_is_refused():
    buffer = RolloutBuffer(batch=1, staleness=1)
    running(buffer, 0)
    ready(buffer, 0)
    buffer.take(1)
    with raises(ValueError, value=("version 2", 0)):
        buffer.finish_step(2)


@pytest.mark.parametrize("arguments", [{"batch": 0}, {"staleness": -1}, {"oversample": 1}])
def test_settings_that_make_no_sense_are_refused(arguments: dict):
    with raises(ValueError, key=next(iter(arguments))):
        RolloutBuffer(**{"batch": 1, "staleness": 0} | arguments)
