"""Which context stands in which pages: the blocks against a model that remembers what every page was given."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_agent_rl.jetstream.block_manager import NULL_PAGE, BlockManager

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
    assert second.pages[:2] == pages and (second.reused, second.copy) == (5, None)


def test_members_of_a_group_share_full_pages_and_copy_the_last_one():
    blocks, prompt = make_blocks(12), [1, 2, 3, 4, 5, 6, 7]
    first = held(blocks, prompt)
    members = [blocks.allocate(prompt, None) for _ in range(3)]
    assert {m.pages[0] for m in members} == {blocks.pages(first)[0]}
    assert [m.copy for m in members] == [(blocks.pages(first)[1], m.pages[1]) for m in members]
    assert all(m.reused == 6 for m in members) and len({m.pages[1] for m in members}) == 3


def test_contexts_that_were_computed_side_by_side_are_both_found():
    blocks, prompt = make_blocks(12), [1, 2, 3]
    one, other = held(blocks, prompt, "a"), held(blocks, prompt, "b")
    for context, end in ((one, [7, 7, 8]), (other, [7, 7, 9])):  # both fill a page with 1 2 3 7
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


def test_ended_sessions_give_up_their_pages_before_waiting_ones_and_ends_before_beginnings():
    blocks = make_blocks(4, max_context_pages=2)
    waiting, ended = held(blocks, [1] * 7, "waiting"), held(blocks, [2] * 7, "ended")
    own = blocks.pages(ended)
    blocks.free(ended, session_ends=True)
    blocks.free(waiting, session_ends=False)
    assert blocks.allocate([3, 3], None).pages == own[1:]
    assert blocks.allocate([4, 4], None).pages == own[:1]


def test_a_page_that_is_too_much_with_its_copy_is_computed_again():
    blocks = make_blocks(2, max_context_pages=2)
    blocks.free(held(blocks, [1, 1, 1, 1, 1, 1, 1]), session_ends=True)
    forked = blocks.allocate([1, 1, 1, 1, 1, 2, 2], None)
    assert (forked.reused, forked.copy) == (4, None)


def test_a_context_grows_until_no_page_is_left():
    blocks = make_blocks(3, max_context_pages=3)
    context = held(blocks, [1, 2, 3])
    assert blocks.grow(context, 2) and len(blocks.pages(context)) == 1
    assert blocks.grow(context, 10) and len(blocks.pages(context)) == 3
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
    """Random requests. The model keeps for every context its ids, and for every page the KV that was written to it: of
    which context prefix each position is, as the device would hold it."""

    PAGES, SIZE, MAX_CONTEXT_PAGES = 9, 3, 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.PAGES, self.SIZE, self.MAX_CONTEXT_PAGES)
        self.contexts: dict[int, list[int]] = {}
        self.kv = np.full((self.PAGES + 1, self.SIZE), None, object)
        self.weights = 0

    def write(self, context: int, begin: int, contents: list[int]) -> None:
        for position in range(begin, len(contents)):
            page = self.blocks.pages(context)[position // self.SIZE]
            self.kv[page, position % self.SIZE] = (self.weights, *contents[: position + 1])

    @rule(prompt=ids, session=st.sampled_from(["a", "b", None]))
    def place(self, prompt: list[int], session: str | None) -> None:
        placement = self.blocks.allocate(prompt, session)
        if placement is None:
            assert self.contexts, "one context always fits"
            return
        assert placement.reused < len(prompt) and placement.pages == self.blocks.pages(placement.context)
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
        before = self.contexts[context]
        new = new[: self.SIZE * self.MAX_CONTEXT_PAGES - len(before)]
        if not self.blocks.grow(context, len(new)):
            assert len(self.contexts) > 1, "one context always fits"
            return
        self.contexts[context] = before + new
        self.write(context, len(before), self.contexts[context])
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
            assert len(set(pages)) == len(pages) and NULL_PAGE not in pages
            for number, page in enumerate(pages):
                full = (number + 1) * self.SIZE <= len(contents)
                assert page not in seen or (full and seen[page]), "shared before it was full"
                seen[page] = full

    @invariant()
    def every_page_is_free_or_held_or_idle_and_counted(self) -> None:
        blocks = self.blocks
        assert sorted([*blocks._free, *blocks._pages]) == list(range(1, self.PAGES + 1))
        ref_counts = {number: 0 for number in blocks._pages}
        for context in self.contexts:
            for page in blocks.pages(context):
                ref_counts[page] += 1
        assert ref_counts == {number: page.ref_count for number, page in blocks._pages.items()}
        assert blocks._idle == sum(not count for count in ref_counts.values())

    @invariant()
    def idle_pages_can_all_be_given_up(self) -> None:
        leaves = {page.rank for page in self.blocks._pages.values() if not page.ref_count and not page.children}
        assert leaves <= set(self.blocks._leaves)

    @invariant()
    def the_share_in_use_is_of_all_positions(self) -> None:
        assert 0 <= self.blocks.used_share <= 1


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(max_examples=60, stateful_step_count=25)


def test_the_heap_of_leaves_does_not_grow_with_requests():
    blocks = make_blocks(4)
    for number in range(100):
        blocks.free(held(blocks, [number % 3, 5, 6], "s"), session_ends=False)
    assert len(blocks._leaves) <= 16


@pytest.mark.parametrize("slots", [1, 3])
def test_contexts_for_whom_there_are_pages_always_run(slots: int):
    blocks = make_blocks(slots * 2, max_context_pages=2)
    for number in range(20):
        contexts = [held(blocks, [number, slot, 0, 1, 2], f"{slot}") for slot in range(slots)]
        assert all(blocks.grow(context, 4) for context in contexts)
        for context in contexts:
            blocks.append(context, [2, 3, 4, 5])
            blocks.free(context, session_ends=False)
