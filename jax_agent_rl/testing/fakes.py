"""Engines without a real model, and a learner without an optimizer, for tests and simulations.

::

    FakeBackend                    capabilities, version, refusals: what all fakes answer alike
     ├─ simulate SimulatedEngine   computes when requests finish in virtual time; no ticks
     ├─ tests BatchingEngine       continuous batching: one id per running request and tick
     │   ├─ PacedBackend           samples from a table, takes weights as files, hangs on command
     │   └─ ToyBackend             a toy model with prefix cache, images and adapters, for the
     │                             conformance suite
     └─ tests ScriptedBackend      says what a test scripted
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import BackendClosedError
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, TokenChunk
from jax_agent_rl.types import Group, TokenOutput, TokenScores

if TYPE_CHECKING:
    from jax_agent_rl.learner.comparison import AgreementCheck
    from jax_agent_rl.learner.metrics import UpdateResult
    from jax_agent_rl.rollout.transport import WeightSource


class FakeBackend(ABC):
    """The part of :class:`~jax_agent_rl.rollout.protocol.RolloutBackend` that all fakes share.

    Args:
        version: policy version of the first weights.

    Attributes:
        closed: whether :meth:`close` was called.
    """

    name = "fake engine"

    def __init__(self, capabilities: Capabilities, *, version: int = 0) -> None:
        self.capabilities = capabilities
        self._version = version
        self.closed = False

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self) -> None:  # noqa: B027  (most fakes have nothing to warm up)
        """Start at once."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> TokenOutput: ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if not self.capabilities.streaming:
            raise NotImplementedError(f"the {self.name} does not stream")
        return self.chunks(request)

    async def chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the parts of a generation; a whole one at once."""
        output = await self.generate(request)
        yield TokenChunk(
            token_ids=output.token_ids,
            log_probs=output.log_probs,
            policy_versions=output.policy_versions,
            final=output,
        )

    async def reset_prefix_cache(self) -> None:  # noqa: B027  (most fakes have no cache)
        """Do nothing."""

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        raise NotImplementedError(f"the {self.name} does not score given ids")

    async def sleep(self) -> None:
        raise NotImplementedError(f"the {self.name} does not sleep")

    async def wake(self) -> None:
        raise NotImplementedError(f"the {self.name} does not sleep")

    def require_open(self) -> None:
        """Raise BackendClosedError if the engine is closed."""
        if self.closed:
            raise BackendClosedError(f"the {self.name} is closed")


class FakeLearner(ABC):
    """Replaces a :class:`~jax_agent_rl.learner.learner.Learner`.

    A subclass defines :meth:`learn`.
    """

    params: Any = None
    state: Any = None
    programs_compiled: int = 0

    @abstractmethod
    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take the groups of a step and return its metrics."""

    def averaged(self) -> WeightSource:
        raise NotImplementedError("the fake learner has no parameters to average")

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda done, total: None,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck | None = None,
    ) -> UpdateResult:
        # Imported here because it imports jax, which engines start without.
        from jax_agent_rl.learner.metrics import UpdateResult

        if cancellation is None:
            cancellation = StepCancellation()
        tick(0, 1)
        with cancellation.update():
            metrics = self.learn(groups)
        tick(1, 1)
        return UpdateResult(metrics=metrics, skipped=False)


class NoCheckpoints:
    """Replaces a :class:`~jax_agent_rl.learner.checkpoint.Checkpointer`; saves nothing."""

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None: ...

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def delete_newer(self, step: int) -> None: ...

    def written(self) -> str:
        return ""
