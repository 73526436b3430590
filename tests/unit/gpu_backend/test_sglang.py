"""The client of SGLang's server, on a server with its routes whose model is a table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gpu_backend.sglang.backend import SglangBackend
from gpu_backend.sglang.gate import PriorityGate
from gpu_backend.sglang.settings import SglangSettings
from jax_agent_rl.errors import BackendError, ConfigError, EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.protocol import FILES, GenerateRequest, WeightUpdate
from jax_agent_rl.testing.conformance.backends import BASE, MIXED, OTHER, BackendUnderTest
from jax_agent_rl.testing.conformance.models import log_softmax
from jax_agent_rl.testing.conformance.runner import run_suite
from jax_agent_rl.testing.leaks import Footprint
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason
from jax_agent_rl.utils.weight_transfer import LogprobProbe
from tests.fake_sglang import CONTEXT, EOS, TENSOR, VOCABULARY, FakeSglang, table, write_model
from tests.messages import raises

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDE"


def to_text(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token_id] for token_id in ids)


def settings(folder: Path, url: str, **fields: Any) -> SglangSettings:
    return SglangSettings(
        model=str(folder), vocab_size=VOCABULARY, max_model_len=CONTEXT, url=url, **fields
    )


def probe(seed: int) -> LogprobProbe:
    ids = (5, 6, 7, 8)
    rows = log_softmax(table(seed)[list(ids[:-1])].astype(np.float64))
    return LogprobProbe(ids=(ids,), log_probs=(tuple(rows[np.arange(3), list(ids[1:])].tolist()),))


def request(name: str = "r", *, max_tokens: int = 8, **sampling: Any) -> GenerateRequest:
    params = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=name,
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=max_tokens, **params),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 0)


@contextlib.asynccontextmanager
async def connected(
    model: Path, *, change: Callable[[FakeSglang], None] | None = None, **fields: Any
) -> AsyncIterator[tuple[FakeSglang, SglangBackend]]:
    server = FakeSglang()
    if change is not None:
        change(server)
    async with server.serving() as url:
        backend = SglangBackend(settings(model, url, **fields), decode_text=to_text)
        try:
            await backend.start()
            yield server, backend
        finally:
            await backend.close()


class ServedBackend(SglangBackend):
    """The client, with a server that lives as long."""

    def __init__(self, model: Path) -> None:
        super().__init__(settings(model, "http://127.0.0.1:1"), decode_text=to_text)
        self._stack = contextlib.AsyncExitStack()
        self._model = model

    async def start(self) -> None:
        url = await self._stack.enter_async_context(FakeSglang().serving())
        self._settings = settings(self._model, url)
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self._stack.aclose()


SEEDS = {BASE: 0, OTHER: 1, MIXED: 1}
"""Of a set's only tensor, a part is the whole."""


class Tables:
    """The reference of the conformance suite."""

    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        return table(SEEDS[weights])[list(ids)]


def test_the_client_keeps_every_rule_of_the_protocol(model: Path, tmp_path: Path):
    folders = [model, write_model(tmp_path / "other", 1)]
    subject = BackendUnderTest(
        name="sglang's routes",
        make=lambda: ServedBackend(model),
        reference=Tables(),
        payload=lambda kind, which: [str(folders[SEEDS[which]] / "model.safetensors")],
        probe=lambda which: probe(SEEDS[which]),
        vocab_size=VOCABULARY,
        eos_ids=frozenset({EOS}),
        decode_text=to_text,
        tolerance=1e-5,
        timeout=30.0,
    )
    report = run_suite(subject)
    assert [result for result in report.results if result.outcome == "failed"] == []
    passed = {result.check for result in report.results if result.outcome == "passed"}
    assert passed >= {
        "abort-returns-partials",
        "logprobs-top-p",
        "partial-update",
        "pause-abort",
        "pause-keep",
        "pause-wait",
        "priorities",
        "replay-supports",
        "scores-match-reference",
        "update-in-flight",
        "weights-take-effect",
    }


