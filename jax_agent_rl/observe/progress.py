"""The live display of a run: a growing table of steps, and below it the present activity.

::

       step reward accuracy tools roll tok/s learn tok/s  |Δlogp|   time    left
      4/16   0.521        ·  1.04       1210        2233  2.1e-06    27s   5m24s
      warning (zero_variance): 67% of the groups have equal rewards …
      ▸ step 5: rollout 31/48 trajectories  (9 s)
      ━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  4/16, 5m15s left  ⚠ zero_variance
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jax_agent_rl.utils.text import printable

HEARTBEAT_SECONDS = 20.0
HEADER_EVERY = 20
HEADER = (  # with its widths in step() within 80 columns
    f"{'step':>7} {'reward':>6} {'accuracy':>8} {'tools':>5} {'roll tok/s':>10} {'learn tok/s':>11}"
    f" {'|Δlogp|':>8} {'time':>6} {'left':>7}"
)


class Progress:
    """Live display of a run in a terminal; on a pipe, plain lines and a heartbeat every 20 seconds.

    Use it as a context manager. ``phase`` shows the current activity, with an optional live count;
    ``step`` adds a line to the table.
    """

    def __init__(
        self, console: Console, *, total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._total = total_steps
        self._clock = clock
        self._phase = "starting"
        self._count: Callable[[], str] = lambda: ""
        self._phase_start = clock()
        self._last_printed = self._phase_start
        self._printed_steps = 0
        self._finished_steps = 0
        self._end_time: float | None = None
        self._warnings: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._live = Live(
            get_renderable=self.display, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        else:
            heartbeat = threading.Thread(target=self._beat, name="progress-heartbeat", daemon=True)
            heartbeat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        if self._console.is_terminal:
            self._live.stop()

    def phase(self, name: str, count: Callable[[], str] = lambda: "") -> None:
        """Show what happens now; ``count`` returns live detail, such as finished trajectories."""
        with self._lock:
            self._phase = name
            self._count = count
            self._phase_start = self._clock()

    def print_line(self, text: str) -> None:
        """Print a permanent line."""
        self._last_printed = self._clock()
        soft_wrap = not self._console.is_terminal
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=soft_wrap)

    def resumed(self, step: int) -> None:
        """Continue the display after this step."""
        with self._lock:
            self._finished_steps = step
        self.print_line(f"resumed after step {step}")

    def step(self, record: Mapping[str, Any], *, seconds_left: float) -> None:
        """Add a finished step (a ``metrics.jsonl`` record of kind ``step``) to the table."""
        if self._printed_steps % HEADER_EVERY == 0:
            self._console.print(Text(HEADER, style="bold"))
        self._printed_steps += 1
        with self._lock:
            self._finished_steps = record["step"]
            self._end_time = self._clock() + seconds_left

        accuracy = "·"
        if record.get("accuracy") is not None:
            accuracy = f"{record['accuracy']:.1%}"
        self.print_line(
            f"{record['step']:>3}/{self._total:<3} {record['reward_mean']:>6.3f} {accuracy:>8}"
            f" {record['tool_calls_mean']:>5.2f} {record['rollout_tokens_per_second']:>10.0f}"
            f" {record['learner_tokens_per_second']:>11.0f} {record['logprob_gap_max']:>8.1e}"
            f" {duration(record['step_seconds']):>6} {duration(seconds_left):>7} "
            f" {role_rewards(record)}".rstrip()
        )

    def warn(self, names: Sequence[str]) -> None:
        """Show the names of the active warnings."""
        with self._lock:
            self._warnings = tuple(names)

    def display(self) -> Group:
        """Return what a terminal shows below the table, redrawn several times a second."""
        with self._lock:
            finished_steps = self._finished_steps
            end_time = self._end_time
            warnings = self._warnings

        steps = f"{finished_steps}/{self._total}"
        if end_time is not None:
            steps += f", {duration(end_time - self._clock())} left"
        warning_names = ""
        if warnings:
            warning_names = "⚠ " + ", ".join(warnings)

        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            " ",
            ProgressBar(total=self._total, completed=finished_steps, width=40),
            steps,
            Text(warning_names, style="red", overflow="ellipsis", no_wrap=True),
        )
        return Group(self._phase_line(), bar)

    def _phase_line(self) -> Text:
        """Return the line about the present activity."""
        with self._lock:
            name = self._phase
            count = self._count
            start = self._phase_start
        detail = count()
        activity = f"{name}, {detail}" if detail else name
        return Text(f"  ▸ {activity} ({self._clock() - start:.0f} s)", style="yellow")

    def _beat(self) -> None:
        """Print the present activity now and then, unless something else was printed lately."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            if self._clock() - self._last_printed >= HEARTBEAT_SECONDS / 2:
                self._console.print(self._phase_line())


def duration(seconds: float) -> str:
    """Format seconds: ``75`` -> ``1m15s``."""
    seconds = max(0, round(seconds))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{seconds:02}s"
    return f"{seconds}s"


def print_line(console: Console, text: str) -> None:
    """Print text without markup or colours.

    The text cannot steer the terminal, and only the terminal breaks its lines.
    """
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def role_rewards(record: Mapping[str, Any]) -> str:
    """Return the mean reward of each role, for agents with several.

    >>> role_rewards({"role/solver/reward_mean": 0.5, "role/checker/reward_mean": 0.25})
    'solver 0.50, checker 0.25'
    """
    rewards = {}
    for name, value in record.items():
        if name.endswith("/reward_mean"):
            role = name.split("/")[1]
            rewards[role] = value
    return ", ".join(f"{role} {value:.2f}" for role, value in rewards.items())


def number_ranges(numbers: Collection[int], *, dash: str = "–") -> str:
    """Return numbers in ascending order as text.

    >>> number_ranges([8, 1, 2, 3, 5, 7])
    '1–3, 5, 7–8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])

    parts = []
    for run in runs:
        if len(run) == 1:
            parts.append(str(run[0]))
        else:
            parts.append(f"{run[0]}{dash}{run[-1]}")
    return ", ".join(parts)
