"""The Tinker SDK, unmodified, against a server on a tiny model. Expected losses are PyTorch's, in
float64.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples

os.environ.setdefault(
    "TINKER_TELEMETRY", "0"
)  # the SDK would send it to the server of a test that has ended
pytest.importorskip("tinker")
pytest.importorskip("torch")

import tinker
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import GetInfoResponse

from jax_agent_rl.config.commands import TinkerServerSettings
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.sequence_learner import SequenceLearner
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.tinker_server.app import TinkerServer, check_states, open_server
from jax_agent_rl.tinker_server.database import Database, Request
from jax_agent_rl.tinker_server.requests import SampleRequest
from jax_agent_rl.tinker_server.training import PREFIX, Models
from jax_agent_rl.tinker_server.wire import (
    INPUTS,
    BadRequest,
    parse_batch,
    read_batch,
    read_prompt,
    read_targets,
    sampling_params,
)
from tests.messages import raises
from tests.tiny_chat import CONFIG, params, tokenizer
from tests.unit.test_routes import SAMPLE, VALUES, changed, places

RANK = 4
ADAM = tinker.AdamParams(learning_rate=0.02)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(folder, CONFIG, jax.tree.map(lambda x: 0.3 * x, params()))
    tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def serving(model_folder: Path, state_dir: Path, **changed) -> Iterator[str]:
    """A server in a thread of its own; yields its URL. It ends without warning its clients."""
    tree = {
        "model": {"path": str(model_folder)},
        "model_name": "tiny",
        "state_dir": str(state_dir),
        "port": 0,
        "lora": {"rank": RANK, "alpha": 8.0},
        "pack_length": 64,
        "max_model_len": 64,
        "max_concurrent_decodes": 4,
        "snapshot_every": 2,
        **changed,
    }
    settings = build_tree(TinkerServerSettings, tree)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    url = []

    async def run() -> None:
        async with open_server(settings, print_line=lambda line: None) as server:
            url.append(server.http.url)
            started.set()
            await asyncio.Event().wait()

    def main() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(run())
    thread = threading.Thread(target=main)
    thread.start()
    assert started.wait(120)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


CONNECTED: list[tinker.ServiceClient] = []


def connect(url: str) -> tinker.ServiceClient:
    CONNECTED.append(tinker.ServiceClient(base_url=url, api_key="tml-test"))
    return CONNECTED[-1]


@pytest.fixture(scope="module", autouse=True)
def close_clients() -> Iterator[None]:
    """End the clients' threads, which would go on to warn, in other tests, of servers that are
    gone.
    """
    yield
    for client in CONNECTED:
        client.holder.close()


@pytest.fixture(scope="module")
def service_url(model_folder, tmp_path_factory) -> Iterator[str]:
    with serving(model_folder, tmp_path_factory.mktemp("state")) as url:
        yield url


@pytest.fixture(scope="module")
def service(service_url) -> tinker.ServiceClient:
    return connect(service_url)


def trainer(service: tinker.ServiceClient, seed: int = 0) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=RANK, seed=seed).result()


def data(count: int = 3, seed: int = 0) -> list[tinker.Datum]:
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(count):
        ids = rng.integers(3, CONFIG.vocab_size, rng.integers(6, 20))
        size = len(ids) - 1
        inputs = {
            "weights": rng.choice([0.0, 1.0], size).astype(np.float32),
            "logprobs": rng.normal(-6, 0.3, size).astype(np.float32),
            "advantages": rng.normal(size=size).astype(np.float32),
            "sequence_ratio_mask": np.float32(np.arange(size) > 1),
        }
        batch.append(datum_of(ids.tolist(), **inputs))
    return batch


def datum_of(ids: list[int], **inputs: Any) -> tinker.Datum:
    """A datum of all ids but the last, whose targets are all but the first."""
    tensors: Any = {"target_tokens": ids[1:]} | inputs  # arrays and lists, which Datum converts
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=tensors)


def logprobs_of(output) -> list[np.ndarray]:
    return [np.array(loss_output["logprobs"].tolist()) for loss_output in output.loss_fn_outputs]


def peer_tables(model_folder: Path, batch: list[tinker.Datum]) -> list[np.ndarray]:
    """Log-probs of every id after each token of the inputs, by PyTorch; float64 [N, V] each."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        inputs = [torch.tensor(datum.model_input.to_ints()) for datum in batch]
        return [torch.log_softmax(peer(ids[None]).logits[0], -1).numpy() for ids in inputs]


def peer_logprobs(model_folder: Path, batch: list[tinker.Datum]) -> list[np.ndarray]:
    targets = (np.array(datum.loss_fn_inputs["target_tokens"].tolist()) for datum in batch)
    tables = peer_tables(model_folder, batch)
    return [
        np.take_along_axis(log_probs, ids[:, None], 1)[:, 0]
        for log_probs, ids in zip(tables, targets, strict=True)
    ]


def gspo(lp, w, old, a, mask):
    ratio = np.exp((lp - old)[mask != 0].mean())
    return -np.minimum(ratio * a, np.clip(ratio, 0.9, 1.1) * a) * w


