"""Packing: what each token attends to, what is trained on, and that nothing is lost."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.learner.packing import pack
from tests.examples import examples
from tests.trajectories import trajectory

# Few ids and short lists, so that prefixes are shared often.
contexts = st.lists(
    st.tuples(
        st.lists(st.integers(3, 5), min_size=1, max_size=5),
        st.lists(st.integers(3, 5), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=8,
)


def weighted(batch, advantages: list[float]):
    """The batch with one advantage per trajectory and weight 1."""
    ones = [np.ones(len(targets)) for targets in batch.gather_terms(batch.term_target)]
    return batch.with_terms(
        advantage=[a * ones_of for a, ones_of in zip(advantages, ones, strict=True)], weight=ones
    )


def visible_context(batch, row: int, node: int) -> list[int]:
    """Ids a node attends to, in order, read off the mask alone."""
    end = batch.subtree_end[row]
    return [int(batch.token_ids[row, j]) for j in range(node + 1) if node < end[j]]


@given(contexts, st.booleans(), st.integers(11, 40))
@settings(max_examples=examples(150))
def test_every_term_sees_exactly_its_own_context(pairs, share: bool, length: int):
    ts = [trajectory(prompt, sampled, index=i) for i, (prompt, sampled) in enumerate(pairs)]
    batch = pack(ts, pack_length=length, share_prefixes=share)
    batch = weighted(batch, [float(i) for i in range(len(ts))])
    seen = []
    for row in range(batch.num_rows):
        for term in np.flatnonzero(batch.terms["weight"][row]):
            target = batch.term_target[row, term]
            parent = batch.target_parent[row, target]
            assert batch.target_valid[row, target]
            context = visible_context(batch, row, parent)
            assert batch.positions[row, parent] == len(context) - 1
            seen.append(
                (
                    int(batch.terms["advantage"][row, term]),
                    tuple(context),
                    int(batch.target_id[row, target]),
                )
            )
    wanted = []
    for i, t in enumerate(ts):
        for k, id_ in enumerate(t.response_ids):
            wanted.append((i, (*t.prompt_ids, *t.response_ids[:k]), id_))
    assert sorted(seen) == sorted(wanted)
    assert batch.num_tokens == sum(len(p) + len(s) for p, s in pairs)
    assert batch.num_nodes <= batch.num_tokens
    if not share:
        assert batch.num_nodes == batch.num_tokens


@given(contexts, st.booleans())
@settings(max_examples=examples(50))
def test_numbers_come_back_to_the_trajectories_they_belong_to(pairs, share: bool):
    ts = [trajectory(prompt, sampled, index=i) for i, (prompt, sampled) in enumerate(pairs)]
    batch = pack(ts, pack_length=16, share_prefixes=share)
    numbers = [np.arange(len(t.response_ids)) + 100.0 * i for i, t in enumerate(ts)]
    for got, expected in zip(
        batch.gather_terms(batch.with_terms(x=numbers).terms["x"]), numbers, strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    for (place,) in batch.packed:
        sequences = batch.term_sequence[place.row, place.terms]
        assert len(set(sequences.tolist())) == 1
    for ids, t in zip(batch.gather_states(batch.token_ids), ts, strict=True):
        assert ids.tolist() == [t.prompt_ids[-1], *t.response_ids]


def test_inserted_tokens_are_context_but_not_targets():
    batch = pack([trajectory([3, 4], [5, 6, 7], mask=[1, 0, 1])], pack_length=8)
    assert batch.target_id[0][batch.target_valid[0]].tolist() == [5, 7]
    assert [len(targets) for targets in batch.gather_terms(batch.term_target)] == [2]


def test_a_group_with_one_prompt_pays_for_it_once():
    ts = [trajectory([3] * 256, [10 + i] * 40, index=i) for i in range(8)]
    batch = pack(ts, pack_length=1024)
    assert (batch.num_tokens, batch.num_nodes, batch.num_rows) == (8 * 296, 256 + 8 * 40, 1)


def test_a_trajectory_longer_than_a_row_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="pack_length >= 9"):
        pack([trajectory([3] * 4, [4] * 5)], pack_length=8)


def test_micro_batches_are_filled_up_with_rows_that_weigh_nothing():
    ts = [trajectory([3 + i] * 4, [9] * 4, index=i) for i in range(3)]
    batch = weighted(pack(ts, pack_length=8), [1.0] * 3)
    parts = list(batch.micro_batches(2))
    assert [p["token_ids"].shape for p in parts] == [(2, 8), (2, 8)]
    assert parts[1]["term_weight"][1].sum() == 0
    assert not parts[1]["target_valid"][1].any()


def test_rows_that_are_not_full_are_cut():
    ts = [trajectory([3 + i] * 4, [9] * (4 - i), index=i) for i in range(3)]
    batch = weighted(pack(ts, pack_length=16), [1.0] * 3)
    full_rows = list(batch.micro_batches(1))
    halved = list(batch.micro_batches(1, lengths=2))
    assert [p["token_ids"].shape for p in halved] == [(1, 16), (1, 8)]
    assert halved[0].keys() == full_rows[0].keys()
    assert halved[1]["term_weight"].shape == (1, 16)
    for name, value in full_rows[1].items():
        cut = halved[1][name]
        np.testing.assert_array_equal(cut, value[:, : cut.shape[1]])
    assert [p["token_ids"].shape for p in batch.micro_batches(2, lengths=2)] == [(2, 16)]
    alone = weighted(pack(ts[2:], pack_length=48), [1.0])
    assert [p["token_ids"].shape for p in alone.micro_batches(1, lengths=8)] == [(1, 6)]


def test_terms_count_where_few_nodes_have_many():
    ts = [trajectory([3], [4, 5], index=i) for i in range(9)]
    batch = weighted(pack(ts, pack_length=16), [1.0] * 9)
    (arrays,) = batch.micro_batches(1, lengths=2)
    assert np.count_nonzero(batch.copies) == 3
    assert arrays["token_ids"].shape == (1, 16)


def test_nodes_stand_depth_first_the_oldest_branch_first():
    ts = [
        trajectory([3], response, index=i)
        for i, response in enumerate([[4, 5, 6], [7], [4, 8], [4, 5, 9], [4, 5]])
    ]
    batch = pack(ts, pack_length=8)
    assert batch.token_ids[0].tolist() == [3, 4, 5, 6, 9, 8, 7, 0]
    assert batch.num_nodes == 7
    assert batch.positions[0, :7].tolist() == [0, 1, 2, 3, 3, 2, 1]
    assert batch.subtree_end[0].tolist() == [7, 6, 5, 4, 5, 6, 7, 8]
    assert batch.target_id[0, :6].tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.term_target[0, :11].tolist() == [0, 1, 2, 3, 0, 4, 0, 1, 5, 0, 1]


def lines_executed(function: Callable[[], object]) -> int:
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    previous_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous_trace)
    return count


def test_packing_takes_work_in_proportion_to_the_trajectories():
    """Comparing each trajectory with every token of every row would take four times the work for
    twice as many.
    """
    rng = np.random.default_rng(0)
    prompts = [[3] * 100 + rng.integers(3, 40000, 30).tolist() for _ in range(32)]
    ts = []
    for prompt in prompts:
        for i in range(8):
            ts.append(trajectory(prompt, rng.integers(3, 40000, 120).tolist(), index=i))
    batch = pack(ts, pack_length=1024)
    assert batch.num_tokens == 256 * 250
    half, total = (
        lines_executed(lambda part=part: pack(part, pack_length=1024)) for part in (ts[:128], ts)
    )
    assert total < 2.5 * half
