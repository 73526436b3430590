"""The experts of a context stay with their positions through cuts, joins, the wire and the way to
other processes.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.rollout.http.wire import decode_output, encode_output
from jax_agent_rl.rollout.merge_outputs import remaining_request
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime.multihost import decode_groups, encode_groups
from jax_agent_rl.types import RoutedExperts, SamplingParams, StopReason, TokenOutput, join_routed
from tests.messages import raises
from tests.trajectories import random_groups, with_routed_experts

WHOLE = np.random.default_rng(0).integers(0, 256, (12, 3, 2)).astype(np.uint8)


def span(start: int, end: int, experts: np.ndarray = WHOLE) -> RoutedExperts:
    return RoutedExperts.of(start, experts[start:end])


def array(routed: RoutedExperts | None) -> np.ndarray:
    assert routed is not None
    return np.reshape(routed.numbers, routed.shape)


def output(ids: int, routed: RoutedExperts | None) -> TokenOutput:
    return TokenOutput(
        token_ids=tuple(range(5, 5 + ids)),
        log_probs=(-1.0,) * ids,
        policy_versions=(0,) * ids,
        stop_reason=StopReason.ABORTED,
        context_digest="",
        routed_experts=routed,
    )


@given(st.tuples(*[st.integers(0, 12)] * 4))
def test_joined_parts_are_the_whole_and_positions_never_move(cuts: tuple[int, int, int, int]):
    begin = sorted(cuts)[0]
    seam = cuts[1]
    back = cuts[2]
    end = sorted(cuts)[3]
    first = span(begin, max(begin, seam))
    second = span(min(back, max(begin, seam)), end)
    joined = join_routed(first, second)
    assert joined == span(begin, max(first.end, end) if second.start <= first.end else first.end)
    assert joined is not None
    assert joined.until(seam).end == min(max(seam, begin), joined.end)
    np.testing.assert_array_equal(array(joined), WHOLE[joined.start : joined.end])


def test_the_first_part_wins_and_gaps_are_not_joined():
    zeros = np.zeros_like(WHOLE)
    np.testing.assert_array_equal(
        array(join_routed(span(0, 5), span(3, 7, zeros))), np.concatenate([WHOLE[:5], zeros[5:7]])
    )
    assert join_routed(span(0, 5), span(6, 9)) == span(0, 5)
    assert join_routed(None, span(6, 9)) == span(6, 9)


def test_an_interrupted_output_asks_for_what_is_missing_and_ends_up_whole():
    request = GenerateRequest(
        request_id="r", prompt_ids=(3, 4, 5, 6), sampling=SamplingParams(max_tokens=6)
    )
    so_far = output(3, span(0, 6))
    remaining = remaining_request(request, so_far)
    assert remaining.routed_experts_prompt_start == 6  # the last of the seven ids was not fed
    assert so_far.then(output(3, span(6, 9))).routed_experts == span(0, 9)
    lost = output(3, None)  # its server died before it could say
    remaining = remaining_request(replace(request, routed_experts_prompt_start=2), lost)
    assert remaining.routed_experts_prompt_start == 2
    assert lost.then(output(3, span(2, 9))).routed_experts == span(2, 9)


def test_ids_that_are_cut_off_take_their_positions_along():
    assert output(5, span(0, 8)).first(2).routed_experts == span(0, 5)
    assert output(5, span(0, 8)).first(5).routed_experts == span(0, 8)
    assert output(5, None).first(2).routed_experts is None


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_choice_takes_a_byte_or_two_beyond_256_experts(kind: type):
    chosen = np.arange(24, dtype=kind).reshape(4, 3, 2) * (1 if kind is np.uint8 else 300)
    routed = RoutedExperts.of(7, chosen)
    assert len(routed.data) == 24 * np.dtype(kind).itemsize
    np.testing.assert_array_equal(array(routed), chosen)
    sent = json.loads(json.dumps(encode_output(output(2, routed))))
    assert decode_output(sent) == output(2, routed)
    assert len(sent["routed_experts"]["data"]) == len(routed.data) * 4 // 3


def test_bytes_of_another_size_are_refused():
    with raises(ValueError, key="(2, 3, 2)", value=("12 bytes", 11)):
        RoutedExperts(start=0, shape=(2, 3, 2), data=bytes(11))


def test_other_processes_of_a_learner_get_them():
    groups = with_routed_experts(random_groups(0), layers=2, experts=8, per_token=2)
    assert decode_groups(json.loads(json.dumps(encode_groups(groups)))) == groups
