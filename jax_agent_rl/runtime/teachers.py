"""The teachers of a run (``distill``): checked before anything is loaded, then put on the learner's mesh.

Teachers that are served elsewhere score trajectories over HTTP before the learner gets them::

    groups ─► each trajectory's teacher ─┬─► a rollout server: score          ─┬─► groups with teacher_scores
                                         └─► completions with prompt_logprobs ─┘

They are sent the ids of a context and nothing else, and answer with ids: no text is tokenized.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import jax.numpy as jnp
from tokenizers import Tokenizer

from jax_agent_rl.config import Config, TeacherConfig
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.errors import BackendError, ConfigError, ModelError
from jax_agent_rl.learner.scoring import Teacher
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import check_files, load_config, load_hf
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.types import Group, TokenScores, Trajectory
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.utils.network import JsonService, bearer, token_from

_KEY = "distill.teachers"
_TRIES = 4


def check_teachers(config: Config) -> list[str]:
    """Check that the teachers read the policy's ids, and that their files are complete; return a line about each.

    Raises:
        ConfigError: a teacher has another tokenizer, or reads no images although the policy does.
        ModelError: files of a teacher are missing or damaged.
    """
    if config.distill is None:
        return []
    lines, ids = [], _vocabulary(config.model.path)
    has_vision = load_config(config.model.path).vision is not None
    for teacher in config.distill.teachers:
        model = check_files(teacher.path) if teacher.url is None else None
        theirs = _vocabulary(teacher.path)
        if differing := [token for token, number in ids.items() if theirs.get(token) != number]:
            token = min(differing, key=ids.__getitem__)
            raise ConfigError(
                f"distill.teachers: {teacher.path} has another tokenizer than {config.model.path},"
                f" whose ids it is to score: {len(differing)} of {len(ids)} tokens differ, e.g."
                f" {token!r} is {ids[token]} here and {theirs.get(token, 'none')} there; choose a"
                " teacher of the policy's model family"
            )
        if has_vision and model is not None and model.vision is None:
            raise ConfigError(
                f"distill.teachers: {teacher.path} reads no images, and {config.model.path} does;"
                " choose a teacher with vision"
            )
        where = f"served at {teacher.url}" if model is None else model.family
        lines.append(f"distill.teachers: {teacher.path}: {where}, reads the policy's ids")
    return lines


def require_teachers(config: Config, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every row has a teacher.

    Raises:
        ConfigError: names the data sources of rows without one.
    """
    if config.distill is None:
        return
    data_sources = [teacher.data_sources for teacher in config.distill.teachers]
    if missing := sorted(
        {str(row.get("data_source")) for row in rows if first_teacher(data_sources, row) is None}
    ):
        patterns = [pattern for own in data_sources for pattern in own]
        raise ConfigError(
            f"no teacher of distill.teachers has the rows of data_source {missing}: their"
            f" data_sources are {patterns}; name them, or * for all"
        )


def make_teachers(config: Config, model: DecoderConfig) -> list[Teacher] | None:
    """Load the teachers without a URL in the learner's compute dtype, each device's shard separately.

    None without ``distill``.

    Args:
        config: the resolved configuration.
        model: the policy's hyperparameters.

    Raises:
        ConfigError: the mesh does not divide a teacher.
        ModelError: files are missing or damaged.
    """
    if config.distill is None:
        return None
    made, mesh = [], make_mesh(config.learner.mesh)
    for teacher in config.distill.teachers:
        if teacher.url is not None:
            continue
        teacher_model = load_config(teacher.path, weights=True)
        places = parameter_shardings(mesh, teacher_model.parameter_shapes())
        params = load_hf(
            teacher.path, dtype=jnp.dtype(config.learner.compute_dtype), shardings=places
        )[1]
        images = model.vision and VisionProcessor.of(
            teacher_model, teacher.path, pixels=config.model.pixels
        )
        made.append(
            Teacher(
                teacher_model,
                params,
                algorithm=config.algorithm,
                config=config.learner,
                temperature=config.rollout.temperature,
                vocab_size=model.vocab_size,
                data_sources=teacher.data_sources,
                vision_processor=images,
            )
        )
    return made


def _vocabulary(path: str) -> dict[str, int]:
    """Return the ids of all tokens, control tokens included."""
    file = model_folder(path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"the tokenizer {file} cannot be read: {error}") from error


# --- served elsewhere -----------------------------------------------------------------------------


class ScoresTokens(Protocol):
    """A model that scores given ids, as ``RolloutBackend.score`` does."""

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores: ...


MAX_SCORES_BYTES = 1 << 28
MAX_SCORES_VALUES = 16_000_000
"""Limits of an answer: an object for each of the likeliest ids at each place."""


