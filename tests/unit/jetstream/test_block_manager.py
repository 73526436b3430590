"""Which context stands in which pages: the blocks against a model that remembers what every page
was given.
"""

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_agent_rl.jetstream.block_manager import NULL_PAGE, BlockManager
from tests.examples import examples

ids = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def make_blocks(pages: int, size: int = 4, max_context_pages: int = 8) -> BlockManager:
    return BlockManager(pages, size, max_context_pages)


def held(blocks: BlockManager, prompt: list[int], session: str | None = None) -> int:
    """A context whose prompt was prefilled."""
    placement = blocks.allocate(prompt, session)
    assert placement is not None
    blocks.append(placement.context, prompt[placement.reused : -1])
    return placement.context


def test_the_next_turn_of_a_session_goes_on_in_its_own_pages():
    blocks = make_blocks(6)
    first = held(blocks, [1, 2, 3, 4, 5, 6], "s")
    pages = blocks.pages(first)
    blocks.free(first, session_ends=False)
    second = blocks.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9], "s")
    assert second.pages[:2] == pages
    assert (second.reused, second.copy) == (5, None)


def test_members_of_a_group_share_full_pages_and_copy_the_last_one():
    blocks = make_blocks(12)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    first = held(blocks, prompt)
    members = [blocks.allocate(prompt, None) for _ in range(3)]
    assert {m.pages[0] for m in members} == {blocks.pages(first)[0]}
    assert [m.copy for m in members] == [(blocks.pages(first)[1], m.pages[1]) for m in members]
    assert all(m.reused == 6 for m in members)
    assert len({m.pages[1] for m in members}) == 3


def test_contexts_that_were_computed_side_by_side_are_both_found():
    blocks = make_blocks(12)
    prompt = [1, 2, 3]
    first = held(blocks, prompt, "a")
    second = held(blocks, prompt, "b")
    for context, end in ((first, [7, 7, 8]), (second, [7, 7, 9])):  # both fill a page with 1 2 3 7
        blocks.append(context, [3, *end][:2])
        assert blocks.grow(context, 2)
        blocks.append(context, end[1:])
        blocks.free(context, session_ends=False)
    assert blocks.allocate([1, 2, 3, 7, 7, 8, 0], "a").reused == 6
    assert blocks.allocate([1, 2, 3, 7, 7, 9, 0], "b").reused == 6


def test_a_request_waits_while_those_that_run_may_need_what_is_left():
    blocks = make_blocks(3, max_context_pages=2)
    first = held(blocks, [1, 2, 3, 4, 5])
    assert blocks.allocate([6, 7], None) is not None
    assert blocks.allocate([8, 9], None) is None
    blocks.free(first, session_ends=True)
    assert blocks.allocate([8, 9], None) is not None


def test_ended_sessions_give_up_pages_before_waiting_ones_and_from_their_end():
    blocks = make_blocks(4, max_context_pages=2)
    waiting = held(blocks, [1] * 7, "waiting")
    ended = held(blocks, [2] * 7, "ended")
    ended_pages = blocks.pages(ended)
    blocks.free(ended, session_ends=True)
    blocks.free(waiting, session_ends=False)
    assert blocks.allocate([3, 3], None).pages == ended_pages[1:]
    assert blocks.allocate([4, 4], None).pages == ended_pages[:1]


def test_a_page_that_is_too_much_with_its_copy_is_computed_again():
    blocks = make_blocks(2, max_context_pages=2)
    blocks.free(held(blocks, [1, 1, 1, 1, 1, 1, 1]), session_ends=True)
    forked = blocks.allocate([1, 1, 1, 1, 1, 2, 2], None)
    assert (forked.reused, forked.copy) == (4, None)


def test_a_context_grows_until_no_page_is_left():
    blocks = make_blocks(3, max_context_pages=3)
    context = held(blocks, [1, 2, 3])
    assert blocks.grow(context, 2)
    assert len(blocks.pages(context)) == 1
    assert blocks.grow(context, 10)
    assert len(blocks.pages(context)) == 3
    assert not blocks.grow(context, 11)


def test_nothing_is_shared_across_a_reset():
    blocks = make_blocks(8)
    running = held(blocks, [1, 2, 3, 4, 5, 6], "a")
    blocks.free(held(blocks, [1, 2, 3, 4, 5, 6], "b"), session_ends=False)
    blocks.reset()
    assert blocks.allocate([1, 2, 3, 4, 5, 6], "b").reused == 0
    blocks.free(running, session_ends=False)
    assert blocks.allocate([1, 2, 3, 4, 5, 6], "a").reused == 0


