"""Who runs next when pages are short: what waiting sessions will need again is weighed against who
is first.
"""

import functools
from dataclasses import replace

import pytest

from jax_agent_rl.jetstream.admission import MIN_WAITS, Patience
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.tiny import TINY, tiny_params
from tests.unit.jetstream.test_kv_offloading import PROMPTS, SHAPES
from tests.unit.jetstream.test_return_times import Clock

# Pages of 32: two for a session that waits and two for a request that runs.
FULL = replace(SHAPES, max_concurrent_decodes=3, kv_cache_tokens=128, kv_offloading_bytes=0)


def test_an_empty_slot_may_cost_what_computing_again_would_cost_the_others():
    clock = Clock()
    patience = Patience(clock)
    assert patience.cost("a", 100, running=4) == 0.0, "nothing is known"
    patience.add_prefill(1000, 2.0)
    assert patience.cost("a", 100, running=4) == pytest.approx(4 * 0.002)
    assert patience.cost("a", 100, running=0) == 0.0, "nobody is stalled"
    clock.now += 0.79
    assert patience.cost("a", 100, running=4) > 0
    clock.now += 0.02  # more than 100 * 4 * 0.002 s
    assert patience.cost("a", 100, running=4) == 0.0
    assert patience.cost("b", 100, running=4) > 0, "who comes next waits anew"


@functools.cache
def programs() -> ProgramTable:
    """Compiled once for both tests."""
    return ProgramTable()


def crowded() -> tuple[Scheduler, Clock, list[int]]:
    """A session waits, another one runs, a third one would take the first one's pages; with the
    first one's context.
    """
    clock = Clock()
    engine = JaxEngine(TINY, FULL, program_table=programs())
    on = Scheduler(engine, engine.load_params(tiny_params()), clock=clock)
    for _ in range(MIN_WAITS):
        on.return_times.leave("known")
        clock.now += 10.0
        on.return_times.come_back("known")
    submit(on, "waits", PROMPTS[0], count=30)
    context = list(PROMPTS[0])
    while on.running or on.waiting:
        context += [i for _, chunk in on.step() for i in chunk.token_ids]
    submit(on, "runs", PROMPTS[1], count=39)
    on.step()
    on.patience.add_prefill(10**6, 10.0**6)  # a second for an id
    submit(on, "new", PROMPTS[2], count=2)
    on.step()
    return on, clock, context


def submit(on: Scheduler, session: str, prompt: list[int], *, count: int) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
    on.submit(
        GenerateRequest(
            request_id=session, prompt_ids=tuple(prompt), sampling=sampling, session_id=session
        )
    )


def test_a_session_that_returns_soon_keeps_its_kv_and_overtakes_waiting_ones():
    on, _, context = crowded()
    assert set(on.running) == {"runs"}
    assert on.waiting == 1
    submit(on, "waits", [*context, 5], count=2)
    returned, *_ = [run for run, _ in on.step() if run.request.session_id == "waits"]
    assert returned.cached_tokens == len(context) - 1


def test_who_is_first_does_not_wait_for_ever():
    on, clock, _ = crowded()
    clock.now += len(PROMPTS[2]) + 1  # one request would be stalled for a second by each of its ids
    assert "new" in {run.request.session_id for run, _ in on.step()}
