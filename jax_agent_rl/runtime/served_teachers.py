"""Teachers that are served elsewhere score trajectories over HTTP before the learner gets them.

::

    groups ─► each trajectory's teacher ─┬─► a rollout server: score ──────────┬─► teacher_scores
                                         └─► completions with prompt_logprobs ─┘   in the groups

They are sent the token ids of a context and nothing else, and answer with token ids: no text is
tokenized.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from jax_agent_rl.config import Config, TeacherConfig
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.types import Group, TokenScores, Trajectory
from jax_agent_rl.utils.network import JsonService, bearer, token_from

_KEY = "distill.teachers"
_TRIES = 4


class ScoresTokens(Protocol):
    """A model that scores given ids, as ``RolloutBackend.score`` does."""

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores: ...


MAX_SCORES_BYTES = 1 << 28
MAX_SCORES_VALUES = 16_000_000
"""Limits of an answer: an object for each of the likeliest ids at each position."""


class CompletionsTeacher:
    """A server with OpenAI's completions and vLLM's ``prompt_logprobs``.

    Args:
        transport: httpx transport, for tests.

    Raises:
        ConfigError: the address is not a URL, or the token's variable is not set.
    """

    def __init__(self, teacher: TeacherConfig, *, transport: Any = None) -> None:
        self._model = teacher.model or teacher.path
        self._service = JsonService(
            url=f"{str(teacher.url).rstrip('/')}/completions",
            url_key=f"{_KEY}.url",
            timeout=teacher.timeout,
            timeout_key=f"{_KEY}.timeout",
            max_retries=_TRIES - 1,
            backoff=2.0,
            headers=bearer(teacher.token_env, key=f"{_KEY}.token_env"),
            token_hint=f"name its variable in {_KEY}.token_env",
            trust_env=True,
            error=BackendError,
            max_answer_bytes=MAX_SCORES_BYTES,
            max_values=MAX_SCORES_VALUES,
            transport=transport,
        )

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        """Score ids as ``RolloutBackend.score`` does.

        Raises:
            BackendError: no usable answer after all attempts; the message names the URL.
        """
        request = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,  # at least one token has to be asked for
            "temperature": 1.0,
            "prompt_logprobs": top_k,
            "add_special_tokens": False,
        }
        try:
            answer = await self._service.post(request, repeatable=True)
        except TimeoutError as error:
            raise BackendError(str(error)) from None

        try:
            positions = answer["choices"][0]["prompt_logprobs"][start:]
            return _read_scores(positions, token_ids[start:], top_k)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{self._service.url} did not answer with the prompt_logprobs of the"
                f" {len(token_ids)} ids it was sent ({type(error).__name__}: {error}); serve the"
                " teacher with vLLM, or with `jax-agent-rl rollout-server`"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()


class _Candidate(NamedTuple):
    """A token id at one position of a context. Candidates sort by rank."""

    rank: int
    token_id: int
    log_prob: float


def _read_scores(
    positions: Sequence[Mapping[str, Mapping[str, Any]]], token_ids: Sequence[int], top_k: int
) -> TokenScores:
    """Return the scores in vLLM's ``prompt_logprobs``.

    Args:
        positions: for each id, objects with ``logprob`` and ``rank`` by token id: the id itself and
            at least the ``top_k`` likeliest.
    """
    log_probs = []
    top_ids = []
    top_log_probs = []
    for position, token_id in zip(positions, token_ids, strict=True):
        candidates = {}
        for text, entry in position.items():
            candidate = _Candidate(int(entry["rank"]), int(text), float(entry["logprob"]))
            candidates[candidate.token_id] = candidate
        log_probs.append(candidates[token_id].log_prob)

        # The id of the context itself may rank lower.
        likeliest = sorted(c for c in candidates.values() if c.rank <= top_k)[:top_k]
        if len(likeliest) < top_k:
            raise ValueError(f"{len(likeliest)} of {top_k} likeliest ids")
        top_ids.append(tuple(candidate.token_id for candidate in likeliest))
        top_log_probs.append(tuple(candidate.log_prob for candidate in likeliest))

    if not top_k:
        return TokenScores(log_probs=tuple(log_probs), top_ids=(), top_log_probs=())
    return TokenScores(
        log_probs=tuple(log_probs),
        top_ids=tuple(top_ids),
        top_log_probs=tuple(top_log_probs),
    )


class ServedTeachers:
    """Scores trajectories whose teacher has a URL; others are the learner's to score.

    Args:
        teachers: all teachers of the run, each with its client if it is served.
        top_k: ``algorithm.kl.top_k``.
        vocab_size: of the policy.
    """

    def __init__(
        self,
        teachers: Sequence[tuple[TeacherConfig, ScoresTokens | None]],
        *,
        top_k: int,
        vocab_size: int,
    ) -> None:
        self._configs = [config for config, _ in teachers]
        self._clients = [client for _, client in teachers]
        self._slots = [asyncio.Semaphore(config.max_in_flight) for config in self._configs]
        self._top_k = top_k
        self._vocab_size = vocab_size

    async def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the scores of their teachers.

        Raises:
            BackendError: a teacher did not answer, or its answer does not fit.
        """
        tasks = []
        try:
            async with asyncio.TaskGroup() as task_group:
                for group in groups:
                    for trajectory in group.trajectories:
                        tasks.append(task_group.create_task(self._scored(trajectory)))
        except ExceptionGroup as failed:  # all other requests were cancelled
            raise failed.exceptions[0] from None

        results = (task.result() for task in tasks)
        scored_groups = []
        for group in groups:
            trajectories = tuple(itertools.islice(results, len(group.trajectories)))
            scored_groups.append(replace(group, trajectories=trajectories))
        return scored_groups

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the scores of its teacher, if that is served."""
        number = first_teacher((config.data_sources for config in self._configs), trajectory.row)
        if number is None:
            return trajectory
        client = self._clients[number]
        if client is None:
            return trajectory

        log_probs: list[float] = []
        top_ids: list[tuple[int, ...]] = []
        top_log_probs: list[tuple[float, ...]] = []
        for sequence in trajectory.sequences:
            if sequence.multi_modal:
                raise ConfigError(
                    f"{_KEY}: {self._configs[number].url} is sent ids only, and"
                    f" {trajectory.trajectory_id} has images; put this teacher on the learner's"
                    " devices: remove its url"
                )
            token_ids = sequence.prompt_ids + sequence.response_ids
            prompt_length = len(sequence.prompt_ids)
            learned = []
            for index, is_learned in enumerate(sequence.loss_mask):
                if is_learned:
                    learned.append(prompt_length + index)
            if not learned:
                continue

            # Only up to the last token that is learned from, and scores from the first one on.
            start = learned[0]
            end = learned[-1] + 1
            async with self._slots[number]:
                scores = await client.score(token_ids[:end], start=start, top_k=self._top_k)
            for position in learned:
                log_probs.append(scores.log_probs[position - start])
                if scores.top_ids:
                    top_ids.append(scores.top_ids[position - start])
                    top_log_probs.append(scores.top_log_probs[position - start])

        teacher_scores = TokenScores(
            log_probs=tuple(log_probs),
            top_ids=tuple(top_ids),
            top_log_probs=tuple(top_log_probs),
        )
        self._check(teacher_scores, trajectory, self._configs[number])
        return replace(trajectory, teacher_scores=teacher_scores)

    def _check(self, scores: TokenScores, trajectory: Trajectory, teacher: TeacherConfig) -> None:
        log_probs = itertools.chain(scores.log_probs, *scores.top_log_probs)
        if not all(math.isfinite(log_prob) for log_prob in log_probs):
            raise BackendError(
                f"{_KEY}: {teacher.url} gives {trajectory.trajectory_id} log-probs that are not"
                " finite"
            )
        largest_id = max(itertools.chain.from_iterable(scores.top_ids), default=0)
        if largest_id >= self._vocab_size:
            raise BackendError(
                f"{_KEY}: {teacher.url} finds id {largest_id} likely, but the policy has"
                f" {self._vocab_size} ids; set algorithm.kl.top_k=0, or choose another teacher"
            )


@asynccontextmanager
async def open_served_teachers(
    config: Config,
    model: DecoderConfig,
    *,
    probe_ids: Sequence[int],
    print_line: Callable[[str], None],
) -> AsyncIterator[ServedTeachers | None]:
    """Connect to the teachers with a URL and yield what scores by them; None if there are none.

    Args:
        model: the policy's.
        probe_ids: a context that each teacher scores once, before anything is sampled.
        print_line: prints a line of progress.

    Raises:
        BackendError: a server cannot be reached, or does not score.
        ConfigError: an address or a token is wrong, or a server's engine does not score given ids.
    """
    teachers = config.distill.teachers if config.distill else ()
    if not any(teacher.url for teacher in teachers):
        yield None
        return

    top_k = config.algorithm.kl.top_k
    async with AsyncExitStack() as stack:
        clients: list[tuple[TeacherConfig, ScoresTokens | None]] = []
        for teacher in teachers:
            client: CompletionsTeacher | RemoteBackend | None = None
            if teacher.url is not None and teacher.url.rstrip("/").endswith("/v1"):
                client = CompletionsTeacher(teacher)
                stack.push_async_callback(client.close)
            elif teacher.url is not None:
                token = token_from(teacher.token_env, key=f"{_KEY}.token_env")
                client = RemoteBackend(teacher.url, token=token)
                stack.push_async_callback(client.close)
                await client.start()
                if not client.capabilities.scoring:
                    raise ConfigError(
                        f"{_KEY}: the engine at {teacher.url} does not score given ids"
                    )
            if client is not None:
                print_line(f"asking the teacher at {teacher.url}")
                await client.score(probe_ids, top_k=top_k)
            clients.append((teacher, client))
        yield ServedTeachers(clients, top_k=top_k, vocab_size=model.vocab_size)