LOSSES: dict[str, Callable] = {
    "cross_entropy": lambda lp, w, old, a, m: -(w * lp),
    "importance_sampling": lambda lp, w, old, a, m: -np.exp(lp - old) * a * w,
    "ppo": lambda lp, w, old, a, m: (
        -np.minimum(np.exp(lp - old) * a, np.clip(np.exp(lp - old), 0.8, 1.2) * a) * w
    ),
    "cispo": lambda lp, w, old, a, m: -np.clip(np.exp(lp - old), 0.8, 1.2) * lp * a * w,
    "dro": lambda lp, w, old, a, m: -(lp * a - 0.5 * 0.1 * (lp - old) ** 2) * w,
    "gspo": gspo,
}
CONSTANTS = {"dro": {"beta": 0.1}, "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_log_probs_are_those_of_pytorch(service, model_folder, loss):
    batch = data()
    output = trainer(service).forward_backward(batch, loss, CONSTANTS.get(loss)).result()
    expected = peer_logprobs(model_folder, batch)
    for ours, theirs in zip(logprobs_of(output), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)

    def total(datum: tinker.Datum, logprobs: np.ndarray) -> float:
        names = ("weights", "logprobs", "advantages", "sequence_ratio_mask")
        return LOSSES[loss](
            logprobs, *(np.array(datum.loss_fn_inputs[name].tolist()) for name in names)
        ).sum()

    sums = [total(*parts) for parts in zip(batch, expected, strict=True)]
    assert output.metrics["loss:sum"] == pytest.approx(sum(sums), rel=1e-4)


def test_a_client_learns_samples_and_goes_on_from_what_it_saved(service, service_url):
    client = trainer(service)
    batch = data()
    losses = []
    for _ in range(5):
        computed = client.forward_backward(batch, "cross_entropy")
        client.optim_step(ADAM).result()
        losses.append(computed.result().metrics["loss:sum"])
    assert losses[-1] < 0.95 * losses[0]
    path = client.save_state("five").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    for trained in (client, again):
        trained.forward_backward(batch, "cross_entropy").result()
        trained.optim_step(ADAM).result()
    mine = logprobs_of(client.forward(batch, "cross_entropy").result())
    its = logprobs_of(again.forward(batch, "cross_entropy").result())
    assert all(map(np.array_equal, mine, its))
    assert [
        checkpoint.tinker_path
        for checkpoint in (
            tinker.RestClient(base_url=service_url, api_key="tml-test")
            .list_checkpoints(path.split("/")[2])
            .result()
            .checkpoints
        )
    ] == [path]


def test_targets_may_be_any_ids_and_several_per_token(service, model_folder):
    """The batch has a datum of each kind; expected log-probs are PyTorch's of the input alone."""
    ids = [5, 9, 17, 30, 8]
    rng = np.random.default_rng(0)
    targets = {
        "own": np.array([0, 0, 17, 30], np.int64),
        "several": rng.integers(0, CONFIG.vocab_size, (4, 3)),
    }
    targets["sparse"] = np.where(np.arange(4)[:, None] == 2, targets["several"], 0)
    weights = {name: rng.random(ids.shape).astype(np.float32) for name, ids in targets.items()}
    weights["sparse"] *= targets["sparse"] != 0
    batch = [
        datum_of(ids, target_tokens=targets[name], weights=weights[name])
        for name in ("own", "several")
    ]
    sparse = [
        tinker.TensorData.from_torch_sparse(torch.tensor(x["sparse"])) for x in (targets, weights)
    ]
    assert all(tensor.sparse_crow_indices is not None for tensor in sparse)
    batch.append(datum_of(ids, target_tokens=sparse[0], weights=sparse[1]))
    batch.append(datum_of(ids))
    client = trainer(service)
    output = client.forward_backward(batch, "cross_entropy").result()
    (log_probs,) = peer_tables(model_folder, batch[:1])
    expected = [
        np.take_along_axis(log_probs, t.reshape(4, -1), 1).reshape(t.shape)
        for t in targets.values()
    ]
    expected.append(np.take_along_axis(log_probs, np.array(ids[1:])[:, None], 1)[:, 0])
    for ours, theirs in zip(logprobs_of(output), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    total = -sum((w * e).sum() for w, e in zip([*weights.values(), 1.0], expected, strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_custom_losses_run_at_the_client(service, model_folder):
    batch = data()
    client = trainer(service)
    plain = trainer(service)

    def squared(batch: list[tinker.Datum], logprobs: list[torch.Tensor]):
        return sum((values**2).sum() for values in logprobs), {}

    client.forward_backward_custom(batch, squared).result()
    expected = peer_logprobs(model_folder, batch)
    slopes = [
        np.float32(-2 * each) for each in expected
    ]  # cross-entropy with minus the derivative as weights
    weighted = [
        datum_of(
            [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]],
            weights=slope,
        )
        for datum, slope in zip(batch, slopes, strict=True)
    ]
    plain.forward_backward(weighted, "cross_entropy").result()
    for each in (client, plain):
        each.optim_step(ADAM).result()
    mine = logprobs_of(client.forward(batch, "cross_entropy").result())
    its = logprobs_of(plain.forward(batch, "cross_entropy").result())
    for a, b in zip(mine, its, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_samples_of_adapters_and_base_have_the_log_probs_of_their_weights(service):
    clients = [trainer(service, seed) for seed in range(3)]
    for number, client in enumerate(clients[1:]):
        client.forward_backward(data(seed=number), "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    samplers.append(service.create_sampling_client(base_model="tiny"))
    prompt = tinker.ModelInput.from_ints([5, 9, 17])
    asked = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=7, stop=[])
    futures = [sampler.sample(prompt, num_samples=2, sampling_params=asked) for sampler in samplers]
    answers = [future.result().sequences for future in futures]
    for client, sequences in zip(
        [*clients, clients[0]], answers, strict=True
    ):  # an untrained adapter changes nothing
        for sequence in sequences:
            assert len(sequence.tokens) == 8
            assert sequence.stop_reason == "length"
            datum = datum_of([*prompt.to_ints(), *sequence.tokens])
            (scored,) = logprobs_of(client.forward([datum], "cross_entropy").result())
            np.testing.assert_allclose(np.array(sequence.logprobs), scored[2:], atol=1e-4)
    assert answers[0][0].tokens == answers[3][0].tokens != answers[1][0].tokens
    assert answers[0][0].tokens != answers[0][1].tokens, "each sample has a seed of its own"


def test_more_checkpoints_than_the_engine_holds_are_sampled_from_in_turn(model_folder, tmp_path):
    with serving(model_folder, tmp_path, max_sampled_adapters=1) as url:
        service = connect(url)
        clients = [trainer(service, seed) for seed in range(3)]
        for number, client in enumerate(clients):
            client.forward_backward(data(seed=number), "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        samplers = [client.save_weights_and_get_sampling_client() for client in clients]
        greedy = tinker.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
        prompt = tinker.ModelInput.from_ints([5, 9, 17])
        first_round = [sampler.sample(prompt, 1, greedy) for sampler in samplers]
        second_round = [sampler.sample(prompt, 1, greedy) for sampler in samplers]
        first = [future.result().sequences[0].tokens for future in first_round]
        second = [future.result().sequences[0].tokens for future in second_round]
        assert first == second and len(set(map(tuple, first))) > 1


def test_prompt_log_probs_are_those_of_the_model(service, model_folder):
    (datum,) = data(1)
    ids = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    sampler = service.create_sampling_client(base_model="tiny")
    prompt = tinker.ModelInput.from_ints(ids)
    first, *scored = sampler.compute_logprobs(prompt).result()
    (expected,) = peer_logprobs(model_folder, [datum])
    assert first is None
    last = sampler.sample(
        prompt,
        1,
        tinker.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result()
    assert last.prompt_logprobs == [*[None] * (len(ids) - 2), *scored[-2:]]
    np.testing.assert_allclose(scored, expected, atol=1e-4)


def test_the_likeliest_ids_of_prompt_and_sample_are_those_of_the_model(service, model_folder):
    client = trainer(service)
    client.forward_backward(data(), "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = [5, 9, 17, 30]
    answers = [
        sampler.sample(
            tinker.ModelInput.from_ints(prompt[:length]),
            2,
            tinker.SamplingParams(max_tokens=3, temperature=1.0, seed=length, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
        )
        for length in (1, 4)
    ]
    alone, answer = (future.result() for future in answers)
    assert answer.topk_prompt_logprobs is not None
    assert alone.topk_prompt_logprobs == [None]
    assert alone.prompt_logprobs == [None]
    for sequence in answer.sequences:
        ids = [*prompt, *sequence.tokens]
        every = np.tile(np.arange(CONFIG.vocab_size), (len(ids) - 1, 1))
        (log_probs,) = logprobs_of(
            client.forward([datum_of(ids, target_tokens=every)], "cross_entropy").result()
        )
        best = np.argsort(-log_probs, axis=1)
        assert sequence.topk_logprobs is not None
        assert len(sequence.topk_logprobs) == 3
        likeliest = [*answer.topk_prompt_logprobs[1:], *sequence.topk_logprobs]
        for place, (row, order) in enumerate(zip(likeliest, best, strict=True)):
            assert row is not None
            assert [token for token, _ in row] == order[: 2 if place < 3 else 3].tolist()
            np.testing.assert_allclose(
                [logprob for _, logprob in row], log_probs[place][order[: len(row)]], atol=1e-4
            )
    assert answer.topk_prompt_logprobs[0] is None


def test_chosen_ids_are_scored_at_each_token_of_a_prompt(service, model_folder):
    """The first row names ids everywhere, the others in some cells; the tensor is dense, then
    sparse.
    """
    client = trainer(service)
    client.forward_backward(data(), "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    ids = [5, 9, 17, 30, 8, 11]
    rng = np.random.default_rng(0)
    chosen = np.full((5, 4), -1, np.int64)
    chosen[0] = rng.integers(0, CONFIG.vocab_size, 4)
    chosen[3, [0, 2]] = 7, 0
    every = np.tile(np.arange(CONFIG.vocab_size), (5, 1))
    (log_probs,) = logprobs_of(
        client.forward([datum_of(ids, target_tokens=every)], "cross_entropy").result()
    )
    expected = np.where(chosen < 0, 0.0, np.take_along_axis(log_probs, np.maximum(chosen, 0), 1))
    tensors = (
        tinker.TensorData.from_numpy(chosen),
        tinker.TensorData.from_torch_sparse(torch.tensor(chosen), -1),
    )
    prompt = tinker.ModelInput.from_ints(ids)
    asked = tinker.SamplingParams(max_tokens=1)
    futures = [
        sampler.sample(prompt, 1, asked, target_prompt_logprobs=tensor) for tensor in tensors
    ]
    for tensor, future in zip(tensors, futures, strict=True):
        answer = future.result()
        assert answer.prompt_logprobs is None
        assert answer.target_prompt_logprobs is not None
        assert answer.target_prompt_logprobs.sparse_crow_indices == tensor.sparse_crow_indices
        np.testing.assert_allclose(answer.target_prompt_logprobs.to_numpy(), expected, atol=1e-4)
    assert tensors[0].sparse_crow_indices is None
    assert tensors[1].sparse_crow_indices is not None


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (
            np.ones((3, 1), np.int64),
            {"value": "[3, 1]", "fix": ("[2, K] for 3 tokens", "at most 64")},
        ),
        (
            np.full((2, 1), -1),
            {"value": "-1 to -1", "fix": ("0 to 399", "-1 for no id")},
        ),
        (np.array([[5], [400]]), {"value": "5 to 400", "fix": "0 to 399"}),
    ],
)
def test_ids_that_cannot_be_scored_are_refused(service, ids, named):
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = tinker.ModelInput.from_ints([5, 9, 17])
    asked = tinker.SamplingParams(max_tokens=1)
    with raises(tinker.RequestFailedError, **named):
        sampler.sample(
            prompt, 1, asked, target_prompt_logprobs=tinker.TensorData.from_numpy(ids)
        ).result()


def test_a_loss_that_the_sdk_does_not_define_is_refused_early(service):
    client = trainer(service)
    with raises(tinker.RequestFailedError, value="stable_reinforce", fix="SDK"):
        client.forward_backward(data(), "stable_reinforce").result()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    with raises(tinker.BadRequestError, value="stable_reinforce", fix="SDK"):
        sampler.sample(
            tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=1)
        ).result()


def test_log_probs_of_many_prompts_are_computed_together(model_folder, tmp_path, monkeypatch):
    """Prompts wait for the training thread, which then takes all: the second pass has whatever the
    first did not.
    """
    passes = []
    forward = SequenceLearner.forward
    monkeypatch.setattr(
        SequenceLearner, "forward", lambda *a, **b: passes.append(len(a[1])) or forward(*a, **b)
    )
    batch = data(12)
    with serving(model_folder, tmp_path) as url:
        service = connect(url)
        client = trainer(service)
        sampler = service.create_sampling_client(base_model="tiny").result()
        busy = client.forward_backward(data(40), "cross_entropy")
        futures = [sampler.compute_logprobs(datum.model_input) for datum in batch]
        results = [future.result() for future in futures]
        busy.result()
    expected = peer_logprobs(model_folder, batch)
    for (first, *ours), theirs in zip(results, expected, strict=True):
        assert first is None
        np.testing.assert_allclose(np.array(ours), theirs[:-1], atol=1e-4)
    assert sum(passes) == 12 and len(passes) < 12


def test_a_checkpoint_that_gets_the_name_of_another_takes_its_place(service):
    client = trainer(service)
    prompt = tinker.ModelInput.from_ints([5, 9, 17])
    logprobs = []
    for _ in range(2):
        path = client.save_weights_for_sampler("again").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        answer = sampler.sample(
            prompt, 1, tinker.SamplingParams(max_tokens=2, seed=1, stop=[])
        ).result()
        logprobs.append(
            (answer.sequences[0].logprobs, sampler.compute_logprobs(prompt).result()[1:])
        )
        client.forward_backward(data(), "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    (sampled, scored), (sampled_again, scored_again) = logprobs
    assert not np.allclose(sampled, sampled_again, atol=1e-3)
    assert not np.allclose(scored, scored_again, atol=1e-3)


def test_weights_of_one_name_are_told_apart_while_the_clock_stands_still(
    model_folder, tmp_path, monkeypatch
):
    """The same weights again are the same checkpoint, also after others had its name."""
    now = time.time()
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now)
    prompt = tinker.ModelInput.from_ints([5, 9, 17])
    seen_ids = []
    with serving(model_folder, tmp_path) as url:
        service = connect(url)
        client = trainer(service)
        start = client.save_state("start").result().path
        for turn in range(3):
            path = client.save_weights_for_sampler("again").result().path
            sampler = service.create_sampling_client(model_path=path).result()
            answer = sampler.sample(
                prompt, 1, tinker.SamplingParams(max_tokens=2, seed=1, stop=[])
            ).result()
            seen_ids.append(
                (answer.sequences[0].logprobs, sampler.compute_logprobs(prompt).result()[1:])
            )
            if turn == 0:
                client.forward_backward(data(), "cross_entropy").result()
                client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
            else:
                client.load_state(start).result()
    (sampled, scored), (sampled_then, scored_then), (sampled_again, scored_again) = seen_ids
    assert not np.allclose(sampled, sampled_then, atol=1e-3)
    assert not np.allclose(scored, scored_then, atol=1e-3)
    np.testing.assert_allclose(sampled_again, sampled, atol=1e-5)
    np.testing.assert_allclose(scored_again, scored, atol=1e-5)


def test_checkpoints_are_listed_until_they_are_deleted_or_expire(
    model_folder, tmp_path, monkeypatch
):
    with serving(model_folder, tmp_path) as url:
        service = connect(url)
        client = trainer(service)
        rest_client = service.create_rest_client()
        paths = [
            client.save_state(name, ttl_seconds=ttl).result().path
            for name, ttl in (("a", None), ("b", 3600))
        ]

        def listed() -> dict[str, bool]:
            checkpoints = rest_client.list_user_checkpoints().result().checkpoints
            return {
                checkpoint.tinker_path: checkpoint.expires_at is not None
                for checkpoint in checkpoints
            }

        assert listed() == {paths[0]: False, paths[1]: True}
        rest_client.set_checkpoint_ttl_from_tinker_path(paths[0], 7200).result()
        rest_client.set_checkpoint_ttl_from_tinker_path(paths[1], None).result()
        assert listed() == {paths[0]: True, paths[1]: False}
        with raises(tinker.BadRequestError, key="ttl_seconds", value=60, fix=3600):
            rest_client.set_checkpoint_ttl_from_tinker_path(paths[0], 60).result()
        now = time.time()
        monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 7300)
        assert listed() == {paths[1]: False}
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            service.create_training_client_from_state(paths[0]).result()
        assert len(list(tmp_path.glob("checkpoints/*/weights/*.npz"))) == 2
        third = client.save_state("c").result().path  # which also removes files that have expired
        assert sorted(file.stem for file in tmp_path.glob("checkpoints/*/weights/*.npz")) == [
            "b",
            "c",
        ]
        rest_client.delete_checkpoint_from_tinker_path(third).result()
        assert listed() == {paths[1]: False}
        assert [file.stem for file in tmp_path.glob("checkpoints/*/weights/*.npz")] == ["b"]


def test_a_model_of_a_finished_session_is_restored_when_it_is_asked_for(service, service_url):
    client = trainer(service)
    batch = data()
    for _ in range(3):
        client.forward_backward(batch, "cross_entropy").result()
        client.optim_step(ADAM).result()
    old_logprobs = logprobs_of(client.forward(batch, "cross_entropy").result())
    post = httpx.Client(base_url=service_url).post
    post(
        f"/api/v1/sessions/{service.holder.get_session_id()}/finish",
        json={"reason": {"type": "success"}},
    )
    assert all(
        map(
            np.array_equal,
            old_logprobs,
            logprobs_of(client.forward(batch, "cross_entropy").result()),
        )
    )


def test_a_server_that_was_killed_goes_on_where_it_was(model_folder, tmp_path):
    """Five updates, the third and fifth after a restart, are those of a server without one."""
    batch = data()

    def step(client: tinker.TrainingClient, number: int) -> None:
        client.forward_backward(data(seed=number), "cross_entropy").result()
        client.optim_step(ADAM).result()

    with serving(model_folder, tmp_path / "whole") as url:
        client = trainer(connect(url))
        for number in range(5):
            step(client, number)
        client.forward_backward(
            batch, "cross_entropy"
        ).result()  # lost gradients would show in the next update
        step(client, 9)
        expected = logprobs_of(client.forward(batch, "cross_entropy").result())
    port = 0
    for numbers in ((0, 1), (2, 3), (4,), ()):
        with serving(model_folder, tmp_path / "killed", port=port) as url:
            if port == 0:
                client = trainer(connect(url))
                port = int(url.rpartition(":")[2])
            for number in numbers:
                step(client, number)
            if numbers == (4,):
                client.forward_backward(batch, "cross_entropy").result()
            if not numbers:
                step(client, 9)
                log_probs = logprobs_of(client.forward(batch, "cross_entropy").result())
    assert all(map(np.array_equal, log_probs, expected))


def test_a_model_whose_snapshot_is_lost_does_not_go_on_from_initial_weights(model_folder, tmp_path):
    folder = tmp_path / "state"
    with serving(model_folder, folder, snapshot_every=1) as url:
        client = trainer(connect(url))
        port = int(url.rpartition(":")[2])
        client.forward_backward(data(), "cross_entropy").result()
        client.optim_step(ADAM).result()
    (snapshot,) = (folder / "models").rglob("*.npz")
    snapshot.unlink()
    with serving(model_folder, folder, snapshot_every=1, port=port):
        for _ in range(2):
            with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
                client.forward(data(), "cross_entropy").result()


@pytest.mark.parametrize(
    "is_noted", [False, True], ids=["before its snapshot is noted", "after it"]
)
def test_a_server_that_is_killed_while_it_finishes_an_update_repeats_it_once(
    model_folder, tmp_path, monkeypatch, is_noted: bool
):
    batch = data()
    with serving(model_folder, tmp_path / "whole", snapshot_every=1) as url:
        client = trainer(connect(url))
        for _ in range(2):
            client.forward_backward(batch, "cross_entropy").result()
            client.optim_step(ADAM).result()
        expected = logprobs_of(client.forward(batch, "cross_entropy").result())

    note = Database.set_snapshot
    noted: list[Any] = []
    reached = threading.Event()

    def killed(store: Database, *arguments: Any) -> None:
        noted.append(arguments)
        if len(noted) == 2 and not is_noted:
            reached.set()
            raise asyncio.CancelledError  # which ends the thread's caller without another word
        note(store, *arguments)
        if len(noted) == 2:
            reached.set()
            raise asyncio.CancelledError

    with (
        monkeypatch.context() as patched,
        serving(model_folder, tmp_path / "killed", snapshot_every=1) as url,
    ):
        patched.setattr(Database, "set_snapshot", killed)
        client = trainer(connect(url))
        port = int(url.rpartition(":")[2])
        client.forward_backward(batch, "cross_entropy").result()
        client.optim_step(ADAM).result()
        client.forward_backward(batch, "cross_entropy").result()
        update = client.optim_step(ADAM)
        assert reached.wait(120)
    with serving(model_folder, tmp_path / "killed", snapshot_every=1, port=port):
        update.result()
        log_probs = logprobs_of(client.forward(batch, "cross_entropy").result())
    assert all(map(np.array_equal, log_probs, expected))


def test_states_of_another_model_or_of_other_adapters_are_not_continued(model_folder, tmp_path):
    def settings(**changed) -> TinkerServerSettings:
        tree = {
            "model": {"path": str(model_folder)},
            "state_dir": str(tmp_path),
            "lora": {"rank": 4, "alpha": 8.0},
        }
        return build_tree(TinkerServerSettings, tree | changed)

    store = Database(tmp_path)
    check_states(settings(), str(model_folder), store)
    check_states(settings(lora={"rank": 8}), str(model_folder), store)  # nothing was trained yet
    check_states(settings(), str(model_folder), store)
    store.add_model("m", "s", {})
    check_states(settings(port=1, pack_length=128), str(model_folder), store)
    with raises(CheckpointError, key="lora.alpha", value=("was 8.0", "is 9.0"), fix="state_dir"):
        check_states(settings(lora={"rank": 4, "alpha": 9.0}), str(model_folder), store)
    save_hf(tmp_path / "other", CONFIG, params())
    with raises(CheckpointError, key="model.path", value="weights"):
        check_states(
            settings(model={"path": str(tmp_path / "other")}), str(tmp_path / "other"), store
        )
    store.close()


async def test_after_a_restart_clients_that_are_there_come_first(tmp_path):
    store = Database(tmp_path)
    store.add_session("s")
    for model in ("gone", "there"):
        store.add_model(model, "s", {})
        for number in (1, 2):
            store.add_request(f"{model}:{number}", model, "optim_step", b"{}")
    ran = []
    first_runs = threading.Event()
    may_end = threading.Event()

    def run(request: Request) -> bytes:
        ran.append(request.id)
        first_runs.set()
        may_end.wait(10)
        return b"{}"

    settings = build_tree(TinkerServerSettings, {"model": {"path": "tiny"}, "port": 0})
    with ThreadPoolExecutor(1) as training:
        server: Any = TinkerServer(
            settings,
            SimpleNamespace(run=run),
            None,
            store,
            training=training,
            token=None,  # type: ignore[arg-type]
        )
        server.http.listen()
        await server.start()
        async with httpx.AsyncClient(base_url=server.http.url) as client:
            await asyncio.to_thread(
                first_runs.wait, 10
            )  # of the client that may be gone: nothing else is known of
            poll = asyncio.create_task(
                client.post("/api/v1/retrieve_future", json={"request_id": "there:2"})
            )
            while "there" in server.restored:
                await asyncio.sleep(0.01)
            may_end.set()
            assert (await poll).status_code == 200
            await client.post("/api/v1/retrieve_future", json={"request_id": "gone:2"})
        await server.close()
    assert ran == ["gone:1", "there:1", "there:2", "gone:2"]


def test_a_request_that_is_sent_again_is_not_repeated(tmp_path):
    store = Database(tmp_path)
    store.add_session("s")
    store.add_model("m", "s", {})
    first = store.add_request("m:1", "m", "optim_step", b"{}")
    assert first is not None
    assert store.add_request("m:1", "m", "optim_step", b"{}") is None
    assert [request.id for request in store.queued()] == ["m:1"]
    store.finish(first, b"result")
    assert store.queued() == []
    again = Database(tmp_path).request("m:1")
    assert again is not None and again.result == b"result"


def test_old_results_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.RESULTS_KEPT", 2)
    store = Database(tmp_path)
    now = time.time()
    for number in range(1, 7):
        if number == 3:
            monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 4000)
        request = store.add_request(f"s:{number}", "s", "sample", b"{}")
        assert request is not None
        store.finish(request, b"result")
    stored = [store.request(f"s:{number}") for number in range(1, 7)]
    assert [stored_request and stored_request.result for stored_request in stored] == [
        None,
        None,
        *[b"result"] * 4,
    ]
    assert not any(stored_request and stored_request.body for stored_request in stored)


def files_of(state_dir: Path, kind: str) -> list[Path]:
    return sorted(state_dir.glob(f"checkpoints/*/{kind}/*.npz"))


def test_unnamed_weights_stay_while_sampled_from_and_others_until_deleted(
    model_folder, tmp_path, monkeypatch
):
    now = time.time()
    prompt = tinker.ModelInput.from_ints([5, 9, 17])
    once = tinker.SamplingParams(max_tokens=2, seed=1)
    with serving(model_folder, tmp_path) as url:
        service = connect(url)
        port = int(url.rpartition(":")[2])
        client = trainer(service)
        named = client.save_weights_for_sampler("named").result().path
        used = client.save_weights_and_get_sampling_client()
        idle = client.save_weights_and_get_sampling_client()
        for sampler in (used, idle):
            sampler.result().sample(prompt, 1, once).result()
        assert len(files_of(tmp_path, "sampler_weights")) == 3
        monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 3000)
        used.result().sample(prompt, 1, once).result()
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 4000)
    with serving(model_folder, tmp_path, port=port):
        assert len(files_of(tmp_path, "sampler_weights")) == 2
        used.result().sample(prompt, 1, once).result()
        service.create_sampling_client(model_path=named).result().sample(prompt, 1, once).result()
        with raises(tinker.RequestFailedError, key="sampler_ttl_seconds", value=3600):
            idle.result().sample(prompt, 1, once).result()


def test_weights_without_a_name_stay_for_ever_if_the_settings_say_so(
    model_folder, tmp_path, monkeypatch
):
    now = time.time()
    with serving(model_folder, tmp_path, sampler_ttl_seconds=None) as url:
        trainer(connect(url)).save_weights_and_get_sampling_client().result()
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 1e7)
    with serving(model_folder, tmp_path, sampler_ttl_seconds=None):
        assert len(files_of(tmp_path, "sampler_weights")) == 1


@pytest.mark.parametrize("owner", ["s:sampler:0", "sample"], ids=["of a session", "by its path"])
def test_a_checkpoint_that_a_waiting_request_needs_does_not_expire(
    tmp_path, monkeypatch, owner: str
):
    now = time.time()
    path = "tinker://s:train:0/sampler_weights/000001"
    store = Database(tmp_path)
    store.add_checkpoint(path, "s:train:0", "sampler", 1, {"expires": now + 10, "idle_seconds": 10})
    store.add_sampler("s:sampler:0", path)
    body = json.dumps({} if owner != "sample" else {"model_path": path}).encode()
    request = store.add_request(f"{owner}:1", owner, "sample", body)
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 100)
    assert request is not None and store.remove_expired() == []
    store.finish(request, b"")  # it was in use until now
    assert store.remove_expired() == []
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 111)
    assert store.remove_expired() == [path]
    assert store.checkpoints(expired=True) == []


