"""Drafts from what was sampled and from the prompt, against brute-force searches."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.jetstream.speculation import MATCHES, PROMPT_MATCHES, SuffixIndex, look_up

IDS = st.lists(st.integers(0, 2), max_size=20)  # few ids, so that much repeats
PARTS = st.lists(st.tuples(IDS, st.lists(st.integers(0, 2), min_size=1, max_size=8)), max_size=6)


def followers(parts: list[tuple[list[int], list[int]]], context: list[int]) -> tuple[int, Counter[int]]:
    """Return the length of the longest known suffix, and what followed it."""
    for match in MATCHES:
        found: Counter[int] = Counter()
        for before, new in parts:
            ids = before + new
            for place in range(max(match, len(before)), len(ids)):
                if ids[place - match : place] == context[-match:]:
                    found[ids[place]] += 1
        if found:
            return match, found
    return 0, Counter()


@given(PARTS, IDS, st.integers(1, 30))
def test_the_index_drafts_what_most_often_followed_the_longest_suffix(parts, context, most):
    index = SuffixIndex(most)
    for before, new in parts:
        index.add(before + new, len(new))
    while sum(len(new) for _, new in parts) > most:
        parts = parts[1:]
    draft = index.draft(context, 4)
    for token, evidence in zip(draft.ids, draft.evidence, strict=True):
        match, found = followers(parts, context)
        assert match and found[token] == max(found.values())
        assert evidence.startswith(f"{match} ") and (evidence == f"{match} once") == (found.total() == 1)
        context = [*context, token]
    assert len(draft.ids) == 4 or not followers(parts, context)[0]


def test_an_index_keeps_no_more_than_it_may():
    index = SuffixIndex(max_ids=50)
    for start in range(0, 4000, 10):
        index.add(list(range(start, start + 30)), 10)
    assert len(index) == 50 * len(MATCHES)
    assert index.draft(list(range(100, 110)), 3).ids == []
    assert index.draft(list(range(4000, 4010)), 3).ids == [4010, 4011, 4012]


@given(IDS, IDS)
def test_the_prompt_drafts_what_followed_the_last_of_the_longest_matches(prompt, sampled):
    ids, wanted = prompt + sampled, []
    for match in reversed(PROMPT_MATCHES):
        for end in range(match, len(prompt)):
            if prompt[end - match : end] == ids[-match:]:
                wanted = prompt[end : end + 3]
    assert look_up(prompt, ids, 3).ids == wanted
