"""A server with SGLang's routes, whose model is a table of bigrams: the logits of the next id are
those of the last.

It behaves as SGLang 0.5.23 does where the client depends on it: names of requests are prefixes in
``/abort_request``, one abort of a request is heard, an aborted request that waits repeats its ids,
a pause puts running requests back into the queue, log-probs are those before top-p, top-k and
min-p, and versions of ids are told at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from safetensors.numpy import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jax_agent_rl.testing.conformance.models import log_softmax, truncate
from tests.http_service import serve

VOCABULARY = 31
EOS = 2
TENSOR = "model.embed_tokens.weight"
CONTEXT = 160
SLOTS = 8
PAGE = 16


def table(seed: int) -> np.ndarray:
    """Logits [V, V] of the next id by the last."""
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


def write_model(folder: Path, seed: int) -> Path:
    """Write a folder that the client takes for a model's."""
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": EOS, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({TENSOR: table(seed)}, folder / "model.safetensors")
    return folder


@dataclass
class _Running:
    """A request on the server."""

    body: dict[str, Any]
    arrival: int
    version: str = ""
    ids: list[int] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    mask_log_probs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    cached: int = 0
    num_sent: int = 0
    in_batch: bool = False
    is_aborted: bool = False
    events: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)

    @property
    def order(self) -> tuple[int, int]:
        return self.body.get("priority", 0), self.arrival

    @property
    def context(self) -> list[int]:
        return [*self.body["input_ids"], *self.ids]


