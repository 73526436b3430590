"""States of recurrent layers: every context begins with the state of exactly the ids it reuses.

Rounds of admissions run on an engine that only remembers: a page holds of which prefix each
position is, and a slot which ids were fed to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_agent_rl.jetstream.admission import AdmissionPlan
from jax_agent_rl.jetstream.block_manager import Allocation, BlockManager
from jax_agent_rl.jetstream.decode_batch import Extension
from jax_agent_rl.jetstream.state_slots import NULL_STATE, StateSlots
from tests.examples import examples

SIZE = 4
Prefix = tuple[tuple[int, int], ...]
"""Ids that were fed, each with the version of the weights that it was fed to."""


class RememberingEngine:
    """Pages and slots that hold of which prefix they are.

    Attributes:
        version: of the weights.
    """

    def __init__(self, pages: int, slots: int, host_pages: int, host_slots: int) -> None:
        self.version = 0
        self.kv: list[list[Prefix | None]] = [[None] * SIZE for _ in range(1 + pages)]
        self.states: list[Prefix | None] = [(), *([None] * slots)]
        self.host_kv: list[list[Prefix | None]] = [[None] * SIZE for _ in range(host_pages)]
        self.host_states: list[Prefix | None] = [None] * host_slots

    def copy_page(self, cache: None, source: int, target: int) -> None:
        self.kv[target] = list(self.kv[source])

    def copy_state(self, cache: None, source: int, target: int) -> None:
        assert target != NULL_STATE
        self.states[target] = self.states[source]

    def put_pages(self, cache: None, content: list, pages: list[int]) -> None:
        for page, kv in zip(pages, content, strict=True):
            self.kv[page] = list(kv)

    def put_state(self, cache: None, content: Prefix, slot: int) -> None:
        self.states[slot] = content

    def extend(self, params: None, cache: None, extensions: Sequence[Extension]) -> None:
        # All of them read before any of them writes, as rows of one program do.
        states = [self.states[extension.state] for extension in extensions]
        for extension, state in zip(extensions, states, strict=True):
            if len(extension.ids):
                self.feed(extension.pages, extension.state, state, extension.ids)

    def feed(
        self, pages: Sequence[int], slot: int, state: Prefix | None, ids: Sequence[int]
    ) -> None:
        """Feed ids to a context, after checking that its pages and its state are of one prefix."""
        assert state is not None
        for position in range(len(state)):
            assert self.kv[pages[position // SIZE]][position % SIZE] == state[: position + 1]
        for token in ids:
            position = len(state)
            state = (*state, (self.version, int(token)))
            self.kv[pages[position // SIZE]][position % SIZE] = state
        self.states[slot] = state


class Contexts:
    """A block manager over a remembering engine, driven as the scheduler drives it."""

    def __init__(
        self,
        *,
        pages: int = 24,
        running: int = 3,
        checkpoints: int = 4,
        host_pages: int = 0,
        host_slots: int = 0,
        interval: int = 1000,
    ) -> None:
        self.slots = StateSlots(running, checkpoints, host_slots)
        self.blocks = BlockManager(
            pages, SIZE, 8, host_pages=host_pages, states=self.slots, checkpoint_interval=interval
        )
        self.engine = RememberingEngine(pages, running + checkpoints, host_pages, host_slots)
        self.ids: dict[int, list[int]] = {}

    def admit(self, prompts: Sequence[tuple[list[int], str | None]]) -> list[Allocation | None]:
        """Admit the requests of one round."""
        plan = AdmissionPlan(SIZE)
        allocations = []
        for prompt, session in prompts:
            allocation = self.blocks.allocate(prompt, session)
            self._offload()
            allocations.append(allocation)
            if allocation is None:
                continue
            restored = None
            if allocation.restored:
                restored = [list(self.engine.host_kv[page]) for page, _ in allocation.restored]
            restored_state = None
            if allocation.state.host_source is not None:
                restored_state = self.engine.host_states[allocation.state.host_source]
            new_ids = np.array(prompt[allocation.reused : -1], np.int32)
            plan.add(allocation, new_ids, restored=restored, restored_state=restored_state)
            self.blocks.append(allocation.context, new_ids)
            self.ids[allocation.context] = prompt[:-1]
        plan.run(self.engine, None, None)
        self.slots.settle()
        self.check()
        return allocations

    def start(self, prompt: list[int], session: str | None = None) -> Allocation:
        """Admit one request."""
        (allocation,) = self.admit([(prompt, session)])
        assert allocation is not None
        return allocation

    def decode(self, context: int, ids: list[int]) -> bool:
        """Feed sampled ids; False without pages for them."""
        if not self.blocks.grow(context, len(ids)):
            return False
        self._offload()
        slot = self.blocks.state(context)
        self.engine.feed(self.blocks.pages(context), slot, self.engine.states[slot], ids)
        self.blocks.append(context, ids)
        self.ids[context] += ids
        return True

    def end(self, context: int, *, session_ends: bool = False, is_current: bool = True) -> None:
        self.blocks.free(context, session_ends=session_ends, state_is_current=is_current)
        del self.ids[context]

    def new_weights(self) -> None:
        self.blocks.reset()
        self.engine.version += 1

    def _offload(self) -> None:
        for page, host_page in self.blocks.saved:
            self.engine.host_kv[host_page] = list(self.engine.kv[page])
        for slot, host_slot in self.slots.saved:
            self.engine.host_states[host_slot] = self.engine.states[slot]
        self.blocks.saved.clear()
        self.slots.saved.clear()

    def check(self) -> None:
        """Check every running state, every checkpoint, and that no slot is lost or used twice."""
        slots = self.slots
        for context, ids in self.ids.items():
            state = self.engine.states[self.blocks.state(context)]
            assert [token for _, token in state] == ids

        used = list(slots.running)
        used_on_host = []
        for checkpoint in slots.checkpoints:
            page = checkpoint.page
            assert page.checkpoints[checkpoint.offset] is checkpoint
            ids = []
            while page.parent is not None:
                own_ids = page.ids[: checkpoint.offset] if page is checkpoint.page else page.ids
                ids = own_ids + ids
                page = page.parent
            if checkpoint.on_host:
                used_on_host.append(checkpoint.slot)
                state = self.engine.host_states[checkpoint.slot]
            else:
                used.append(checkpoint.slot)
                state = self.engine.states[checkpoint.slot]
            assert state == tuple((self.engine.version, token) for token in ids)

        all_slots = range(1, 1 + slots.max_running + slots.max_checkpoints)
        assert sorted([*used, *slots.free_slots]) == list(all_slots)
        assert sorted([*used_on_host, *slots.free_host_slots]) == list(range(slots.host_slots))
        assert self.engine.states[NULL_STATE] == ()


def test_the_next_turn_begins_with_the_state_after_the_last_fed_id():
    contexts = Contexts()
    first = contexts.start([1, 2, 3, 4, 5, 6], "s")
    contexts.decode(first.context, [6, 7, 8])
    contexts.end(first.context)
    second = contexts.start([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], "s")
    assert (second.reused, second.recomputed) == (8, 0)


def test_a_new_context_begins_with_zeros_in_a_slot_that_was_used():
    contexts = Contexts(running=1, checkpoints=1)
    for number in range(4):
        allocation = contexts.start([number, 5, 5, 5, 5, 5])
        assert allocation.state.source == NULL_STATE
        contexts.end(allocation.context)


def test_samples_of_a_prompt_copy_the_state_after_it_in_the_round_that_computes_it():
    contexts = Contexts()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    first, second, third = contexts.admit([(prompt, "a"), (prompt, "b"), (prompt, "c")])
    assert (first.reused, second.reused, third.reused) == (0, 6, 6)
    assert len({contexts.blocks.state(context) for context in contexts.ids}) == 3
    contexts.decode(second.context, [7, 8])
    contexts.check()


def test_ids_behind_a_fork_without_a_checkpoint_are_computed_once():
    contexts = Contexts()
    first = contexts.start([1] * 10 + [2, 2, 2])
    contexts.end(first.context)
    second = contexts.start([1] * 10 + [3, 3, 3])
    assert (second.reused, second.recomputed) == (0, 10)
    assert [position for position, _ in second.state.checkpoints] == [10, 12]
    third = contexts.start([1] * 10 + [4, 4, 4])
    assert (third.reused, third.recomputed) == (10, 0)


def test_a_fork_within_a_sample_begins_at_the_checkpoint_before_it():
    contexts = Contexts()
    first = contexts.start([1, 2, 3, 4, 5, 6])
    contexts.decode(first.context, [6, 7, 8, 9, 10])
    fork = contexts.start([1, 2, 3, 4, 5, 6, 7, 8, 11])
    assert (fork.reused, fork.recomputed) == (5, 3)


def test_a_state_beyond_the_end_of_a_context_is_not_kept():
    contexts = Contexts()
    first = contexts.start([1, 2, 3, 4, 5, 6], "s")
    contexts.decode(first.context, [6, 7, 8])
    slot = contexts.blocks.state(first.context)
    fed = contexts.engine.states[slot]
    contexts.engine.states[slot] = (*fed, (0, 99))  # a stop string ended the output before it
    contexts.end(first.context, is_current=False)
    contexts.check()
    second = contexts.start([1, 2, 3, 4, 5, 6, 7, 8, 9], "s")
    assert (second.reused, second.recomputed) == (5, 3)


def test_a_preempted_context_continues_from_its_own_state():
    contexts = Contexts()
    first = contexts.start([1, 2, 3, 4, 5, 6])
    contexts.decode(first.context, [6, 7])
    contexts.end(first.context)  # as preemption does
    again = contexts.start([1, 2, 3, 4, 5, 6, 7, 8])
    assert (again.reused, again.recomputed) == (7, 0)


def test_a_cancelled_request_without_cached_ids_leaves_no_state():
    contexts = Contexts()
    allocation = contexts.start([1])
    contexts.end(allocation.context)
    assert not contexts.slots.checkpoints
    contexts.check()


def test_new_weights_drop_all_checkpoints_and_running_states_are_not_shared():
    contexts = Contexts()
    contexts.end(contexts.start([1, 2, 3, 4, 5, 6]).context)
    running = contexts.start([1, 2, 3, 4, 5, 7])
    contexts.new_weights()
    assert not contexts.slots.checkpoints
    contexts.decode(running.context, [7])
    contexts.end(running.context)
    assert not contexts.slots.checkpoints
    again = contexts.start([1, 2, 3, 4, 5, 7, 8])
    assert (again.reused, again.recomputed) == (0, 0)


def test_contexts_of_different_adapters_share_no_state():
    contexts = Contexts()
    contexts.end(contexts.start([1, 2, 3, 4, 5, 6]).context)
    allocation = contexts.blocks.allocate([1, 2, 3, 4, 5, 6], None, "adapter")
    assert (allocation.reused, allocation.state.source) == (0, NULL_STATE)


def test_checkpoints_of_ended_sessions_give_way_before_those_of_waiting_ones():
    contexts = Contexts(running=1, checkpoints=2)
    contexts.end(contexts.start([1, 1, 1], "waits").context)
    contexts.end(contexts.start([2, 2, 2], "ends").context, session_ends=True)
    contexts.end(contexts.start([3, 3, 3], "ends").context, session_ends=True)
    assert contexts.start([1, 1, 1, 1], "waits").reused == 2


def test_a_long_prompt_leaves_checkpoints_at_intervals_while_slots_are_free():
    contexts = Contexts(running=1, checkpoints=3, interval=8)
    first = contexts.start([1] * 30)
    assert [position for position, _ in first.state.checkpoints] == [8, 16, 29]
    contexts.end(first.context)
    assert contexts.start([1] * 20 + [2]).reused == 16


def test_a_checkpoint_of_a_waiting_session_moves_to_the_host_and_comes_back():
    contexts = Contexts(running=1, checkpoints=1, host_pages=8, host_slots=2)
    first = contexts.start([1, 2, 3, 4, 5, 6], "waits")
    contexts.decode(first.context, [6, 7])
    contexts.end(first.context)
    for number in range(3, 6):
        contexts.end(contexts.start([number] * 6).context)
    back = contexts.start([1, 2, 3, 4, 5, 6, 7, 8, 9], "waits")
    assert back.state.host_source is not None
    assert back.reused == 7


def test_a_host_slot_that_is_read_does_not_give_way_in_its_own_round():
    contexts = Contexts(running=2, checkpoints=0, host_pages=8, host_slots=1)
    contexts.end(contexts.start([1, 2, 3, 4, 5, 6], "a").context)
    contexts.end(contexts.start([2, 2, 3, 4, 5, 6], "b").context)
    contexts.end(contexts.start([3, 2, 3, 4, 5, 6], "c").context)  # a's state moved to the host
    back, other = contexts.admit([([1, 2, 3, 4, 5, 6, 7], "a"), ([9, 9, 9], "d")])
    assert back.reused == 5
    assert other.reused == 0


@pytest.mark.parametrize("checkpoints", [0, 1, 5])
def test_as_many_contexts_run_as_may_whatever_is_kept(checkpoints: int):
    contexts = Contexts(pages=40, running=3, checkpoints=checkpoints)
    for number in range(8):
        prompts = [([number, slot, 0, 1, 2], str(slot)) for slot in range(3)]
        allocations = contexts.admit(prompts)
        assert contexts.blocks.allocate([1, 2], None) is None, "no fourth"
        for allocation in allocations:
            assert contexts.decode(allocation.context, [2, 3])
            contexts.end(allocation.context)
        contexts.check()


ids = st.lists(st.integers(0, 1), min_size=1, max_size=12)
requests = st.tuples(ids, st.sampled_from(["a", "b", None]))


class StateMachine(RuleBasedStateMachine):
    """Random rounds of admissions, turns, preemptions, updates and evictions."""

    PAGES = 10
    HOST_PAGES = 0
    HOST_SLOTS = 0

    def __init__(self) -> None:
        super().__init__()
        self.contexts = Contexts(
            pages=self.PAGES,
            running=3,
            checkpoints=2,
            host_pages=self.HOST_PAGES,
            host_slots=self.HOST_SLOTS,
            interval=5,
        )

    @rule(prompts=st.lists(requests, min_size=1, max_size=4))
    def admit(self, prompts: list[tuple[list[int], str | None]]) -> None:
        for allocation in self.contexts.admit(prompts):
            if allocation is not None:
                assert allocation.recomputed >= 0

    @precondition(lambda self: self.contexts.ids)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data, new: list[int]) -> None:
        context = data.draw(st.sampled_from(sorted(self.contexts.ids)))
        room = 8 * SIZE - len(self.contexts.ids[context])
        self.contexts.decode(context, new[:room])

    @precondition(lambda self: self.contexts.ids)
    @rule(data=st.data(), ends=st.booleans(), is_current=st.booleans())
    def end(self, data, ends: bool, is_current: bool) -> None:
        context = data.draw(st.sampled_from(sorted(self.contexts.ids)))
        self.contexts.end(context, session_ends=ends, is_current=is_current)

    @rule()
    def new_weights(self) -> None:
        self.contexts.new_weights()

    @invariant()
    def states_are_of_the_ids_they_say(self) -> None:
        self.contexts.check()


class HostStateMachine(StateMachine):
    """The same with a host."""

    HOST_PAGES = 4
    HOST_SLOTS = 2


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=examples(100), stateful_step_count=30)
TestHostStateMachine = HostStateMachine.TestCase
TestHostStateMachine.settings = settings(max_examples=examples(100), stateful_step_count=30)