async def test_what_the_server_was_started_with_is_what_the_backend_declares(model: Path):
    def change(server: FakeSglang) -> None:
        server.info |= {
            "sampling_mask_max_tokens": VOCABULARY - 1,
            "disable_radix_cache": True,
            "enable_priority_scheduling": False,
            "enable_deterministic_inference": True,
            "enable_memory_saver": True,
            "dtype": "torch.bfloat16",
            "kv_cache_dtype": "fp8_e5m2",
            "max_running_requests": 3,
        }

    async with connected(model) as (_, backend):
        usual = backend.capabilities
    async with connected(model, change=change) as (_, backend):
        other = backend.capabilities
    assert usual.any_sampling and usual.sampling_replay and usual.prefix_reuse and usual.priorities
    assert not (usual.seeds or usual.sleep)
    assert usual.weight_payloads == {FILES}
    assert not (other.any_sampling or other.sampling_replay or other.prefix_reuse)
    assert not other.priorities and other.seeds and other.sleep
    assert (other.precision, other.weight_dtype, other.max_concurrent) == ("fp8", "bfloat16", 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.5.9"}, "0.5.23"),
        ({"skip_tokenizer_init": False}, "--skip-tokenizer-init"),
        ({"max_req_input_len": CONTEXT - 1}, "--context-length"),
    ],
)
async def test_a_server_that_was_started_for_something_else_is_refused(
    model: Path, change: dict[str, Any], words: str
):
    with raises(ConfigError, fix=words):
        async with connected(model, change=lambda server: server.info.update(change)):
            pass


@pytest.mark.parametrize(("version", "served"), [("default", 0), ("7", 7), ("-1", -1)])
async def test_a_server_that_has_served_a_run_keeps_its_version(
    model: Path, version: str, served: int
):
    async with connected(model, change=lambda server: setattr(server, "version", version)) as (
        _,
        backend,
    ):
        assert backend.policy_version == served
        output = await backend.generate(request())
        assert set(output.policy_versions) == {served}


MALFORMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no ids": lambda chunk: {"meta_info": chunk["meta_info"] | {"output_token_logprobs": []}},
    "an id of no vocabulary": lambda chunk: _with_entry(chunk, [-1.0, VOCABULARY, None]),
    "a log-prob that is none": lambda chunk: _with_entry(chunk, [None, 5, None]),
    "a log-prob above 0": lambda chunk: _with_entry(chunk, [0.5, 5, None]),
    "too many ids": lambda chunk: {
        "meta_info": chunk["meta_info"]
        | {"completion_tokens": 99, "output_token_logprobs": [[-1.0, 5, None]] * 99}
    },
    "no object": lambda chunk: [],
    "no meta_info": lambda chunk: {},
    "an error": lambda chunk: {"error": {"message": "out of memory"}},
    "another end": lambda chunk: {
        "meta_info": chunk["meta_info"] | {"finish_reason": {"type": "abort", "message": "m"}}
    },
}


def _with_entry(chunk: dict[str, Any], entry: list[Any]) -> dict[str, Any]:
    return {"meta_info": chunk["meta_info"] | {"output_token_logprobs": [entry]}}


@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
async def test_what_no_server_of_sglang_answers_is_an_error_of_the_request(
    model: Path, spoil: Callable[[dict[str, Any]], Any]
):
    async with connected(model) as (server, backend):
        server.spoil = spoil
        with pytest.raises(BackendError) as caught:
            await backend.generate(request())
        assert not isinstance(caught.value, EngineDiedError)
        server.spoil = lambda chunk: chunk
        assert len((await backend.generate(request())).token_ids) == 8


async def test_a_support_without_the_drawn_id_is_an_error(model: Path):
    def spoil(chunk: dict[str, Any]) -> dict[str, Any]:
        drawn = chunk["output_ids"][0]
        meta = chunk["meta_info"] | {"output_token_sampling_mask": [[(drawn + 1) % VOCABULARY]]}
        return chunk | {"meta_info": meta}

    async with connected(model) as (server, backend):
        server.spoil = spoil
        with raises(BackendError, value="support"):
            await backend.generate(request(temperature=1.0, top_k=3))