def test_the_life_that_a_client_sets_is_not_changed_by_use(tmp_path, monkeypatch):
    now = time.time()
    path = "tinker://s:train:0/sampler_weights/000001"
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now)
    store = Database(tmp_path)
    store.add_checkpoint(path, "s:train:0", "sampler", 1, {"expires": now + 10, "idle_seconds": 10})
    store.set_expiry(path, now + 50)
    store.add_sampler("s:sampler:0", path)
    checkpoint = store.checkpoint(path)
    assert checkpoint is not None
    assert checkpoint["expires"] == pytest.approx(now + 50)


def test_a_silent_session_ends_and_leaves_named_checkpoints(model_folder, tmp_path, monkeypatch):
    now = time.time()
    batch = data()
    with serving(model_folder, tmp_path) as url:
        service = connect(url)
        port = int(url.rpartition(":")[2])
        client = trainer(service)
        for _ in range(2):
            client.forward_backward(batch, "cross_entropy").result()
            client.optim_step(ADAM).result()
        path = client.save_state("kept").result().path
        assert len(list(tmp_path.glob("models/*/*.npz"))) == 1
    week = 7 * 24 * 3600
    month = 31 * 24 * 3600
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + week)
    with serving(model_folder, tmp_path, port=port):
        assert len(list(tmp_path.glob("models/*/*.npz"))) == 1
        old_logprobs = logprobs_of(client.forward(batch, "cross_entropy").result())
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + week + month)
    with serving(model_folder, tmp_path, port=port) as url:
        assert not list(tmp_path.glob("models/*/*.npz"))
        with pytest.raises(tinker.NotFoundError, match="no model"):
            client.forward(batch, "cross_entropy").result()
        again = connect(url).create_training_client_from_state(path).result()
        assert all(
            map(
                np.allclose,
                old_logprobs,
                logprobs_of(again.forward(batch, "cross_entropy").result()),
            )
        )


