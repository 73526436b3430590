"""One learner over several processes (hosts): process 0 leads, the others do the same learner work beside it.

::

    process 0   rollouts, rewards, filters ─► groups ─┬─► Learner.update ─► metrics, weights to the engines
    process 1…                                        └─► Learner.update          (follow)

Data still flow one way. Agents and tools exist on process 0 alone; engines on the learner's devices exist on every
process (``runtime.host_engines``). What process 0 tells the others is a command and JSON, sent as an array of bytes:
what the learner reads of the groups (ids, log-probs, rewards, pictures; no pickle), so every process packs the same
rows and puts those of its own devices on them. Metrics are computed on all devices and come out the same everywhere.
Each process reads from the model's files what is for its own devices. Checkpoints are written by all, each its own
shards, into a folder all of them see; what fails on one ends the run on all (``learner.checkpoint``).

While agents run, the others' learners wait at a barrier of jax's coordination service, which unlike a collective on
devices has no short timeout and notices when a process dies: then all others end, too.

One command is carried out at a time, by all. What interrupts a run on process 0 (a signal) therefore waits for the
learner's thread, and whether a step's updates begin is decided by process 0 alone, see :meth:`ControlChannel.gate`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from pydantic import TypeAdapter

from jax_agent_rl.config import MultihostConfig
from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.learner.checkpoint import Checkpointer, located
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck, through_gate
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.optimized_params import LearnerState
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import gathered
from jax_agent_rl.rollout.http.images import decode_media, encode_media
from jax_agent_rl.types import Group, Trajectory, Turn

if TYPE_CHECKING:
    from jax_agent_rl.runtime.multihost_engines import WeightBuffer

logger = logging.getLogger(__name__)

ADDRESS = "JAX_COORDINATOR_ADDRESS"
PATIENCE = 7 * 86400  # seconds a follower waits for the next command: longer than any rollout
STOP_PATIENCE = 120  # seconds the leader waits for followers that may be gone
COMMANDS = ("update", "params", "weights", "store", "open", "save", "wait", "restore", "close", "stop")

_GROUPS = TypeAdapter(list[Group])


def initialize(config: MultihostConfig) -> int:
    """Joins the other processes, if there are any; call it before anything else uses jax.

    Returns:
        this process's number; 0 leads.

    Raises:
        ConfigError: the numbers do not fit, or the coordinator cannot be reached.
    """
    address = config.coordinator or os.environ.get(ADDRESS)
    if address is None and (config.num_processes or 1) > 1:
        raise ConfigError(
            f"learner.multihost.num_processes={config.num_processes}, but nothing says where they meet; set "
            f"learner.multihost.coordinator to HOST:PORT of process 0, or ${ADDRESS}"
        )
    if address is None:
        return 0
    automatic = address == "auto"
    try:
        jax.distributed.initialize(
            coordinator_address=None if automatic else address,
            num_processes=config.num_processes,
            process_id=config.process_id,
            initialization_timeout=config.timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"learner.multihost: process {config.process_id} of {config.num_processes} could not join {address!r} "
            f"({error}); start every process with the same coordinator and num_processes, and its own process_id"
        ) from error
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Process 0 alone finds its programs there, and on CPUs one that was loaded may exchange arrays in another order
        # than one just compiled: the processes would wait for each other forever.
        jax.config.update("jax_enable_compilation_cache", False)
    return jax.process_index()


# --- what travels -------------------------------------------------------------------------------------------------


def encode_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What the learner reads of groups, for JSON; floats keep every bit."""
    return [asdict(replace(group, trajectories=tuple(map(_lean, group.trajectories)))) for group in groups]


def decode_groups(encoded: list[dict[str, Any]]) -> list[Group]:
    """The inverse of :func:`encode_groups`."""
    groups = _GROUPS.validate_python(encoded)
    return [replace(group, trajectories=tuple(map(_with_pictures, group.trajectories))) for group in groups]


def _lean(trajectory: Trajectory) -> Trajectory:
    """Without the texts and records that only people and rewards read."""

    def lean(turn: Turn) -> Turn:
        calls = tuple(replace(c, arguments=None, observation="", media={}) for c in turn.tool_calls)
        return replace(turn, tool_calls=calls, appended_media=encode_media(turn.appended_media))

    turns = tuple(map(lean, trajectory.turns))
    segments = tuple(map(_lean, trajectory.segments))
    shown = encode_media(trajectory.prompt_media)
    return replace(trajectory, turns=turns, segments=segments, row={}, messages=(), metrics={}, prompt_media=shown)