async def test_ids_after_an_update_in_flight_carry_the_version_that_the_server_tells(
    model: Path, tmp_path: Path
):
    other = write_model(tmp_path / "other", 1) / "model.safetensors"
    update = WeightUpdate(version=1, kind=FILES, payload=[str(other)], probe=probe(1))
    async with connected(model) as (_, backend):
        chunks = []
        async with contextlib.aclosing(backend.stream(request(max_tokens=120))) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 3:
                    await backend.update_weights(update)
        final = chunks[-1].final
        assert final is not None
        assert [chunk.final is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        versions = final.policy_versions
        cut = versions.index(1)
        assert 3 <= cut < 120 and set(versions[:cut]) == {0} and set(versions[cut:]) == {1}
        context = [5, 6, 7, *final.token_ids]
        for index, version in enumerate(versions):
            row = log_softmax(table(version)[context[2 + index]][None].astype(np.float64))[0]
            assert final.log_probs[index] == pytest.approx(row[final.token_ids[index]], abs=1e-5)


async def test_weights_that_do_not_give_the_learners_log_probs_are_not_served(
    model: Path, tmp_path: Path
):
    other = write_model(tmp_path / "other", 1) / "model.safetensors"
    wrong = WeightUpdate(version=1, kind=FILES, payload=[str(other)], probe=probe(0))
    async with connected(model) as (_, backend):
        running = asyncio.create_task(backend.generate(request("running", max_tokens=120)))
        await asyncio.sleep(0.02)
        with raises(WeightUpdateError, key="rollout.sglang.max_logprob_difference"):
            await backend.update_weights(wrong)
        for attempt in (running, backend.generate(request("next"))):
            with raises(EngineDiedError, value="version 1"):
                await attempt
        assert not (await backend.health()).ok
        with raises(WeightUpdateError, value="partial"):
            await backend.update_weights(replace(wrong, version=2, partial=True))

        await backend.update_weights(replace(wrong, version=2, probe=probe(1)))
        assert (await backend.health()).ok
        assert set((await backend.generate(request("last"))).policy_versions) == {2}


async def test_tensors_that_do_not_fit_never_reach_the_server(model: Path, tmp_path: Path):
    files = {}
    for name, tensors in {
        "shape": {TENSOR: np.zeros((VOCABULARY, 3), np.float32)},
        "name": {"model.other.weight": np.zeros((VOCABULARY, 3), np.float32)},
    }.items():
        files[name] = tmp_path / f"{name}.safetensors"
        save_file(tensors, files[name])
    async with connected(model) as (server, backend):
        server.refuses_weights = True  # were it asked
        for file in files.values():
            update = WeightUpdate(version=1, kind=FILES, payload=[str(file)], probe=probe(1))
            with raises(WeightUpdateError):
                await backend.update_weights(update)
        assert (await backend.health()).ok
        assert len((await backend.generate(request())).token_ids) == 8


async def test_names_of_requests_on_the_server_are_no_prefixes_of_each_other(model: Path):
    async with connected(model) as (server, backend):
        outputs = await asyncio.gather(
            *(backend.generate(request(name, max_tokens=20)) for name in ("r", "r1", "r11"))
        )
    assert [len(output.token_ids) for output in outputs] == [20] * 3
    assert len({len(body["rid"]) for body in server.requests}) == 1


async def test_a_request_that_is_aborted_in_the_queue_keeps_its_ids_once(model: Path):
    async with connected(model) as (_, backend):
        running = asyncio.create_task(backend.generate(request(max_tokens=120)))
        while (await backend.health()).running == 0:
            await asyncio.sleep(0.001)
        await backend.pause(PauseMode.KEEP)
        assert await backend.abort("r")
        output = await running
        assert output.stop_reason is StopReason.ABORTED
        assert 0 < len(output.token_ids) < 120
        await backend.resume()
        whole = await backend.generate(request(max_tokens=len(output.token_ids)))
        assert output.token_ids == whole.token_ids


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=12))
def test_what_waits_at_a_gate_passes_by_priority_and_then_by_arrival(waiting):
    async def passed() -> list[int]:
        gate = PriorityGate()
        gate.close()
        order = []

        async def go(number: int, priority: int) -> None:
            await gate.wait(priority)
            order.append(number)

        async with asyncio.TaskGroup() as tasks:
            started = []
            for number, (priority, _) in enumerate(waiting):
                started.append(tasks.create_task(go(number, priority)))
            await asyncio.sleep(0)
            assert order == []
            for task, (_, leaves) in zip(started, waiting, strict=True):
                if leaves:
                    task.cancel()
            gate.open()
        await gate.wait(0)  # it stays open
        return order

    remaining = []
    for number, (priority, leaves) in enumerate(waiting):
        if not leaves:
            remaining.append((priority, number))
    assert asyncio.run(passed()) == [number for _, number in sorted(remaining)]