def test_files_that_a_killed_server_left_without_a_record_are_removed(model_folder, tmp_path):
    with serving(model_folder, tmp_path) as url:
        trainer(connect(url)).save_state("kept").result()
    (recorded_file,) = files_of(tmp_path, "weights")
    orphaned_files = [recorded_file.with_name("000009.npz"), recorded_file.with_name("000010.tmp")]
    for file in orphaned_files:
        file.write_bytes(b"cut off")
    with serving(model_folder, tmp_path):
        assert recorded_file.exists()
        assert not any(file.exists() for file in orphaned_files)


def test_a_database_of_a_server_that_kept_sessions_for_ever_is_read(tmp_path):
    with sqlite3.connect(tmp_path / "tinker.sqlite") as old:
        old.execute("CREATE TABLE sessions (id TEXT PRIMARY KEY, created REAL NOT NULL)")
        old.execute("INSERT INTO sessions VALUES ('s', 1.0)")
    store = Database(tmp_path)
    assert store.has_session("s") and store.quiet_sessions(60) == [], "it counts from now"


def test_what_is_known_of_old_samples_is_forgotten_and_of_training_is_not(tmp_path, monkeypatch):
    now = time.time()
    store = Database(tmp_path)
    for kind in ("sample", "optim_step"):
        request = store.add_request(kind, "s:train:0", kind, b"{}")
        assert request is not None
        store.finish(request, b"")
    with sqlite3.connect(tmp_path / "tinker.sqlite") as database:
        database.execute("UPDATE requests SET result = NULL")
    store.remove_old_requests()
    assert store.request("sample") is not None
    monkeypatch.setattr("jax_agent_rl.tinker_server.database.time.time", lambda: now + 25 * 3600)
    store.remove_old_requests()
    assert store.request("sample") is None
    assert store.request("optim_step") is not None


