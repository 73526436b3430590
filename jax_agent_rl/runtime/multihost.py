"""One learner over several processes (hosts): process 0 leads, the others do the same learner work.

::

    process 0   rollouts, rewards, filters ─► groups ─┬─► Learner.update ─► metrics, weights
    process 1…                                        └─► Learner.update    (follow)

Data flow one way. Agents and tools run on process 0 only, engines on the learner's devices on every
process (``runtime.multihost_engines``). Process 0 sends a command and JSON as an array of bytes:
what the learner reads of the groups (ids, log-probs, rewards, images; no pickle). So every process
packs the same rows and places its own shards. Metrics are computed on all devices and are equal
everywhere. Each process reads the model's shards of its own devices and writes those of
checkpoints, into a shared folder; a failure on one ends the run on all (``learner.checkpoint``).

While agents run, the other processes wait at a barrier of jax's coordination service. Unlike a
collective on devices, the barrier has no short timeout and notices when a process dies; then all
others end as well.

All processes execute one command at a time. After a signal, process 0 cancels the step on all of
them (:meth:`ControlChannel.share`); then they save the state before it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from pydantic import TypeAdapter

from jax_agent_rl.config import MultihostConfig
from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.learner.checkpoint import Checkpointer, located
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck, cancel_on_breach
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.optimized_params import LearnerState
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import gathered
from jax_agent_rl.rollout.http.wire import decode_media, encode_media
from jax_agent_rl.types import Group, Trajectory, Turn
from jax_agent_rl.types.routed_experts import routed_from_json, routed_to_json

logger = logging.getLogger(__name__)

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COMMAND_TIMEOUT = 7 * 86400
"""Seconds that a follower waits for the next command: longer than any rollout."""
STOP_TIMEOUT = 120
"""Seconds that the leader waits for followers that may be gone."""
COMMANDS = (
    "update",
    "params",
    "weights",
    "store",
    "open",
    "save",
    "wait",
    "restore",
    "delete_newer",
    "close",
    "stop",
)


PutWeights = Callable[[int, Params], None]
"""Makes the weights of a version for this process's engine; all processes call it together."""


def initialize(config: MultihostConfig) -> int:
    """Join the other processes, if any, and return this process's number.

    Call it before anything else uses jax.

    Raises:
        ConfigError: the numbers are inconsistent, or the coordinator cannot be reached.
    """
    address = config.coordinator or os.environ.get(ADDRESS)
    if address is None and (config.num_processes or 1) > 1:
        raise ConfigError(
            f"learner.multihost.num_processes={config.num_processes}, but nothing says where they"
            f" meet; set learner.multihost.coordinator to HOST:PORT of process 0, or ${ADDRESS}"
        )
    if address is None:
        return 0

    try:
        jax.distributed.initialize(
            coordinator_address=None if address == "auto" else address,
            num_processes=config.num_processes,
            process_id=config.process_id,
            initialization_timeout=config.timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"learner.multihost: process {config.process_id} of {config.num_processes} could not"
            f" join {address!r} within learner.multihost.timeout={config.timeout:g} seconds"
            f" ({error}); start every process with the same coordinator and num_processes, and its"
            " own process_id"
        ) from error

    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Only process 0 finds programs in the cache, and on CPUs a loaded program may exchange
        # arrays in another order than a compiled one: the processes would deadlock.
        jax.config.update("jax_enable_compilation_cache", False)
    return jax.process_index()


class ControlChannel:
    """Commands from process 0 to all, in order."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._stopped = False

    @contextlib.contextmanager
    def command(self, command: str, payload: Any = None) -> Iterator[None]:
        """Process 0: send a command; execute it in the context, while no other thread sends one."""
        with self._lock:
            self._exchange(COMMANDS.index(command), json.dumps(payload).encode(), COMMAND_TIMEOUT)
            yield

    def stop(self) -> None:
        """Process 0: stop the others, once."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            try:
                self._exchange(COMMANDS.index("stop"), b"null", STOP_TIMEOUT)
                jax.distributed.shutdown()  # waits for all; after it, each may end
            except jax.errors.JaxRuntimeError as error:
                logger.warning(
                    "the other processes could not be stopped, and end by themselves: %s", error
                )

    def share(self, cancellation: StepCancellation) -> StepCancellation:
        """Let process 0 decide for all, at each micro-batch and update, if a step is cancelled."""
        cancellation.meet = lambda: self.barrier("update")  # other processes may still compile
        cancellation.agree = lambda cancelled: bool(_from_process_0([cancelled, 0])[0])
        return cancellation

    def receive(self) -> tuple[str, Any]:
        """Other processes: wait for the next command."""
        command, payload = self._exchange(-1, b"", COMMAND_TIMEOUT)
        return COMMANDS[command], json.loads(payload)

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Execute the context on all processes; none goes on before all have ended it or failed."""
        try:
            yield
        finally:
            self.barrier(name)

    def barrier(self, name: str, timeout: int = COMMAND_TIMEOUT) -> None:
        """Return when all processes have arrived."""
        self._count += 1
        wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        wait(key=f"jax_agent_rl-{name}-{self._count}", timeout_ms=timeout * 1000)

    def _exchange(self, command: int, payload: bytes, timeout: int) -> tuple[int, bytes]:
        """Broadcast process 0's command and payload; return them on every process."""
        self.barrier("command", timeout)
        command, length = (int(number) for number in _from_process_0([command, len(payload)]))

        # A power of two bounds the number of shapes, and so of programs.
        block = np.zeros(1 << max(length - 1, 1).bit_length(), np.uint8)
        block[: len(payload)] = np.frombuffer(payload, np.uint8)
        received = np.asarray(multihost_utils.broadcast_one_to_all(block))
        return command, received[:length].tobytes()


