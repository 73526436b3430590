"""Who may talk to which recorder: sessions by name, each with a secret of its own, limits, and an end."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jax_agent_rl.agents.endpoint.failures import ApiError
from jax_agent_rl.agents.endpoint.wire import ChatRequest, CompletionRequest
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.types import SamplingParams


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One agent's conversations.

    Attributes:
        session_id: stands in the path of its requests.
        recorder: where they go.
        api_key: what its client must send; None asks for nothing.
        sampling: how the policy samples.
        free_sampling: whether requests choose temperature, top_p and seed. In training they do not: the learner's
            log-probs are those of the run's own settings, so what an agent asks for is set aside.
        tasks: requests that are running; they end with the session.
        last_used: when the last request came or went.
    """

    session_id: str
    recorder: ChatRecorder
    sampling: SamplingParams
    api_key: str | None = None
    free_sampling: bool = False
    tasks: set[asyncio.Task] = field(default_factory=set)
    last_used: float = 0.0

    def check_key(self, given: str) -> None:
        """Raises ApiError 401 unless the key is right."""
        if self.api_key is not None and not hmac.compare_digest(self.api_key.encode(), given.encode()):
            raise ApiError(401, "the API key is not that of this session", code="invalid_api_key")

    def sampling_for(self, request: ChatRequest | CompletionRequest) -> SamplingParams:
        """How to sample one request; the recorder derives each choice's seed."""
        limit = self.sampling.max_tokens if request.limit is None else min(request.limit, self.sampling.max_tokens)
        sampling = replace(self.sampling, max_tokens=limit, stop=request.stops)
        if not self.free_sampling:
            return sampling
        wanted = {"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed}
        return replace(sampling, **{key: value for key, value in wanted.items() if value is not None})

    def close(self) -> None:
        """Ends its requests and forgets where its KV lives."""
        for task in self.tasks:
            task.cancel()
        self.recorder.context.client.end_session(self.session_id)


class SessionStore:
    """Sessions by id.

    Args:
        max_sessions: most at a time.
        ttl: seconds after which an idle session that a client opened is forgotten.
        create: makes the session of an id that a client names first; None knows only what :meth:`add` was given.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        ttl: float,
        create: Callable[[str], Session] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions: dict[str, Session] = {}
        self._max = max_sessions
        self._ttl = ttl
        self._create = create
        self._clock = clock

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """Takes a session in.

        Raises:
            ApiError: there are too many.
        """
        if len(self._sessions) >= self._max:
            raise ApiError(429, f"there are {len(self._sessions)} sessions, the most; end some", retry=True)
        session.last_used = self._clock()
        self._sessions[session.session_id] = session

    def find(self, session_id: str) -> Session:
        """The session of a request.

        Raises:
            ApiError: there is none, or too many to open one.
        """
        self._forget_idle()
        if session_id not in self._sessions:
            if self._create is None:
                raise ApiError(404, f"there is no session {session_id!r}; it may be over", code="session_not_found")
            self.add(self._create(session_id))
        session = self._sessions[session_id]
        session.last_used = self._clock()
        return session

    def end(self, session_id: str) -> bool:
        """Ends a session and its requests; False if there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.close()
        return True

    def close(self) -> None:
        """Ends all."""
        for session_id in list(self._sessions):
            self.end(session_id)

    def _forget_idle(self) -> None:
        """Only what clients opened: a session of an agent loop ends with its trajectory."""
        if self._create is None:
            return
        now = self._clock()
        for session in list(self._sessions.values()):
            if not session.tasks and now - session.last_used > self._ttl:
                self.end(session.session_id)