def _with_pictures(trajectory: Trajectory) -> Trajectory:
    """With PNG read as pictures."""
    turns = tuple(replace(turn, appended_media=decode_media(turn.appended_media)) for turn in trajectory.turns)
    segments = tuple(map(_with_pictures, trajectory.segments))
    return replace(trajectory, turns=turns, segments=segments, prompt_media=decode_media(trajectory.prompt_media))


class ControlChannel:
    """Commands from process 0 to all, in order."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._stopped = False

    @contextlib.contextmanager
    def command(self, command: str, payload: Any = None) -> Iterator[None]:
        """Process 0: tells the others what comes next, and does it itself inside, while no other thread commands."""
        with self._lock:
            self._exchange(COMMANDS.index(command), json.dumps(payload).encode(), PATIENCE)
            yield

    def stop(self) -> None:
        """Process 0: tells the others to end; once."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            try:
                self._exchange(COMMANDS.index("stop"), b"null", STOP_PATIENCE)
                jax.distributed.shutdown()  # waits for all: from here on each may end in its own way
            except jax.errors.JaxRuntimeError as error:
                logger.warning("the other processes could not be told to stop, and end by themselves: %s", error)

    def gate(self, own: StepCancellation | None = None) -> StepCancellation:
        """One step's updates on all processes: they begin, or are abandoned, as process 0's ``own`` gate says."""
        return _SharedGate(self, own or StepCancellation())

    def receive(self) -> tuple[str, Any]:
        """The others: waits for the next command."""
        command, payload = self._exchange(-1, b"", PATIENCE)
        return COMMANDS[command], json.loads(payload)

    def meet(self, what: str, patience: int = PATIENCE) -> None:
        """Returns when all processes are here."""
        self._count += 1
        wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        wait(key=f"jax_agent_rl-{what}-{self._count}", timeout_ms=patience * 1000)

    def _exchange(self, command: int, payload: bytes, patience: int) -> tuple[int, bytes]:
        self.meet("command", patience)
        command, length = map(int, _from_process_0([command, len(payload)]))
        # A power of two: few shapes, so few programs.
        block = np.zeros(1 << max(length - 1, 1).bit_length(), np.uint8)
        block[: len(payload)] = np.frombuffer(payload, np.uint8)
        return command, np.asarray(multihost_utils.broadcast_one_to_all(block))[:length].tobytes()


class _SharedGate(StepCancellation):
    def __init__(self, line: ControlChannel, own: StepCancellation) -> None:
        super().__init__()
        self._line, self._own = line, own

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            if not self.passed:  # once passed, it stays open
                self._line.meet("update")  # not while the gate is held: the others may still compile
                self._decide(held)
            held.enter_context(super().update())
            yield

    def unchanged(self) -> None:
        super().unchanged()
        if not self.passed:  # then this update passed the own gate, too
            self._own.unchanged()

    def _decide(self, held: contextlib.ExitStack) -> None:
        try:
            held.enter_context(self._own.update())
            closed = False
        except StepCancelled:
            closed = True
        if _from_process_0([closed, 0])[0]:
            raise StepCancelled


def _from_process_0(numbers: Sequence[int]) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.int32)))


# --- process 0 ----------------------------------------------------------------------------------------------------


