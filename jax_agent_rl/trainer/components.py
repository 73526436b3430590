"""The parts of a run that a trainer drives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import Config
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.rollout.transport import WeightSource, WeightTransport
from jax_agent_rl.types import Group


class TrainableLearner(WeightSource, Protocol):
    """A :class:`~jax_agent_rl.learner.learner.Learner`, on one host or on several."""

    @property
    def state(self) -> Any:
        """What a checkpoint holds: a LearnerState, or one per adapter in training."""
        ...

    @state.setter
    def state(self, state: Any) -> None: ...

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far."""
        ...

    def averaged(self) -> WeightSource:
        """Return the moving average of the parameters (``learner.ema_decay``), to be published."""
        ...

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = ...,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult: ...


class Checkpoints(Protocol):
    """The part of a :class:`~jax_agent_rl.learner.checkpoint.Checkpointer` that a trainer needs."""

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None: ...

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def written(self) -> str: ...

    def delete_newer(self, step: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunComponents:
    """The parts a trainer drives.

    Attributes:
        metrics: returns what all engines have done since the start of the run.
        client: generation and weight updates over all engines.
        collector: training rollouts, with the run's accounting.
        evaluator: held-out rollouts, counted separately.
        transport: brings the learner's weights to the engines.
        cursor: the order of the training rows.
        heldout: rows to evaluate on.
        training_rows: without what only agents read, such as prompts and images.
        teach: adds the scores of teachers that are served elsewhere to groups.
        room_for_learning: a context in which engines on the learner's devices make room for its
            update.
        identity: what the run is of (``runtime.identity``), as JSON.
    """

    config: Config
    codec: ChatCodec
    metrics: Callable[[], Awaitable[BackendMetrics]]
    client: LLMServerClient
    collector: RolloutCollector
    evaluator: RolloutCollector
    learner: TrainableLearner
    transport: WeightTransport
    cursor: DataCursor
    heldout: Sequence[dict[str, Any]]
    training_rows: Collection[Mapping[str, Any]] = ()
    teach: Callable[[Sequence[Group]], Awaitable[Sequence[Group]]] | None = None
    room_for_learning: Callable[[], AbstractAsyncContextManager] = nullcontext
    identity: Mapping[str, Any] = field(default_factory=dict)
