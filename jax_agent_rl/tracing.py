"""Spans of a trajectory. Without tracing they cost one look-up and no allocation.

::

    with tracer.trajectory(...) as run:       collector     run ─┬─ wait      for a slot
        with span("generate") as traced:      client             ├─ generate ── wait  for an engine
            output = await ...                                   ├─ tool      calculator
            if traced:                                           ├─ generate
                traced.set(stop_reason="eos")                    └─ reward

A context variable holds the open span, the parent of new ones, also across tasks and threads.
Without a traced trajectory, :func:`span` returns :data:`NO_SPAN`, which is false and does nothing.
A trace is emitted when its trajectory ends; spans that end later (in an abandoned thread) are left
out.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

SpanName = Literal["run", "generate", "tool", "reward", "wait"]
MIN_WAIT_NS = 1_000_000
"""Shorter waits are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One operation of a trajectory.

    Attributes:
        name: its kind.
        about: its object: the tool's name, what was waited for, the reward's data source; may be
            empty.
        parent: number of the parent span; -1 for the first one.
        start_ns: when it began, in nanoseconds since the epoch.
        end_ns: when it ended, likewise.
        attributes: further JSON values.
        error: None, or why it failed.
    """

    name: str
    about: str
    parent: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The spans of one trajectory.

    Attributes:
        step: training step (of asynchronous trainers: the one its row was drawn for).
        sample: number of the row within the step.
        rollout: number of the trajectory within its group.
        validate: whether it is an evaluation.
        spans: in order of their start; the first one is ``run``, which holds all others.
    """

    trajectory_id: str
    group_id: str
    step: int
    sample: int
    rollout: int
    validate: bool
    spans: tuple[Span, ...]


class OpenSpan:
    """A started span, used as a context manager.

    Make it with :func:`span` or :meth:`Tracer.trajectory`.
    """

    __slots__ = (
        "name",
        "about",
        "_record",
        "_parent",
        "_number",
        "_start",
        "_attributes",
        "_token",
    )

    def __init__(self, record: _Record, name: SpanName, about: str, parent: int) -> None:
        self.name = name
        self.about = about
        self._record = record
        self._parent = parent
        self._attributes: dict[str, Any] = {}
        self._number, self._start = record.begin()

    def set(self, **attributes: Any) -> None:
        """Add attributes, also after the span has ended."""
        self._attributes.update(attributes)

    def child(self, name: SpanName, about: str) -> OpenSpan:
        """Start a span within this one."""
        return OpenSpan(self._record, name, about, self._number)

    def __enter__(self) -> OpenSpan:
        self._token: Token[OpenSpan | None] = _OPEN.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _OPEN.reset(self._token)

        reason = None
        if error is not None:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")

        ended_span = Span(
            name=self.name,
            about=self.about,
            parent=self._parent,
            start_ns=self._start,
            end_ns=self._record.now(),
            attributes=self._attributes,
            error=reason,
        )
        self._record.end(self._number, ended_span)