def _from_process_0(numbers: Sequence[int]) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.int32)))


# --- process 0 ------------------------------------------------------------------------------------


class LeadingLearner:
    """A :class:`~jax_agent_rl.learner.learner.Learner` whose every call happens on all processes.

    Args:
        learner: the learner of this process.
        averaged: whether ``learner`` holds the moving average of the parameters; other processes
            then use their part of it.
    """

    def __init__(
        self, learner: Learner, channel: ControlChannel, *, averaged: bool = False
    ) -> None:
        self._learner = learner
        self._channel = channel
        self._source = {"averaged": averaged}

    def averaged(self) -> LeadingLearner:
        """See :meth:`Learner.averaged`."""
        return LeadingLearner(self._learner.averaged(), self._channel, averaged=True)

    @property
    def state(self) -> LearnerState:
        """This process's shards; see :attr:`Learner.state`."""
        return self._learner.state

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._learner.state = state

    @property
    def params(self) -> Params:
        """The whole parameters on this process's first device, for its engine."""
        with self._channel.command("params", self._source):
            # One at a time: no other device ever holds more than one whole parameter.
            return jax.tree.map(lambda x: gathered(x).addressable_data(0), self._learner.params)

    def put_weights(self, version: int, put: PutWeights) -> None:
        """Make the weights of every process's engine, and wait for all.

        Args:
            put: makes them in this process.
        """
        with self._channel.command("weights", {"version": version, **self._source}):
            # Together: no engine may ask for what its process is still making.
            with self._channel.together("weights"):
                put(version, self._learner.params)

    def store(self, folder: str, dtype: str) -> str:
        """Let every process write its devices' shards, in the format of ``models.stored``.

        Args:
            folder: address of the version.
            dtype: what the parameters are rounded to.

        Returns:
            The manifest's digest.

        Raises:
            OSError: a process could not write.
        """
        with self._channel.command("store", {"folder": folder, "dtype": dtype, **self._source}):
            with self._channel.together("store"):
                stored.write_part(folder, self._learner.params, part=0, dtype=dtype)
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
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """See :meth:`Learner.update`."""
        if cancellation is None:
            cancellation = StepCancellation()
        payload = {"groups": encode_groups(groups), "masked": sorted(masked), "since": check.since}
        with (
            self._channel.command("update", payload),
            cancel_on_breach(check, cancellation) as checked,
        ):
            return self._learner.update(
                groups,
                masked=masked,
                tick=tick,
                cancellation=self._channel.share(cancellation),
                check=checked,
            )