def test_a_model_does_not_need_the_checkpoint_that_it_was_loaded_from(model_folder, tmp_path):
    batch = data()
    with serving(model_folder, tmp_path) as url:
        service = connect(url)
        port = int(url.rpartition(":")[2])
        first = trainer(service)
        first.forward_backward(batch, "cross_entropy").result()
        first.optim_step(ADAM).result()
        path = first.save_state("one").result().path
        client = service.create_training_client_from_state_with_optimizer(path).result()
        old_logprobs = logprobs_of(client.forward(batch, "cross_entropy").result())
        service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    with serving(model_folder, tmp_path, port=port):
        new_logprobs = logprobs_of(client.forward(batch, "cross_entropy").result())
    assert all(map(np.array_equal, old_logprobs, new_logprobs))


def test_whole_models_are_trained_and_sampled_from_one_at_a_time(model_folder, tmp_path):
    with serving(model_folder, tmp_path, lora=None) as url:
        service = connect(url)
        with pytest.raises(tinker.BadRequestError, match="trains whole models"):
            trainer(service)
        # The SDK's service client asks for adapters only; its training client works with any model.
        post = httpx.Client(base_url=url).post
        body = {
            "session_id": service.holder.get_session_id(),
            "model_seq_id": 9,
            "base_model": "tiny",
        }
        model = post("/api/v1/create_model", json=body).json()["model_id"]
        info = GetInfoResponse.model_validate(
            post("/api/v1/get_info", json={"model_id": model}).json()
        )
        client = tinker.TrainingClient(service.holder, model_seq_id=9, model_id=model, info=info)
        first_loss = client.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"]
        client.optim_step(tinker.AdamParams(learning_rate=0.003)).result()
        assert (
            client.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"]
            < first_loss
        )
        sampler = client.save_weights_and_get_sampling_client()
        sampler.sample(
            tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=3)
        ).result()
        base = service.create_sampling_client(base_model="tiny")
        assert (
            base.sample(tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=3))
            .result()
            .sequences
        )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"target_tokens": np.array([5, 5, 400], np.int64)},
            {"value": "id 400", "fix": "0 to 399"},
        ),
        (
            {"target_tokens": np.array([5, 5], np.int64)},
            {"key": "target_tokens", "value": ("[2]", "3 tokens")},
        ),
        (
            {"weights": np.ones(2, np.float32)},
            {"key": "weights", "value": ("[2]", "target_tokens [3]")},
        ),
        (
            {"target_tokens": np.ones((3, 2, 1), np.int64)},
            {"value": "[3, 2, 1]", "fix": "[N] or [N, K]"},
        ),
        (
            {"long": True},
            ({"value": ("70 tokens", 63), "fix": "pack_length=71"}),
        ),
        (
            {"rewards": np.ones(3, np.float32)},
            {"key": "loss_fn_inputs", "value": "rewards", "fix": "target_tokens, weights"},
        ),
    ],
)
def test_a_batch_that_is_not_computed_is_refused_and_the_next_one_is(service, changed, named):
    client = trainer(service)
    wrong = datum_of([5] * 71) if "long" in changed else datum_of([5, 6, 7, 8], **changed)
    with raises(tinker.RequestFailedError, **named):
        client.forward_backward([wrong], "cross_entropy").result()
    right = datum_of([5, 6, 7, 8])
    assert client.forward_backward([right], "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_model_that_is_not_served_is_named(service):
    with raises(tinker.NotFoundError, value="'huge'", fix="'tiny'"):
        service.create_lora_training_client(base_model="huge", rank=RANK).result()
    with raises(tinker.BadRequestError, value=8, fix="rank 4"):
        service.create_lora_training_client(base_model="tiny", rank=8).result()


# --- requests of hostile clients: what is read behind the routes of test_routes.py ---------------

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, -1, 10**12, 2**62]), max_size=3)
NUMBERS = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**62]), max_size=4).map(
    lambda x: np.array(x, np.int64).tobytes()
)
CSR = st.builds(
    pb.SparseCsr, values=NUMBERS | st.binary(max_size=9), crow_indices=NUMBERS, col_indices=NUMBERS
)
TENSORS = st.one_of(
    st.builds(
        pb.Tensor,
        dense=NUMBERS | st.binary(max_size=9),
        dtype=st.sampled_from([pb.DTYPE_FLOAT32, pb.DTYPE_INT64, pb.DTYPE_BFLOAT16]),
        shape=SHAPES,
    ),
    st.builds(
        pb.Tensor,
        sparse_csr=CSR,
        dtype=st.sampled_from([pb.DTYPE_FLOAT32, pb.DTYPE_INT64]),
        shape=SHAPES,
    ),
)
CHUNKS = st.builds(
    pb.Chunk,
    encoded_text=st.builds(
        pb.EncodedTextChunk, tokens=st.binary(max_size=9) | st.just(b"\1\0\0\0" * 2)
    ),
)
DATA = st.builds(
    pb.Datum,
    model_input=st.lists(CHUNKS, max_size=2),
    loss_fn_inputs=st.dictionaries(st.sampled_from([*INPUTS, "other"]), TENSORS, max_size=3),
)