class CompletionsTeacher:
    """A server with OpenAI's completions and vLLM's ``prompt_logprobs``.

    Args:
        teacher: address, name and limits.
        transport: httpx transport, for tests.

    Raises:
        ConfigError: the address is no URL, or the token's variable is not set.
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
            "max_tokens": 1,  # none cannot be asked for
            "temperature": 1.0,
            "prompt_logprobs": top_k,
            "add_special_tokens": False,
        }
        try:
            answer = await self._service.post(request, repeatable=True)
        except TimeoutError as late:
            raise BackendError(str(late)) from None
        try:
            positions = [
                {
                    int(id_): (float(found["logprob"]), int(found["rank"]))
                    for id_, found in position.items()
                }
                for position in answer["choices"][0]["prompt_logprobs"][start:]
            ]
            log_probs = [
                position[id_][0] for position, id_ in zip(positions, token_ids[start:], strict=True)
            ]
            top = [_likeliest(position, top_k) for position in positions]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{self._service.url} did not answer with the prompt_logprobs of the"
                f" {len(token_ids)} ids it was sent ({type(error).__name__}: {error}); serve the"
                " teacher with vLLM, or with `jax-agent-rl rollout-server`"
            ) from None
        return TokenScores(
            log_probs=tuple(log_probs),
            top_ids=tuple(ids for ids, _ in top) if top_k else (),
            top_log_probs=tuple(scores for _, scores in top) if top_k else (),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()


def _likeliest(
    position: Mapping[int, tuple[float, int]], top_k: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ids of rank up to ``top_k`` in order, and their log-probs; the prompt's own id may rank lower."""
    ranked = sorted((rank, id_, score) for id_, (score, rank) in position.items() if rank <= top_k)[
        :top_k
    ]
    if len(ranked) < top_k:
        raise ValueError(f"{len(ranked)} of {top_k} likeliest ids")
    return tuple(id_ for _, id_, _ in ranked), tuple(score for *_, score in ranked)


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
        self._clients = dict(enumerate(client for _, client in teachers))
        self._configs = [config for config, _ in teachers]
        self._slots = {
            number: asyncio.Semaphore(config.max_in_flight)
            for number, config in enumerate(self._configs)
        }
        self._top_k, self._vocab_size = top_k, vocab_size

    async def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the scores of their teachers.

        Raises:
            BackendError: a teacher did not answer, or its answer does not fit.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                scoring = [
                    [tasks.create_task(self._scored(t)) for t in group.trajectories]
                    for group in groups
                ]
        except ExceptionGroup as failed:  # all others were cancelled
            raise failed.exceptions[0] from None
        return [
            replace(group, trajectories=tuple(task.result() for task in own))
            for group, own in zip(groups, scoring, strict=True)
        ]

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        number = first_teacher((config.data_sources for config in self._configs), trajectory.row)
        client = None if number is None else self._clients[number]
        if number is None or client is None:
            return trajectory
        parts = []
        for sequence in trajectory.sequences:
            ids, first = sequence.prompt_ids + sequence.response_ids, len(sequence.prompt_ids)
            learned = [first + i for i, mark in enumerate(sequence.loss_mask) if mark]
            if sequence.multi_modal:
                raise ConfigError(
                    f"{_KEY}: {self._configs[number].url} is sent ids only, and"
                    f" {trajectory.trajectory_id} has images; put this teacher on the learner's"
                    " devices: remove its url"
                )
            if learned:
                async with self._slots[number]:
                    scores = await client.score(
                        ids[: learned[-1] + 1], start=learned[0], top_k=self._top_k
                    )
                parts.append(_chosen(scores, [at - learned[0] for at in learned]))
        made = TokenScores(
            **{
                name: tuple(itertools.chain.from_iterable(getattr(part, name) for part in parts))
                for name in ("log_probs", "top_ids", "top_log_probs")
            }
        )
        self._check(made, trajectory, self._configs[number])
        return replace(trajectory, teacher_scores=made)

    def _check(self, scores: TokenScores, trajectory: Trajectory, teacher: TeacherConfig) -> None:
        found = [*scores.log_probs, *itertools.chain.from_iterable(scores.top_log_probs)]
        if not all(map(math.isfinite, found)):
            raise BackendError(
                f"{_KEY}: {teacher.url} gives {trajectory.trajectory_id} log-probs that are not"
                " finite"
            )
        largest = max(itertools.chain.from_iterable(scores.top_ids), default=0)
        if largest >= self._vocab_size:
            raise BackendError(
                f"{_KEY}: {teacher.url} finds id {largest} likely, but the policy has"
                f" {self._vocab_size} ids; set algorithm.kl.top_k=0, or choose another teacher"
            )


def _chosen(scores: TokenScores, at: Sequence[int]) -> TokenScores:
    """Return the scores at some of the positions."""
    return TokenScores(
        log_probs=tuple(scores.log_probs[i] for i in at),
        top_ids=tuple(scores.top_ids[i] for i in at) if scores.top_ids else (),
        top_log_probs=tuple(scores.top_log_probs[i] for i in at) if scores.top_ids else (),
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
        config: the resolved configuration.
        model: the policy's hyperparameters.
        probe_ids: a context that each teacher scores once, before anything is sampled.
        print_line: takes a line of progress.

    Raises:
        BackendError: a server cannot be reached, or does not score.
        ConfigError: an address or a token is wrong, or a server's engine does not score given ids.
    """
    teachers = config.distill.teachers if config.distill else ()
    if not any(teacher.url for teacher in teachers):
        yield None
        return
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
                await client.score(probe_ids, top_k=config.algorithm.kl.top_k)
            clients.append((teacher, client))
        yield ServedTeachers(clients, top_k=config.algorithm.kl.top_k, vocab_size=model.vocab_size)