async def test_a_lost_server_ends_its_requests(model: Path):
    server = FakeSglang()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(server.serving())
        backend = SglangBackend(settings(model, url), decode_text=to_text)
        await backend.start()
        running = asyncio.create_task(backend.generate(request(max_tokens=150)))
        while (await backend.health()).running == 0:
            await asyncio.sleep(0.001)
        await stack.aclose()
        with pytest.raises(BackendError):
            await running
        with raises(EngineDiedError, value=url):
            await backend.generate(request("next"))
        await backend.close()


def test_a_python_without_sglang_is_refused_before_anything_is_loaded(tmp_path: Path):
    from gpu_backend.sglang.settings import check_python

    python = tmp_path / "bin" / "python"
    with raises(ConfigError, key="rollout.sglang.python", value=str(python)):
        check_python(str(python))
    python.parent.mkdir()
    python.touch()
    with raises(ConfigError, key="rollout.sglang.python", value="SGLang"):
        check_python(str(python))
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    check_python(str(python))


def environment(folder: Path, script: str) -> str:
    """An environment whose Python is a script, and that has a package of SGLang's name."""
    package = folder / "lib" / "python3.11" / "site-packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def started(model: Path, python: str, tmp_path: Path) -> SglangSettings:
    return replace(
        settings(model, ""),
        url=None,
        python=python,
        device="cpu",
        log_file=str(tmp_path / "sglang.log"),
    )


async def test_a_server_that_is_started_serves_this_process_alone_and_ends_with_its_backend(
    model: Path, tmp_path: Path
):
    python = environment(tmp_path / "venv", f'exec {sys.executable} -m tests.fake_sglang "$@"')
    backend = SglangBackend(started(model, python, tmp_path), version=4, decode_text=to_text)
    footprint = Footprint.now()
    children_before = psutil.Process().children()  # of other tests
    await backend.start()
    try:
        output = await backend.generate(request())
        assert set(output.policy_versions) == {4}

        (process,) = set(psutil.Process().children()) - set(children_before)
        (server,) = process.children()
        config = Path(server.cmdline()[-1])
        assert config.stat().st_mode & 0o077 == 0, "others could read the token"
        arguments = json.loads(config.read_text())
        assert arguments["api-key"] not in " ".join(server.cmdline() + process.cmdline())
        stranger = SglangBackend(settings(model, f"http://127.0.0.1:{arguments['port']}"))
        with raises(BackendError, key="rollout.token_env"):
            await stranger.start()

        server.kill()
        with raises(EngineDiedError, value="sglang.log"):
            while True:
                await backend.generate(request())
    finally:
        await backend.close()
    assert footprint.added() == []
    assert not config.exists()


async def test_a_server_that_does_not_start_says_why(model: Path, tmp_path: Path):
    python = environment(tmp_path / "venv", "echo 'ValueError: no such device'; exit 1")
    backend = SglangBackend(started(model, python, tmp_path))
    with raises(BackendError, value=("no such device", "sglang.log")):
        await backend.start()
    assert not (await backend.health()).ok
    await backend.close()


def test_a_server_that_is_started_gets_what_the_client_depends_on(model: Path):
    arguments = settings(model, "").arguments(port=1, version=7, token="secret")
    json.dumps(arguments)
    assert arguments["sampling-mask-max-tokens"] == VOCABULARY
    assert arguments["context-length"] > CONTEXT
    assert arguments["weight-version"] == "7"
    for name in (
        "skip-tokenizer-init",
        "enable-priority-scheduling",
        "incremental-streaming-output",
    ):
        assert arguments[name] is True
    own = replace(settings(model, ""), server_args={"attention_backend": "fa3"})
    assert own.arguments(port=1, version=0, token="t")["attention-backend"] == "fa3"