@settings(max_examples=examples(300))
@given(st.lists(DATA, max_size=2), st.sampled_from(["cross_entropy", "ppo", "gspo", "other"]))
def test_a_batch_of_anything_is_read_or_refused(batch, loss):
    message = pb.ForwardBackwardRequest(model_id="m", data=batch, loss_fn=loss)
    with contextlib.suppress(BadRequest):
        read_batch(parse_batch(message.SerializeToString()), pack_length=8)


@given(st.binary(max_size=50))
def test_a_body_that_is_no_batch_is_refused(body):
    with contextlib.suppress(BadRequest):
        read_batch(parse_batch(body), pack_length=8)


@settings(max_examples=examples(300))
@given(st.data())
def test_a_request_for_samples_of_anything_is_read_or_refused(data):
    place = data.draw(st.sampled_from(list(places(SAMPLE))))
    asked = changed(SAMPLE, place, data.draw(VALUES | st.just(...)))
    with contextlib.suppress(BadRequest):
        body = SampleRequest.from_json(json.dumps(asked).encode()).model_dump()
        ids = read_prompt(body["prompt"], vocab_size=400)
        read_targets(body.get("target_prompt_logprobs"), len(ids), vocab_size=400)
        sampling_params(body["sampling_params"], 0, longest=10)


def test_a_model_of_any_name_has_no_file_elsewhere(tmp_path):
    models: Any = object.__new__(Models)
    models.folder = tmp_path
    for name in ("../x", "a/../../x", "..", ".", "", "a\0b", "/x"):
        with pytest.raises(BadRequest, match="not a name|not a path"):
            models.snapshot_file(name, 1)
        with pytest.raises(BadRequest, match="not a name|not a path"):
            models.fingerprint(f"{PREFIX}{name}/weights/a")