class LeadingLearner:
    """A :class:`~jax_agent_rl.learner.learner.Learner` whose every call happens on all processes."""

    def __init__(self, learner: Learner, line: ControlChannel) -> None:
        self._learner, self._line = learner, line

    @property
    def state(self) -> LearnerState:
        """This process's part; see :attr:`Learner.state`."""
        return self._learner.state

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._learner.state = state

    @property
    def params(self) -> Params:
        """The whole parameters, on this process's first device: what an engine of this process takes."""
        with self._line.command("params"):
            # One at a time: no device but the first ever holds more than one parameter whole.
            return jax.tree.map(lambda x: gathered(x).addressable_data(0), self._learner.params)

    def hand_out(self, version: int, shelf: WeightBuffer) -> None:
        """Puts a copy of the parameters on every process's shelf; ``shelf`` is that of this one."""
        with self._line.command("weights", {"version": version}):
            shelf.put(version, self._learner.params)

    def store(self, folder: str) -> str:
        """See :meth:`Learner.store`: every process writes the shards of its own devices."""
        with self._line.command("store", {"folder": folder}):
            try:
                stored.write_part(folder, self._learner.params, part=0)
            finally:  # the others are on their way there
                self._line.meet("store")
            return stored.publish(folder, parts=jax.process_count())

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far."""
        return self._learner.programs_compiled

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda done, total: None,
        gate: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """See :meth:`Learner.update`."""
        own = gate or StepCancellation()
        payload = {"groups": encode_groups(groups), "masked": sorted(masked), "since": check.since}
        with self._line.command("update", payload), through_gate(check, own) as checked:
            return self._learner.update(groups, masked=masked, tick=tick, gate=self._line.gate(own), check=checked)


class LeadingCheckpointer:
    """A :class:`~jax_agent_rl.learner.checkpoint.Checkpointer` whose every call happens on all processes."""

    def __init__(self, folder: Path | str, *, keep: int, line: ControlChannel) -> None:
        self._line = line
        with line.command("open", {"folder": str(located(folder)), "keep": keep}):
            self._own = Checkpointer(folder, keep=keep)

    @property
    def steps(self) -> list[int]:
        """See :attr:`Checkpointer.steps`."""
        return self._own.steps

    @property
    def latest_step(self) -> int | None:
        """See :attr:`Checkpointer.latest_step`."""
        return self._own.latest_step

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """See :meth:`Checkpointer.save`."""
        with self._line.command("save", {"step": step, "progress": progress}):
            self._own.save(step, state, progress)

    def check(self) -> None:
        """See :meth:`Checkpointer.check`: what failed on another process is known here without asking it."""
        self._own.check()

    def wait(self) -> None:
        """See :meth:`Checkpointer.wait`."""
        with self._line.command("wait"):
            self._own.wait()

    def written(self) -> str:
        """See :meth:`Checkpointer.written`: of all processes."""
        return self._own.written()

    def restore(self, like: Any, *, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """See :meth:`Checkpointer.restore`; the others take the state they restored."""
        with self._line.command("restore", {"step": step}):
            return self._own.restore(like, step=step)

    def close(self) -> None:
        """See :meth:`Checkpointer.close`."""
        with self._line.command("close"):
            self._own.close()


@contextlib.contextmanager
def leading() -> Iterator[ControlChannel | None]:
    """For process 0: the line to the others, who are told to stop in the end. None if there are no others."""
    if jax.process_count() == 1:
        yield None
        return
    line = ControlChannel()
    try:
        yield line
    finally:
        line.stop()


# --- the others ---------------------------------------------------------------------------------------------------


def follow(learner: Learner, shelf: WeightBuffer | None) -> None:
    """Does what process 0 says until it says stop.

    Args:
        shelf: where the weights of this process's engine are put, if there is one.

    Ctrl-C and SIGTERM are left to process 0: it saves with everybody's help, then stops everybody.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = ControlChannel()
    checkpointer: Checkpointer | None = None
    while True:
        command, payload = line.receive()
        try:
            match command:
                case "stop":
                    jax.distributed.shutdown()
                    return
                case "open":
                    checkpointer = Checkpointer(payload["folder"], keep=payload["keep"])
                case "update":
                    check = replace(UNCHECKED, since=payload["since"])  # process 0 looks at it for all
                    groups, masked = decode_groups(payload["groups"]), payload["masked"]
                    learner.update(groups, masked=masked, gate=line.gate(), check=check)
                case "params":
                    for x in jax.tree.leaves(learner.params):
                        gathered(x)
                case "weights":
                    assert shelf is not None  # process 0 has one, too
                    shelf.put(payload["version"], learner.params)
                case "store":
                    try:
                        stored.write_part(payload["folder"], learner.params, part=jax.process_index())
                    finally:  # what was not written, process 0 will miss
                        line.meet("store")
                case _:
                    assert checkpointer is not None  # process 0 opens before it uses
                    _follow_checkpoint(learner, checkpointer, command, payload)
        except StepCancelled:
            logger.info("the step was abandoned before its first update")
        except (JaxAgentRLError, ValueError, OSError) as error:
            # Process 0 has met the same error: it decides whether the run goes on.
            logger.warning("%s failed on process %d: %s", command, jax.process_index(), error)


def _follow_checkpoint(learner: Learner, checkpointer: Checkpointer, command: str, payload: Any) -> None:
    match command:
        case "save":
            checkpointer.save(payload["step"], learner.state, payload["progress"])
        case "wait":
            checkpointer.wait()
        case "restore":
            _, learner.state, _ = checkpointer.restore(learner.state, step=payload["step"])
        case "close":
            checkpointer.close()