class LeadingCheckpointer(Checkpointer):
    """A :class:`~jax_agent_rl.learner.checkpoint.Checkpointer` of all processes together.

    A method that sends a command runs on every process meanwhile, so it may not call another such
    method.
    """

    def __init__(self, folder: Path | str, *, keep: int, channel: ControlChannel) -> None:
        self._channel = channel
        with channel.command("open", {"folder": str(located(folder)), "keep": keep}):
            super().__init__(folder, keep=keep)

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        with self._channel.command("save", {"step": step, "progress": progress}):
            super().save(step, state, progress)

    def wait(self) -> None:
        with self._channel.command("wait"):
            super().wait()

    def restore(self, like: Any, *, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        with self._channel.command("restore", {"step": step}):
            return super().restore(like, step=step)

    def delete_newer(self, step: int) -> None:
        with self._channel.command("delete_newer", {"step": step}):
            super().delete_newer(step)

    def close(self) -> None:
        with self._channel.command("close"):
            super().close()


@contextlib.contextmanager
def leading() -> Iterator[ControlChannel | None]:
    """Process 0: yield the channel to the other processes, and stop them in the end.

    Yields None if there are no others.
    """
    if jax.process_count() == 1:
        yield None
        return

    channel = ControlChannel()
    try:
        yield channel
    finally:
        channel.stop()


@contextlib.contextmanager
def stopping_others_on_failure() -> Iterator[None]:
    """Process 0, before :func:`leading`: stop the other processes if this fails.

    They wait for its first command without a limit.
    """
    try:
        yield
    except BaseException:
        if jax.process_count() > 1:
            ControlChannel().stop()
        raise


# --- other processes ------------------------------------------------------------------------------


def follow(learner: Learner, put_weights: PutWeights | None) -> None:
    """Execute the commands of process 0 until it sends ``stop``.

    Ctrl-C and SIGTERM are left to process 0, which saves with the help of all, then stops them.

    Args:
        put_weights: makes weights for this process's engine; None without one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = ControlChannel()
    checkpointer: Checkpointer | None = None

    def require_checkpointer() -> Checkpointer:
        assert checkpointer is not None  # process 0 opens before it uses
        return checkpointer

    while True:
        command, payload = channel.receive()
        source = learner
        if payload and payload.pop("averaged", False):
            source = learner.averaged()
        try:
            match command:
                case "stop":
                    jax.distributed.shutdown()
                    return
                case "open":
                    checkpointer = Checkpointer(payload["folder"], keep=payload["keep"])
                case "update":
                    learner.update(
                        decode_groups(payload["groups"]),
                        masked=payload["masked"],
                        cancellation=channel.share(StepCancellation()),
                        check=replace(UNCHECKED, since=payload["since"]),  # process 0 checks
                    )
                case "params":
                    for param in jax.tree.leaves(source.params):
                        gathered(param)
                case "weights":
                    assert put_weights is not None  # process 0 also has an engine
                    with channel.together("weights"):
                        put_weights(payload["version"], source.params)
                case "store":
                    with channel.together("store"):  # process 0 notices what is missing
                        stored.write_part(**payload, params=source.params, part=jax.process_index())
                case "save":
                    require_checkpointer().save(payload["step"], learner.state, payload["progress"])
                case "wait":
                    require_checkpointer().wait()
                case "restore":
                    _, learner.state, _ = require_checkpointer().restore(
                        learner.state, step=payload["step"]
                    )
                case "delete_newer":
                    require_checkpointer().delete_newer(payload["step"])
                case "close":
                    require_checkpointer().close()
        except StepCancelled:
            logger.info("the step was cancelled")
        except (JaxAgentRLError, ValueError, OSError) as error:
            # Process 0 has the same error, and decides whether the run goes on.
            logger.warning("%s failed on process %d: %s", command, jax.process_index(), error)


# --- groups as JSON -------------------------------------------------------------------------------


_GROUPS = TypeAdapter(list[Group])


def encode_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return what the learner reads of groups, for JSON; floats are exact."""
    lean_groups = []
    for group in groups:
        trajectories = tuple(_lean_trajectory(trajectory) for trajectory in group.trajectories)
        lean_groups.append(replace(group, trajectories=trajectories))
    # Encoded media are not of the types that are declared, which pydantic would warn of.
    dumped = _GROUPS.dump_python(lean_groups, warnings=False)
    return [_map_routed(group, routed_to_json) for group in dumped]


def decode_groups(encoded: list[dict[str, Any]]) -> list[Group]:
    """Invert :func:`encode_groups`."""
    groups = []
    routed = [_map_routed(group, routed_from_json) for group in encoded]
    for group in _GROUPS.validate_python(routed):
        trajectories = tuple(_with_images(trajectory) for trajectory in group.trajectories)
        groups.append(replace(group, trajectories=trajectories))
    return groups


def _map_routed(group: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a group with the ``routed_experts`` of all its outputs converted."""

    def convert_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
        output = turn["output"]
        return {**turn, "output": {**output, "routed_experts": convert(output["routed_experts"])}}

    def convert_trajectory(trajectory: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **trajectory,
            "turns": [convert_turn(turn) for turn in trajectory["turns"]],
            "segments": [convert_trajectory(segment) for segment in trajectory["segments"]],
        }

    trajectories = [convert_trajectory(trajectory) for trajectory in group["trajectories"]]
    return {**group, "trajectories": trajectories}


def _lean_trajectory(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without texts and records, which only users and rewards read.

    Of its row, the data source stays.
    """
    row = {}
    if "data_source" in trajectory.row:
        row["data_source"] = trajectory.row["data_source"]
    return replace(
        trajectory,
        turns=tuple(_lean_turn(turn) for turn in trajectory.turns),
        segments=tuple(_lean_trajectory(segment) for segment in trajectory.segments),
        row=row,
        messages=(),
        feedback="",
        metrics={},
        prompt_media=encode_media(trajectory.prompt_media),
    )


def _lean_turn(turn: Turn) -> Turn:
    tool_calls = []
    for call in turn.tool_calls:
        tool_calls.append(replace(call, arguments=None, observation="", media={}))
    return replace(
        turn,
        tool_calls=tuple(tool_calls),
        note="",
        appended_media=encode_media(turn.appended_media),
    )


def _with_images(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with its PNG decoded."""
    turns = []
    for turn in trajectory.turns:
        turns.append(replace(turn, appended_media=decode_media(turn.appended_media)))
    return replace(
        trajectory,
        turns=tuple(turns),
        segments=tuple(_with_images(segment) for segment in trajectory.segments),
        prompt_media=decode_media(trajectory.prompt_media),
    )