class PageMachine(RuleBasedStateMachine):
    """Random requests. The model keeps for every context its ids, and for every page the KV that
    was written to it: of which context prefix each position is, as the device would hold it.
    """

    PAGES = 9
    SIZE = 3
    MAX_CONTEXT_PAGES = 6
    HOST_PAGES = 0

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[str, float] = {}
        self.blocks = BlockManager(
            self.PAGES,
            self.SIZE,
            self.MAX_CONTEXT_PAGES,
            host_pages=self.HOST_PAGES,
            return_rate=lambda session: self.rates.get(session, 0.0),
        )
        self.contexts: dict[int, list[int]] = {}
        self.kv = np.full((self.PAGES + 1, self.SIZE), None, object)
        self.host = np.full((self.HOST_PAGES, self.SIZE), None, object)
        self.weights = 0

    def write(self, context: int, begin: int, contents: list[int]) -> None:
        for position in range(begin, len(contents)):
            page = self.blocks.pages(context)[position // self.SIZE]
            self.kv[page, position % self.SIZE] = (self.weights, *contents[: position + 1])

    def offload(self) -> None:
        for page, host_page in self.blocks.saved:
            self.host[host_page] = self.kv[page]
        self.blocks.saved.clear()

    @rule(session=st.sampled_from("ab"), rate=st.sampled_from([0.0, 0.1, 2.0, math.inf]))
    def wait(self, session: str, rate: float) -> None:
        self.rates[session] = rate

    @rule(
        prompt=ids, session=st.sampled_from(["a", "b", None]), cost=st.sampled_from([0.0, 0.2, 5.0])
    )
    def place(self, prompt: list[int], session: str | None, cost: float) -> None:
        placement = self.blocks.allocate(
            prompt, session, recompute_cost=cost if self.contexts else 0.0
        )
        self.offload()
        if placement is None:
            assert self.contexts, "one context always fits"
            return
        for host_page, page in placement.restored:
            self.kv[page] = self.host[host_page]
        assert placement.reused < len(prompt)
        assert placement.pages == self.blocks.pages(placement.context)
        if placement.copy is not None:
            source, target = placement.copy
            self.kv[target] = self.kv[source]
        for position in range(placement.reused):
            page = placement.pages[position // self.SIZE]
            assert self.kv[page, position % self.SIZE] == (self.weights, *prompt[: position + 1])
        self.write(placement.context, placement.reused, prompt[:-1])
        self.blocks.append(placement.context, prompt[placement.reused : -1])
        self.contexts[placement.context] = prompt[:-1]

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data, new: list[int]) -> None:
        context = data.draw(st.sampled_from(sorted(self.contexts)))
        previous_ids = self.contexts[context]
        new = new[: self.SIZE * self.MAX_CONTEXT_PAGES - len(previous_ids)]
        if not self.blocks.grow(context, len(new)):
            assert len(self.contexts) > 1, "one context always fits"
            return
        self.offload()
        self.contexts[context] = previous_ids + new
        self.write(context, len(previous_ids), self.contexts[context])
        self.blocks.append(context, new)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), ends=st.booleans())
    def release(self, data, ends: bool) -> None:
        context = data.draw(st.sampled_from(sorted(self.contexts)))
        self.blocks.free(context, session_ends=ends)
        del self.contexts[context]

    @rule()
    def new_weights(self) -> None:
        self.blocks.reset()
        self.weights += 1

    @invariant()
    def contexts_hold_what_they_say(self) -> None:
        for context, expected in self.contexts.items():
            np.testing.assert_array_equal(self.blocks.ids(context), expected)
            for position in range(len(expected)):
                page = self.blocks.pages(context)[position // self.SIZE]
                assert self.kv[page, position % self.SIZE][1:] == tuple(expected[: position + 1])

    @invariant()
    def a_page_is_in_two_contexts_only_if_it_is_full(self) -> None:
        seen: dict[int, int] = {}
        for context, contents in self.contexts.items():
            pages = self.blocks.pages(context)
            assert len(set(pages)) == len(pages)
            assert NULL_PAGE not in pages
            for number, page in enumerate(pages):
                full = (number + 1) * self.SIZE <= len(contents)
                assert page not in seen or (full and seen[page]), "shared before it was full"
                seen[page] = full

    @invariant()
    def every_page_is_free_or_held_or_idle_and_counted(self) -> None:
        blocks = self.blocks
        assert sorted([*blocks.free_pages, *blocks.cached_pages]) == list(range(1, self.PAGES + 1))
        ref_counts = dict.fromkeys(blocks.cached_pages, 0)
        for context in self.contexts:
            for page in blocks.pages(context):
                ref_counts[page] += 1
        assert ref_counts == {
            number: page.ref_count for number, page in blocks.cached_pages.items()
        }
        assert blocks.idle_count == sum(not count for count in ref_counts.values())
        assert sorted([*blocks.free_host_pages, *blocks.pages_on_host]) == list(
            range(self.HOST_PAGES)
        )
        assert all(page.sessions for page in blocks.pages_on_host.values()), "kept for nobody"

    @invariant()
    def idle_pages_can_all_be_given_up(self) -> None:
        on_device = self.blocks.cached_pages.values()
        inner = {page.parent for page in on_device}
        leaves = {page.number for page in on_device if not page.ref_count and page not in inner}
        assert leaves == set(self.blocks.leaves)

    @invariant()
    def the_share_in_use_is_of_all_positions(self) -> None:
        assert 0 <= self.blocks.used_share <= 1


class HostPageMachine(PageMachine):
    """The same with pages of the host."""

    HOST_PAGES = 4


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestHostPageMachine = HostPageMachine.TestCase
TestHostPageMachine.settings = settings(max_examples=examples(100), stateful_step_count=35)


@pytest.mark.parametrize("slots", [1, 3])
def test_contexts_for_whom_there_are_pages_always_run(slots: int):
    blocks = make_blocks(slots * 2, max_context_pages=2)
    for number in range(20):
        contexts = [held(blocks, [number, slot, 0, 1, 2], f"{slot}") for slot in range(slots)]
        assert all(blocks.grow(context, 4) for context in contexts)
        for context in contexts:
            blocks.append(context, [2, 3, 4, 5])
            blocks.free(context, session_ends=False)


def test_the_session_that_returns_soonest_is_evicted_last():
    rates = {"soon": 1.0, "late": 0.1}
    blocks = BlockManager(4, 4, 2, return_rate=rates.__getitem__)
    soon = held(blocks, [1] * 7, "soon")
    late = held(blocks, [2] * 7, "late")
    late_pages = blocks.pages(late)
    blocks.free(soon, session_ends=False)
    blocks.free(late, session_ends=False)  # used last
    assert blocks.allocate([3, 3], None).pages == late_pages[1:]
    assert blocks.allocate([4, 4], None).pages == late_pages[:1]


def test_a_page_of_several_waiting_sessions_is_kept_longer():
    blocks = BlockManager(5, 4, 2, return_rate={"a": 1.0, "b": 1.0, "c": 1.5}.__getitem__)
    for session, prompt in (("a", [1] * 5), ("b", [1] * 5), ("c", [2] * 5)):
        blocks.free(held(blocks, prompt, session), session_ends=False)
    assert [page.ids for page in blocks.cached_pages.values()] == [[1] * 4, [2] * 4]
    assert blocks.allocate([3] * 7, None)
    assert blocks.allocate([4] * 7, None)
    assert [1] * 4 in [page.ids for page in blocks.cached_pages.values()], "two may return to it"


def test_kv_that_is_worth_a_slot_until_its_session_returns_makes_others_wait():
    blocks = BlockManager(4, 4, 4, return_rate=lambda session: 0.5)
    blocks.free(
        held(blocks, [1] * 13, "waits"), session_ends=False
    )  # three pages of ids nobody else has
    assert blocks.allocate([2] * 5, "new", recompute_cost=0.17) is None, (
        "12 ids at 0.17 s are more than 2 s"
    )
    assert blocks.allocate([2] * 5, "new", recompute_cost=0.16) is not None


def test_a_session_in_the_cache_takes_the_pages_of_others():
    blocks = BlockManager(4, 4, 4, return_rate=lambda session: 0.5)
    blocks.free(held(blocks, [1] * 9, "waits"), session_ends=False)
    blocks.free(held(blocks, [2] * 8, "back"), session_ends=False)
    assert blocks.allocate([3] * 8, "new", recompute_cost=9.0) is None
    assert blocks.allocate([2] * 12, "back", recompute_cost=9.0).reused == 7


def test_pages_of_waiting_sessions_move_to_the_host_and_come_back_in_order():
    blocks = BlockManager(3, 4, 3, host_pages=3)
    waits = held(blocks, [1] * 9, "waits")
    first, second = blocks.pages(waits)[:2]
    blocks.free(waits, session_ends=False)
    blocks.free(held(blocks, [2] * 9, "ends"), session_ends=True)
    assert blocks.saved == [(second, 2), (first, 1)], "ends before beginnings"
    back = blocks.allocate([1] * 9, "waits")
    assert [host for host, _ in back.restored] == [1, 2]
    assert back.reused == 8
    assert len(blocks.saved) == 2, "ended sessions are not kept"


def test_ended_sessions_leave_nothing_on_the_host():
    blocks = BlockManager(2, 4, 2, host_pages=2)
    blocks.free(held(blocks, [1] * 6, "a"), session_ends=False)
    blocks.free(held(blocks, [2] * 6, "b"), session_ends=False)
    assert len(blocks.pages_on_host) == 2
    blocks.free(held(blocks, [3], "a"), session_ends=True)  # another context
    assert {name for page in blocks.pages_on_host.values() for name in page.sessions} == {"b"}


def test_new_weights_drop_host_pages():
    blocks = BlockManager(2, 4, 2, host_pages=2)
    blocks.free(held(blocks, [1] * 6, "a"), session_ends=False)
    running = held(blocks, [2] * 6, "b")
    blocks.reset()
    assert not blocks.pages_on_host
    assert sorted(blocks.free_host_pages) == [0, 1]
    assert not blocks.saved
    blocks.free(running, session_ends=False)
    assert blocks.allocate([1] * 6, "a").reused == 0
