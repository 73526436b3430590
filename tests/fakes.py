"""Fakes shared by the tests: a word-level codec and a scripted engine that follows the backend
protocol.

::

    codec = FakeCodec()
    turns = ["<call>add {\"a\": 1, \"b\": 2}</call>", "3"]
    backend = ScriptedBackend(codec, turns)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats.base import Read, Scanner
from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    WeightUpdate,
)
from jax_agent_rl.testing.fakes import FakeBackend
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, TokenOutput, digest_ids

EOS = 2


class GrowingFake:
    """Reads a growing turn anew each time, as the codec of a test reads turns."""

    def __init__(self, codec, context_ids: Sequence[int]) -> None:
        self._codec = codec
        self._context_ids = context_ids
        self._ids: list[int] = []

    def add(self, ids: Sequence[int]) -> Reply:
        self._ids += ids
        return self._codec.parse_reply(self._ids, context_ids=self._context_ids)


class FakeCodec(ChatCodec):
    """One id per word (with the white space before it). Calls look like ``<call>name
    {json}</call>``.

    A rendered message is ``role: content`` (``role: <image> content``) and ``EOS``; a prompt ends
    with ``assistant:``.
    """

    eos_token_ids: tuple[int, ...] = (EOS,)

    def __init__(self, *, modalities: frozenset[str] = frozenset()) -> None:
        self._media_kinds = modalities
        self._words: list[str] = ["<unk>", "<bos>", "<eos>"]
        self._ids: dict[str, int] = {word: i for i, word in enumerate(self._words)}

    @property
    def longest_token(self) -> int:
        return 100

    @property
    def modalities(self) -> frozenset[str]:
        return self._media_kinds

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def encode_text(self, text: str) -> list[int]:
        ids = []
        for word in re.findall(r"\s*\S+|\s+", text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            ids.append(self._ids[word])
        return ids

    def encode_markup(self, text: str) -> list[int]:
        return self.encode_text(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self._words[i] for i in ids if not (skip_special_tokens and i <= EOS))

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        listing = [] if not tools else self.encode_text("tools: " + json.dumps(tools)) + [EOS]
        return listing + self._render(messages)

    def encode_append(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        boundary = [] if sampled_ids[-1] == EOS else [EOS]
        return boundary + self._render(messages)

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        return False

    def with_template_kwargs(self, kwargs: Mapping[str, Any] | None) -> FakeCodec:
        return self

    def thinking_after(self, context_ids: Sequence[int]) -> str:
        return "<think>" if self.decode(context_ids[-3:]).rstrip().endswith("<think>") else ""

    def turn_text(self, sampled_ids: Sequence[int], context_ids: Sequence[int]) -> str:
        return self.thinking_after(context_ids) + self.decode(sampled_ids)

    def without_special_tokens(self, text: str) -> str:
        return text

    def parse_reply(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        context_ids: Sequence[int] | None = None,
    ) -> Reply:
        return Scanner("<call>", self._read_call).parse(self.decode(sampled_ids), tools)

    def growing_reply(self, context_ids: Sequence[int]) -> GrowingFake:
        return GrowingFake(self, context_ids)

    @staticmethod
    def _read_call(text: str, opening: re.Match[str]) -> Read | None:
        body, closed, _ = text[opening.end() :].partition("</call>")
        if not closed:
            return None
        end = opening.end() + len(body) + len(closed)
        name, _, arguments = body.strip().partition(" ")
        try:
            return Read([ToolCall(name=name, arguments=json.loads(arguments))], end)
        except ValueError:
            return Read([body], end)

    def expand_media(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        return list(ids)  # its model reads one id for each

    def encode_raw(self, text: str) -> list[int]:
        return self.encode_text(text)

    def reply_ids(self, text: str) -> list[int]:
        """Return the ids that a model would sample to say ``text``, with the end of turn."""
        return [*self.encode_text(text), EOS]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            media = "".join(f" <{kind}>" for kind in message.get("media", ()))
            content = message["content"]
            if isinstance(content, list):
                content = " ".join(
                    part["text"] if part["type"] == "text" else f"<{part['type']}>"
                    for part in content
                )
            ids += [*self.encode_text(f"{message['role']}:{media} {content}"), EOS]
        return ids + self.encode_text("assistant:")


Script = Callable[[GenerateRequest], Sequence[int]]


class ScriptedBackend(FakeBackend):
    """Samples scripted replies, one id per turn of the event loop; everything else is as in a real
    engine.

    Args:
        codec: encodes scripted texts.
        script: the replies, by turn of each session (the last one is repeated), or a function from
            the request to ids. A resumed request is recognized by its id and continues where it was
            interrupted.
        capabilities: declared capabilities; by default those of a text-only engine.

    Attributes:
        requests: all requests, in order.
        unpaused: while cleared, no id is sampled.
        running: ids of the running requests.
        max_running: largest number of concurrent requests.
        hold: whether a request must wait before its next id, given how many it has.
    """

    def __init__(
        self,
        codec: FakeCodec,
        script: Sequence[str] | Script,
        *,
        capabilities: Capabilities | None = None,
        version: int = 0,
    ) -> None:
        declared = Capabilities(
            max_model_len=4096,
            max_concurrent=64,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            weight_payloads=frozenset({"arrays"}),
        )
        super().__init__(capabilities or declared, version=version)
        self.codec = codec
        self.requests: list[GenerateRequest] = []
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.max_running = 0
        self.hold: Callable[[GenerateRequest, int], bool] = lambda request, sampled: False
        self.sampled = 0
        self.script = script
        self._turns: dict[str, int] = {}
        self._plans: dict[
            str, tuple[list[int], int]
        ] = {}  # request id -> its ids, length of its first prompt
        self.running: set[str] = set()
        self._aborted: set[str] = set()
        self._dead: EngineDiedError | None = None

    name = "scripted backend"

    async def start(self) -> None:
        self.closed = False

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        self._check_alive()
        self.requests.append(request)
        self.running.add(request.request_id)
        self.max_running = max(self.max_running, len(self.running))
        try:
            return await self._sample(request)
        finally:
            self.running.discard(request.request_id)
            self._aborted.discard(request.request_id)

    async def _sample(self, request: GenerateRequest) -> TokenOutput:
        plan, start = self._plan(request)
        ids: list[int] = []
        versions: list[int] = []
        reason = StopReason.LENGTH
        match = None
        while len(ids) < request.sampling.max_tokens:
            await self.wait_for_turn(request.request_id)
            sampled = len(request.prompt_ids) - start + len(ids)
            while self.hold(request, sampled) and request.request_id not in self._aborted:
                await self.wait_for_turn(request.request_id)
            if request.request_id in self._aborted:
                reason = StopReason.ABORTED
                break
            ids.append(plan[len(request.prompt_ids) - start + len(ids)])
            versions.append(self._version)
            self.sampled += 1
            if ids[-1] in self.codec.eos_token_ids and not request.sampling.ignore_eos:
                reason = StopReason.EOS
                break
            if match := self._stop_match(ids, request.sampling):
                reason = StopReason.STOP
                break
        return TokenOutput(
            token_ids=tuple(ids),
            log_probs=tuple(-0.01 * (i % 7 + 1) for i in ids),
            policy_versions=tuple(versions),
            stop_reason=reason,
            stop_match=match,
            context_digest=self.digest(request.prompt_ids + tuple(ids)),
        )

    def _stop_match(self, ids: Sequence[int], sampling: SamplingParams) -> str | None:
        """Return the stop id or stop string that the last id completes."""
        if ids[-1] in sampling.stop_token_ids:
            return str(ids[-1])
        text = self.codec.decode(ids, skip_special_tokens=False)
        return next((stop for stop in sampling.stop if stop in text), None)

    def digest(self, ids: Sequence[int]) -> str:
        """Return the context digest; overridden by tests of drifting engines."""
        return digest_ids(ids)

    def _plan(self, request: GenerateRequest) -> tuple[list[int], int]:
        if request.request_id not in self._plans:
            session = request.session_id or request.request_id
            turn = self._turns.get(session, 0)
            self._turns[session] = turn + 1
            if callable(self.script):
                ids = list(self.script(request))
            else:
                ids = self.codec.reply_ids(self.script[min(turn, len(self.script) - 1)])
            self._plans[request.request_id] = (ids, len(request.prompt_ids))
        return self._plans[request.request_id]

    async def wait_for_turn(self, request_id: str) -> None:
        await asyncio.sleep(0)
        while (
            not self.unpaused.is_set()
            and request_id not in self._aborted
            and not self._dead
            and not self.closed
        ):
            await asyncio.sleep(0)
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead:
            raise self._dead
        self.require_open()

    def share_plans(self, backend: ScriptedBackend) -> None:
        """Make ``backend`` the same model, which continues what this engine began."""
        backend._plans = self._plans
        backend._turns = self._turns

    def die(self) -> None:
        """Fail every running and future request."""
        self._dead = EngineDiedError("the scripted engine died")

    async def abort(self, request_id: str) -> bool:
        if request_id not in self.running:
            return False
        self._aborted.add(request_id)
        return True

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            while self.running:
                await asyncio.sleep(0)
        elif mode is PauseMode.ABORT:
            self._aborted |= self.running
        self.unpaused.clear()

    async def resume(self) -> None:
        self.unpaused.set()

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        update.require_newer(self._version)
        self._version = update.version

    async def health(self) -> Health:
        return Health(
            ok=not self._dead and not self.closed,
            policy_version=self._version,
            running=len(self.running),
        )

    async def metrics(self) -> BackendMetrics:
        return BackendMetrics(
            generated_tokens=self.sampled, requests_finished=len(self.requests) - len(self.running)
        )

    async def close(self) -> None:
        self.closed = True
