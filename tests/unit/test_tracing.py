"""Spans: nested as the work is, also across tasks; nothing at all where nobody traces."""

import asyncio
import itertools
import tracemalloc

import pytest

from jax_agent_rl.tracing import MIN_WAIT_NS, NO_SPAN, Trace, Tracer, current, span, under


class Ticks:
    """Nanoseconds that pass at every look."""

    def __init__(self, step: int = 10) -> None:
        self.now = 0
        self.step = step

    def __call__(self) -> int:
        self.now += self.step
        return self.now


def tracer(max_traces: int = 8, step: int = 10) -> tuple[Tracer, list[Trace]]:
    traces: list[Trace] = []
    return Tracer(
        traces.append, max_per_step=max_traces, clock=Ticks(step), wall=lambda: 5_000_000_000
    ), traces


def named(trace: Trace) -> list[tuple[str, str, int]]:
    return [(s.name, s.about, s.parent) for s in trace.spans]


FACTS = {
    "trajectory_id": "t",
    "group_id": "g",
    "group_size": 4,
    "step": 3,
    "sample": 1,
    "rollout": 0,
    "validate": False,
}


def test_where_nobody_traces_a_span_is_nothing_and_false():
    assert span("tool", "calculator") is NO_SPAN
    with span("generate") as traced:
        assert not traced and current() is None


def test_off_allocates_nothing():
    def work():
        for _ in itertools.repeat(None, 1000):
            with span("tool", "calculator") as traced:
                if traced:
                    traced.set(never="reached")

    work()
    tracemalloc.start()
    try:
        work()
        old_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        work()
        new_bytes, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert new_bytes <= old_bytes and peak - old_bytes < 1000, (
        "less than a byte a span: nothing is made for one"
    )


def test_spans_stand_within_those_around_them():
    recorder, traces = tracer()
    with recorder.trajectory(**FACTS) as run:
        run.set(reward=1.0)
        with span("generate") as generated:
            with span("tool", "inner"):
                pass
        generated.set(text="late facts count, too")
        with span("reward", "math"):
            pass
    (trace,) = traces
    assert named(trace) == [
        ("run", "t", -1),
        ("generate", "", 0),
        ("tool", "inner", 1),
        ("reward", "math", 0),
    ]
    assert (trace.trajectory_id, trace.group_id, trace.step, trace.sample, trace.rollout) == (
        "t",
        "g",
        3,
        1,
        0,
    )
    assert trace.spans[0].attributes == {"reward": 1.0}
    assert trace.spans[1].attributes == {"text": "late facts count, too"}
    run, *inner = trace.spans
    assert all(run.start_ns < s.start_ns < s.end_ns < run.end_ns for s in inner)


async def test_tasks_of_two_trajectories_never_mix():
    recorder, traces = tracer()

    async def tool(name):
        with span("tool", name):
            await asyncio.sleep(0)

    async def play(name):
        with recorder.trajectory(**FACTS | {"trajectory_id": name}):
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(tool(f"{name}-{number}"))

    await asyncio.gather(play("a"), play("b"))
    for trace in traces:
        tools = {s.about for s in trace.spans[1:]}
        assert tools == {f"{trace.trajectory_id}-{n}" for n in range(3)}
        assert {s.parent for s in trace.spans[1:]} == {0}


async def test_a_thread_belongs_to_who_asked_it():
    recorder, traces = tracer()

    def reward():
        with span("tool", "in a thread"):
            pass

    with recorder.trajectory(**FACTS):
        await asyncio.to_thread(reward)
    assert named(traces[0])[1] == ("tool", "in a thread", 0)


async def test_work_in_a_foreign_task_can_be_put_under_a_trajectory():
    recorder, traces = tracer()
    asked = asyncio.Queue()

    async def server():
        around = await asked.get()
        with under(around), span("generate"):
            pass
        assert current() is None

    serving = asyncio.create_task(server())
    with recorder.trajectory(**FACTS):
        asked.put_nowait(current())
        await serving
    assert named(traces[0])[1] == ("generate", "", 0)


def test_a_failure_is_recorded_and_raised():
    recorder, traces = tracer()
    with pytest.raises(KeyError), recorder.trajectory(**FACTS):
        with span("tool", "broken"):
            raise KeyError("no such thing")
    assert [s.error for s in traces[0].spans] == ["KeyError: 'no such thing'"] * 2


async def test_what_ends_after_its_trajectory_is_left_out():
    recorder, traces = tracer()
    ended = asyncio.Event()
    go_on = asyncio.Event()

    async def given_up():
        with span("tool", "slow"):
            with span("tool", "done"):
                pass
            ended.set()
            await go_on.wait()

    with recorder.trajectory(**FACTS):
        task = asyncio.create_task(given_up())
        await ended.wait()
    go_on.set()
    await task
    assert named(traces[0]) == [("run", "t", -1), ("tool", "done", 0)]


def test_each_step_and_each_evaluation_has_its_own_cap():
    recorder, traces = tracer(max_traces=2)
    for step, validate, rollout in itertools.product((1, 2), (False, True), range(4)):
        facts = FACTS | {"step": step, "validate": validate, "rollout": rollout}
        with recorder.trajectory(**facts) as run:
            assert bool(run) == (rollout < 2)
            assert bool(span("generate")) == (rollout < 2)
    assert [(t.step, t.validate, t.rollout) for t in traces] == list(
        itertools.product((1, 2), (False, True), (0, 1))
    )


@pytest.mark.parametrize(
    ("max_traces", "group_size", "num_traced"),
    [(8, 3, [3, 3, 0]), (8, 4, [4, 4, 0]), (4, 16, [4, 0, 0])],
)
def test_groups_are_traced_whole_as_far_as_the_cap_holds_any(max_traces, group_size, num_traced):
    recorder, traces = tracer(max_traces=max_traces)
    for rollout, group in itertools.product(range(group_size), "abc"):  # they run side by side
        with recorder.trajectory(
            **FACTS | {"group_id": group, "group_size": group_size, "rollout": rollout}
        ):
            pass
    assert [sum(trace.group_id == group for trace in traces) for group in "abc"] == num_traced


@pytest.mark.parametrize(("step", "is_recorded"), [(10, False), (MIN_WAIT_NS, True)])
def test_a_wait_that_took_no_time_is_left_out(step, is_recorded):
    recorder, traces = tracer(step=step)
    with recorder.trajectory(**FACTS), span("wait", "slot"):
        pass
    assert (("wait", "slot", 0) in named(traces[0])) == is_recorded


def test_times_are_of_the_wall_clock():
    recorder, traces = tracer()
    with recorder.trajectory(**FACTS):
        pass
    assert 5_000_000_000 <= traces[0].spans[0].start_ns < 5_000_001_000