class FakeSglang:
    """The server's state.

    Attributes:
        info: what ``/server_info`` says.
        requests: bodies of ``/generate``.
        spoil: changes each chunk before it is sent.
        refuses_weights: the next load fails.
    """

    def __init__(self, seed: int = 0) -> None:
        self.table = table(seed)
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": "torch.float32",
            "quantization": None,
            "kv_cache_dtype": "auto",
            "context_length": CONTEXT + 8,
            "max_req_input_len": CONTEXT + 2,
            "max_running_requests": SLOTS,
            "disable_radix_cache": False,
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            "enable_deterministic_inference": False,
            "enable_memory_saver": False,
            "sampling_mask_max_tokens": VOCABULARY,
        }
        self.version = "default"
        self.requests: list[dict[str, Any]] = []
        self.spoil = lambda chunk: chunk
        self.refuses_weights = False
        self._running: dict[str, _Running] = {}
        self._cached: set[tuple[int, ...]] = set()
        self._arrivals = 0
        self._is_paused = False
        self._rng = np.random.default_rng(0)
        self._work = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/server_info", self._server_info),
                Route("/model_info", self._model_info),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/pause_generation", self._pause, methods=["POST"]),
                Route("/continue_generation", self._continue, methods=["POST"]),
                Route("/update_weights_from_disk", self._update, methods=["POST"]),
                Route("/update_weight_version", self._rename, methods=["POST"]),
                Route("/flush_cache", self._flush, methods=["POST"]),
            ]
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve, and yield the address."""
        async with serve(self.app) as url:
            stepping = asyncio.create_task(self.steps())
            try:
                yield url
            finally:
                stepping.cancel()
                for running in self._running.values():
                    running.events.put_nowait(None)

    # --- the scheduler ----------------------------------------------------------------------------

    async def steps(self) -> None:
        """Sample one id for each request of the batch, again and again."""
        while True:
            await asyncio.sleep(0)
            if self._is_paused or not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            self._fill_batch()
            for running in [one for one in self._running.values() if one.in_batch]:
                self._step(running)
            await asyncio.sleep(0.001)

    def _fill_batch(self) -> None:
        num_running = sum(running.in_batch for running in self._running.values())
        waiting = [one for one in self._running.values() if not one.in_batch]
        for running in sorted(waiting, key=lambda one: one.order)[: SLOTS - num_running]:
            running.in_batch = True
            if not running.ids:
                running.cached = self._num_cached(running.context[:-1])

    def _num_cached(self, ids: list[int]) -> int:
        for length in range(len(ids) - len(ids) % PAGE, 0, -PAGE):
            if tuple(ids[:length]) in self._cached:
                return length
        return 0

    def _step(self, running: _Running) -> None:
        params = running.body["sampling_params"]
        if running.is_aborted:
            self._finish(running, {"type": "abort", "message": "Aborted"})
            return
        logits = self.table[running.context[-1]][None].astype(np.float64)
        if params["temperature"]:
            logits = logits / params["temperature"]
        full = log_softmax(logits)[0]
        kept = full
        if running.body.get("return_sampling_mask"):
            cut = {"top_p": params["top_p"], "top_k": params["top_k"], "min_p": params["min_p"]}
            kept = log_softmax(truncate(logits, **cut))[0]
        token = int(kept.argmax())
        if params["temperature"]:
            token = int(self._rng.choice(VOCABULARY, p=np.exp(kept)))

        running.ids.append(token)
        running.entries.append([float(full[token]), token, None])
        running.masks.append([int(index) for index in np.flatnonzero(np.isfinite(kept))])
        running.mask_log_probs.append(float(kept[token]))
        if running.spans and running.spans[-1]["version"] == self.version:
            running.spans[-1]["end"] += 1
        else:
            count = len(running.ids)
            running.spans.append({"version": self.version, "start": count - 1, "end": count})

        if token in params.get("stop_token_ids", []):
            self._finish(running, {"type": "stop", "matched": token})
        elif len(running.ids) == params["max_new_tokens"]:
            self._finish(running, {"type": "length", "length": len(running.ids)})
        else:
            running.events.put_nowait(self._chunk(running, None))

    def _chunk(self, running: _Running, finish: dict[str, Any] | None) -> dict[str, Any]:
        first = running.num_sent
        running.num_sent = len(running.ids)
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "completion_tokens": len(running.ids),
            "cached_tokens": running.cached,
            "weight_version": self.version,
            "output_token_logprobs": running.entries[first:],
        }
        if running.body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = running.masks[first:]
            meta["output_token_sampling_logprobs"] = running.mask_log_probs[first:]
        if finish is not None:
            meta["weight_versions"] = running.spans or [
                {"version": self.version, "start": 0, "end": 0}
            ]
        return {"output_ids": running.ids[first:], "meta_info": meta}

    def _finish(self, running: _Running, finish: dict[str, Any]) -> None:
        chunk = self._chunk(running, finish)
        if finish["type"] == "abort" and not running.in_batch:
            # From the queue, log-probs of all ids come once more, and the last id.
            chunk["meta_info"]["output_token_logprobs"] = list(running.entries)
            del chunk["meta_info"]["cached_tokens"]
        running.events.put_nowait(chunk)
        running.events.put_nowait(None)
        self._leave(running)

    def _leave(self, running: _Running) -> None:
        self._running.pop(running.body["rid"], None)
        ids = running.context[:-1]
        for length in range(PAGE, len(ids) + 1, PAGE):
            self._cached.add(tuple(ids[:length]))

    # --- routes -----------------------------------------------------------------------------------

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse(self.info)

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version, "model_path": "somewhere"})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if not body["input_ids"]:
            return JSONResponse({"error": {"message": "input_ids cannot be empty."}}, 400)
        if "logprob_start_len" in body:
            return StreamingResponse(self._scores(body), media_type="text/event-stream")
        self._arrivals += 1
        running = _Running(body, self._arrivals)
        self._running[body["rid"]] = running
        self._work.set()
        return StreamingResponse(self._chunks(running), media_type="text/event-stream")

    async def _chunks(self, running: _Running) -> AsyncIterator[bytes]:
        try:
            while (chunk := await running.events.get()) is not None:
                yield _event(self.spoil(chunk))
            yield b"data: [DONE]\n\n"
        finally:
            self._leave(running)

    async def _scores(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        ids = body["input_ids"]
        log_probs = log_softmax(self.table[ids[:-1]].astype(np.float64))
        named = [0 if token == VOCABULARY - 1 else token for token in ids]  # as SGLang does
        entries: list[Any] = [[None, named[0], None]]
        top: list[Any] = [None]
        for row, token, name in zip(log_probs, ids[1:], named[1:], strict=True):
            entries.append([float(row[token]), name, None])
            likeliest = np.argsort(-row)[: body["top_logprobs_num"]]
            top.append([[float(row[index]), int(index), None] for index in likeliest])
        meta: dict[str, Any] = {"input_token_logprobs": entries}
        if body["top_logprobs_num"]:
            meta["input_top_logprobs"] = top
        yield _event(self.spoil({"meta_info": meta}))
        yield b"data: [DONE]\n\n"

    async def _abort(self, request: Request) -> Response:
        body = await request.json()
        for rid, running in list(self._running.items()):
            if rid.startswith(body["rid"]) and not running.is_aborted:
                running.is_aborted = True
                if not running.in_batch:
                    self._finish(running, {"type": "abort", "message": "Abort in waiting queue"})
        return Response()

    async def _pause(self, request: Request) -> Response:
        assert (await request.json())["mode"] == "retract"
        self._is_paused = True
        for running in self._running.values():
            running.in_batch = False
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        self._is_paused = False
        self._work.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: Request) -> Response:
        body = await request.json()
        if self.refuses_weights:
            return JSONResponse({"success": False, "message": "Failed to update weights"}, 400)
        for file in Path(body["model_path"]).glob("*.safetensors"):
            self.table = load_file(file)[TENSOR]
        self._cached.clear()
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _rename(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True, "message": f"updated to {self.version}"})

    async def _flush(self, request: Request) -> Response:
        running = [one for one in self._running.values() if one.in_batch]
        if running:
            return PlainTextResponse("Flush cache failed.\n", 400)
        self._cached.clear()
        return PlainTextResponse("Cache flushed.\n")


async def _run(arguments: dict[str, Any]) -> None:
    """Serve as ``sglang.launch_server`` does, until the process is ended."""
    server = FakeSglang()
    server.version = arguments["weight-version"]
    expected = f"Bearer {arguments['api-key']}"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if dict(scope["headers"]).get(b"authorization", b"").decode() != expected:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await server.app(scope, receive, send)

    stepping = asyncio.create_task(server.steps())
    config = uvicorn.Config(
        app, host=arguments["host"], port=arguments["port"], log_level="critical", lifespan="off"
    )
    await uvicorn.Server(config).serve()
    stepping.cancel()


def _event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


if __name__ == "__main__":
    # -m sglang.launch_server --config FILE
    asyncio.run(_run(json.loads(Path(sys.argv[-1]).read_text())))
