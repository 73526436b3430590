"""The graph of a group: the module's worked example, and that nothing is lost or counted twice in
it.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.trajectory_graph import TrajectoryGraph, session_graph, timeline
from jax_agent_rl.types import Fork, Trajectory
from tests.trajectories import session, trajectory


def fork(turns: int, tokens: int = 0) -> Fork:
    return Fork(tree_id="g-0", parent_id="g-0", turns=turns, tokens=tokens)


# a = 10 11, b = 20 21 (b' = 20, b" = 21), c = 30, d = 40, e = 50, f = 60; tool results are 7
EXAMPLE = [
    trajectory([3], [10, 11, 7, 20, 21, 7, 30], mask=[1, 1, 0, 1, 1, 0, 1], index=0),
    replace(trajectory([3], [10, 11, 7, 40], mask=[1, 1, 0, 1], index=1), fork=fork(1)),
    replace(trajectory([3], [10, 11, 7, 20, 50], mask=[1, 1, 0, 1, 1], index=2), fork=fork(1, 1)),
    trajectory([3], [60], index=3),
]


def test_the_worked_example_of_the_module():
    graph = TrajectoryGraph.of(EXAMPLE)
    assert graph.paths == ((0, 1, 2, 3), (0, 4), (0, 1, 5), (6,))
    assert [(n.parent, n.turn, n.ids, n.members) for n in graph.nodes] == [
        (None, 0, (10, 11), (0, 1, 2)),
        (0, 1, (20,), (0, 2)),
        (1, 1, (21,), (0,)),
        (2, 2, (30,), (0,)),
        (0, 1, (40,), (1,)),
        (1, 1, (50,), (2,)),
        (None, 0, (60,), (3,)),
    ]
    assert graph.ends == ((2, 4, 5, 7), (2, 4), (2, 4, 5), (1,))


def test_a_tree_is_read_off_the_ids_where_no_fork_is_on_record():
    graph = TrajectoryGraph.of([replace(t, fork=None) for t in EXAMPLE])
    assert graph.paths == ((0, 1, 2), (0, 3), (0, 4), (5,)), "only whole turns are shared"


def test_another_tool_result_makes_another_branch():
    a = trajectory([3], [10, 7, 11], mask=[1, 0, 1])
    b = trajectory([3], [10, 8, 11], mask=[1, 0, 1])
    assert TrajectoryGraph.of([a, b]).paths == ((0, 1), (0, 2))


def test_segments_are_part_of_their_trajectorys_path():
    segment = trajectory([3], [10, 11], index=0)
    in_segments = replace(trajectory([3, 4], [20], index=1), segments=(segment,))
    graph = TrajectoryGraph.of([in_segments, trajectory([3], [10, 11], index=2)])
    assert graph.paths == ((0, 1), (0,))
    assert graph.ends == ((2, 3), (2,))
    assert [node.parent for node in graph.nodes] == [None, None]


def test_a_group_of_nobody_has_an_empty_graph():
    graph = TrajectoryGraph.of([])
    assert (graph.nodes, graph.paths, graph.ends) == ((), (), ())


def test_a_sessions_turns_are_in_the_order_of_their_calls():
    recorded = session()
    assert [turn.output.token_ids for _, turn in timeline(recorded)] == [
        (4, 2),
        (8, 2),
        (20,),
        (21,),
        (5,),
    ]
    laid_out = [i for sequence in recorded.sequences for i in sequence.response_ids]
    assert all(
        laid_out[at : at + len(turn.output.token_ids)] == [*turn.output.token_ids]
        for at, turn in timeline(recorded)
    )


def test_a_segment_leaves_the_one_that_begins_with_most_of_its_ids():
    graph = session_graph(session())
    assert [s.sequence.turns[0].number for s in graph] == [0, 1, 2]
    # the prompt 1 3 and 4 2, the first turn; the first id of the prompt
    assert [(s.parent, s.shared, s.turns) for s in graph] == [(None, 0, 0), (0, 4, 1), (0, 1, 0)]


def test_a_segment_that_goes_on_after_a_turn_is_its_child():
    graph = TrajectoryGraph.of([session()])
    assert [(node.ids, node.parent) for node in graph.nodes] == [
        ((4, 2), None),
        ((8, 2), 0),
        ((20,), None),
        ((21,), 2),
        ((5,), 0),
    ]


@st.composite
def trees(draw) -> list[Trajectory]:
    """Trajectories, each from the prompt or branched off an earlier one at a random place."""
    ids = st.integers(10, 12)
    trajectories: list[Trajectory] = []
    for number in range(draw(st.integers(1, 6))):
        turns = []
        at = None
        if trajectories and draw(st.booleans()):
            parent = draw(st.sampled_from(trajectories))
            keep = draw(st.integers(0, parent.num_turns - 1))
            cut = parent.turns[keep].output.token_ids
            tokens = draw(st.integers(0, len(cut) - 1))
            at = Fork(
                tree_id=parent.tree_id, parent_id=parent.trajectory_id, turns=keep, tokens=tokens
            )
            turns = [list(turn.output.token_ids) for turn in parent.turns[:keep]]
            turns.append([*cut[:tokens], *draw(st.lists(ids, min_size=1, max_size=3))])
        turns += draw(
            st.lists(st.lists(ids, min_size=1, max_size=3), min_size=not turns, max_size=2)
        )
        response = []
        mask = []
        for turn in turns:
            response += [*turn, 7]
            mask += [1] * len(turn) + [0]
        response.pop()  # nothing follows the last turn
        mask.pop()
        trajectories.append(replace(trajectory([3], response, mask=mask, index=number), fork=at))
    return trajectories


@given(trees())
def test_every_path_spells_its_trajectory_and_common_beginnings_stand_once(
    trajectories: list[Trajectory],
):
    graph = TrajectoryGraph.of(trajectories)
    for which, (t, path, ends) in enumerate(
        zip(trajectories, graph.paths, graph.ends, strict=True)
    ):
        sampled = tuple(i for i, m in zip(t.response_ids, t.response_mask, strict=True) if m)
        assert tuple(i for node in path for i in graph.nodes[node].ids) == sampled
        assert ends[-1] == len(t.response_ids)
        assert [graph.nodes[node].parent for node in path] == [None, *path[:-1]]
        assert all(which in graph.nodes[node].members for node in path)
        if t.fork and not t.fork.at_prompt:
            parent = next(
                i for i, p in enumerate(trajectories) if p.trajectory_id == t.fork.parent_id
            )
            common = set(path) & set(graph.paths[parent])
            assert sum(len(graph.nodes[node].ids) for node in common) >= t.num_inherited
    assert sum(len(node.members) for node in graph.nodes) == sum(map(len, graph.paths))