class NoSpan:
    """Placeholder for a span where nothing is traced: false, and does nothing."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def set(self, **attributes: Any) -> None:
        """Do nothing."""

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, *error: object) -> None:
        return None


NO_SPAN = NoSpan()
_OPEN: ContextVar[OpenSpan | None] = ContextVar("open_span", default=None)


def span(name: SpanName, about: str = "") -> OpenSpan | NoSpan:
    """Start a span of the traced trajectory; return :data:`NO_SPAN` if there is none."""
    parent = _OPEN.get()
    if parent is None:
        return NO_SPAN
    return parent.child(name, about)


def current() -> OpenSpan | None:
    """Return the open span, for :func:`under`."""
    return _OPEN.get()


@contextlib.contextmanager
def under(parent: OpenSpan | None) -> Iterator[None]:
    """Make ``parent`` the open span.

    This is for work on behalf of a trajectory in a task that was not started by it. None traces
    nothing.
    """
    token = _OPEN.set(parent)
    try:
        yield
    finally:
        _OPEN.reset(token)


class Tracer:
    """Selection of the trajectories to trace, and emission of their traces.

    Args:
        emit: receives a trace when its trajectory ends; must be quick and must not raise.
        max_per_step: how many trajectories are traced at most, per step and per evaluation. They
            are whole groups in order of their start (rows are shuffled, so this is unbiased), or
            the first members of a larger group.
        clock: nanoseconds, monotonic.
        wall: nanoseconds since the epoch.
    """

    def __init__(
        self,
        emit: Callable[[Trace], None],
        *,
        max_per_step: int,
        clock: Callable[[], int] = time.perf_counter_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._emit = emit
        self._max_per_step = max_per_step
        self._clock = clock
        self._wall = wall

        # How many members of each group are traced, by whether it is an evaluation, and step.
        self._traced_members: defaultdict[tuple[bool, int], dict[str, int]] = defaultdict(dict)

    @contextlib.contextmanager
    def trajectory(
        self,
        *,
        trajectory_id: str,
        group_id: str,
        group_size: int,
        step: int,
        sample: int,
        rollout: int,
        validate: bool,
    ) -> Iterator[OpenSpan | NoSpan]:
        """Trace one trajectory of a group of ``group_size``; its span is ``run``.

        :class:`Trace` describes the other arguments.
        """
        traced_members = self._traced_members[validate, step]
        if rollout >= self._count_members(group_id, group_size, traced_members):
            yield NO_SPAN
            return

        record = _Record(clock=self._clock, epoch=self._wall() - self._clock())
        try:
            with OpenSpan(record, "run", trajectory_id, -1) as run:
                yield run
        finally:
            trace = Trace(
                trajectory_id=trajectory_id,
                group_id=group_id,
                step=step,
                sample=sample,
                rollout=rollout,
                validate=validate,
                spans=record.close(),
            )
            self._emit(trace)

    def _count_members(self, group_id: str, group_size: int, traced_members: dict[str, int]) -> int:
        """Return how many members of a group are traced; choose the group if its step has room.

        Args:
            traced_members: the groups chosen in this step, with that number.
        """
        if group_id not in traced_members:
            room = self._max_per_step - sum(traced_members.values())
            if group_size > room and traced_members:
                return 0
            traced_members[group_id] = min(group_size, room)
        return traced_members[group_id]


@dataclass(kw_only=True, slots=True)
class _Record:
    """Spans of an unfinished trace.

    Attributes:
        clock: nanoseconds, monotonic.
        epoch: what to add to the clock for nanoseconds since the epoch.
        ended: spans that have ended, by number.
        num_spans: spans so far, open ones included.
    """

    clock: Callable[[], int]
    epoch: int
    ended: dict[int, Span] = field(default_factory=dict)
    num_spans: int = 0

    def now(self) -> int:
        """Return nanoseconds since the epoch, monotonic within a trace."""
        return self.epoch + self.clock()

    def begin(self) -> tuple[int, int]:
        """Return the number and start of a new span."""
        number = self.num_spans
        self.num_spans += 1
        return number, self.now()

    def end(self, number: int, span: Span) -> None:
        """Record a span, unless it is a short wait."""
        if span.name != "wait" or span.end_ns - span.start_ns >= MIN_WAIT_NS:
            self.ended[number] = span

    def close(self) -> tuple[Span, ...]:
        """Return the ended spans, renumbered.

        Children of unfinished spans become the first span's.
        """
        ended = sorted(self.ended.items())

        new_numbers = {-1: -1}
        for new_number, (number, _) in enumerate(ended):
            new_numbers[number] = new_number

        spans = []
        for _, span in ended:
            parent = new_numbers.get(span.parent, 0)
            spans.append(replace(span, parent=parent))
        return tuple(spans)
