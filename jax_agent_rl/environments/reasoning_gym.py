"""reasoning-gym's procedural tasks: one question, one answer, checked by the task's own verifier.

A row names the question, it does not hold it::

    "extra_info": {"environment_kwargs": {"name": "reasoning_gym", "dataset": "chain_sum", "seed": 0, "index": 17,
                                          "config": {"min_terms": 2, "max_terms": 2}}}

Needs the extra ``environments``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_agent_rl.environments.base import Environment, Observation, in_thread, register_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.rewards.rules import tagged

if TYPE_CHECKING:
    from jax_agent_rl.chat.formats.base import Reply


@register_environment("reasoning_gym")
class ReasoningGymEnvironment(Environment):
    """One question of one of its data sets; the answer is the text in the last ``<answer>…</answer>``."""

    async def reset(
        self,
        *,
        dataset: str,
        index: int,
        seed: int = 0,
        config: Mapping[str, Any] | str | None = None,
        partial_credit: bool = False,
    ) -> Observation:
        """Ask a question.

        Args:
            dataset: name of the task family.
            index: number of the question.
            seed: of the dataset. reasoning-gym adds it to ``index`` for most families, so seeds of training and
                held-out rows must lie further apart than their indices.
            config: the family's settings (JSON text where a Parquet file cannot hold a mapping).
            partial_credit: keep scores between 0 and 1. Off by default: many verifiers give partial scores to wrong
                answers that contain the right one, which a policy soon learns to exploit.
        """
        self._partial_credit = partial_credit
        settings = config if isinstance(config, str) else json.dumps(dict(config or {}), sort_keys=True)
        self._dataset, self._entry = await in_thread(lambda: _entry(dataset, seed, settings, index), name="question")
        return Observation.say(self._entry["question"])

    async def step(self, reply: Reply) -> Observation:
        """Score the answer and end the episode."""
        answer = tagged(reply.content)
        value = 0.0
        if answer:
            value = float(await in_thread(lambda: self._dataset.score_answer(answer, self._entry), name="verifier"))
        score = value if self._partial_credit else float(value >= 1.0)
        return Observation(score=score, done=True, metrics={"reasoning_gym/answered": float(answer is not None)})


def _entry(dataset: str, seed: int, settings: str, index: int) -> tuple[Any, dict[str, Any]]:
    source = _dataset(dataset, seed, settings)
    return source, source[index]


@functools.lru_cache(maxsize=64)
def _dataset(name: str, seed: int, settings: str) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise EnvironmentFailedError(
            "reasoning-gym is not installed; install the extra: pip install 'jax_agent_rl[environments]'"
        ) from None
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **json.loads(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise EnvironmentFailedError(f"reasoning_gym: dataset {name!r} with {settings}: {error}") from None
