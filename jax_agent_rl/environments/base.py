"""What an environment is: a world that answers a policy's replies, and says what they were worth.

Life of an instance in one trajectory::

    reset(**environment_kwargs) ──► step(reply) … ──► conclude(messages, reason) ──► close(), or the next reset

The keyword arguments come from the dataset row: ``extra_info.environment_kwargs = {"name": "textworld", "game": …}``.
An instance serves one trajectory at a time. Methods are coroutines; wrap blocking code with :func:`in_thread`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.types import FinishReason, ToolCallRecord
from jax_agent_rl.utils.threads import DaemonThreads

if TYPE_CHECKING:
    from jax_agent_rl.chat.formats.types import Reply

T = TypeVar("T")
_THREADS = DaemonThreads(kind="environment", error=EnvironmentFailedError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment shows, and what the reply before it was worth.

    Attributes:
        messages: appended to the conversation; :meth:`say` makes the usual single user message.
        score: reward of the reply it answers; becomes ``Turn.score``.
        done: the episode is over; ``messages`` are not shown any more.
        tool_calls: calls it ran itself for that reply.
        metrics: numbers to add up over the trajectory, by name.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    score: float = 0.0
    done: bool = False
    tool_calls: tuple[ToolCallRecord, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def say(cls, text: str, **fields: Any) -> Observation:
        """One user message."""
        return cls(messages=({"role": "user", "content": text},), **fields)


class Environment(ABC):
    """Base class of environments; give it a name with ``@register_environment``."""

    name: ClassVar[str]
    """The name it is registered under."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tools this episode offers, in OpenAI's format, for the prompt; read after ``reset``. The default is none."""
        return ()

    @abstractmethod
    async def reset(self, **environment_kwargs: Any) -> Observation:
        """Begins an episode; its messages follow the row's prompt. Spell out the arguments that rows may give.

        Raises:
            EnvironmentFailedError: there is no such episode. Anything else that is raised counts as that, too.
        """

    @abstractmethod
    async def step(self, reply: Reply) -> Observation:
        """Answers a reply. One that was cut off by a length limit never gets here.

        Args:
            reply: its text without reasoning and calls, and the decoded tool calls.
        """

    async def conclude(self, messages: Sequence[Mapping[str, Any]], reason: FinishReason) -> Mapping[str, float]:
        """Called once when the trajectory is over, for whatever reason.

        Args:
            messages: the whole conversation.
            reason: why it ended.

        Returns:
            ``score`` is added to the score of the last turn; other numbers become metrics. The default adds nothing.
        """
        return {}

    async def close(self) -> None:
        """Frees what the instance holds. The default does nothing."""
        return None


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Runs blocking code of an environment in a daemon thread of its own."""
    return await _THREADS.run(function, name=name)
