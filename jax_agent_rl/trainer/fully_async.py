"""The fully asynchronous trainer: rollout never stops, the learner takes a batch when there is one.

::

    time ─►   engine   [ groups grow, complete, others start in their place ................................. ]
                            │ batch 1        ↑ 1  │ batch 2      ↑ 2   │ batch 3       ↑ 3        ↑ weights
              learner       [ learn 1       ]     [ learn 2     ]      [ learn 3      ]

    stream           consumes: rows, room.             produces: complete groups.     waits for: engine, tools, room.
    rollout          consumes: groups.                 produces: a batch of them.     waits for: the batch.
    publish_weights  consumes: the learner's weights.  produces: a version in every engine, and room for a batch.
                                                       waits for: engines to take them (``trainer.in_flight_update``).

Weights change under running generations: one trajectory may hold tokens of several versions, each marked with its own.
How old a token may be when it is trained on, and so how far the rollout runs ahead, is the buffer's decision
(:mod:`jax_agent_rl.collect.buffer`). Every step publishes, also one that learnt nothing: a version is a step.
"""

from __future__ import annotations

from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.trainer.base import Collected
from jax_agent_rl.trainer.streaming import StreamTrainer
from jax_agent_rl.types import PauseMode

PAUSES: dict[str, PauseMode | None] = {
    "auto": None,
    "keep": PauseMode.KEEP,
    "recompute": PauseMode.ABORT,
    "wait": PauseMode.WAIT,
}


class FullyAsyncTrainer(StreamTrainer):
    """Rollout and learner run side by side; see the module.

    Raises:
        ConfigError: an engine cannot do what ``trainer.in_flight_update`` asks for.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = self.runtime.config.trainer.in_flight_update
        for server in self.runtime.client.servers:
            can = [name for name in PAUSES if _supports(server.backend.capabilities, name)]
            if wanted not in can:
                raise ConfigError(f"trainer.in_flight_update={wanted}: {server.name} can do only {', '.join(can)}")
        self._pause = PAUSES[wanted]

    async def rollout(self) -> Collected:
        self.stream.want(self.wanted_after(self.record.step))
        return await self.take_batch()

    async def publish_weights(self, version: int, selection: Selection) -> float:
        """Publish at once, whatever runs."""
        return await self.publish(version, mode=self._pause)

    def on_step_end(self, version: int) -> None:
        """Make room for a batch."""
        self.stream.finish_step(version, want=self.wanted_after(version))


def _supports(capabilities: Capabilities, name: str) -> bool:
    pause = PAUSES[name]
    if pause is PauseMode.KEEP and not capabilities.in_flight_update:
        return False
    return pause is None or pause in capabilities.pause_modes
