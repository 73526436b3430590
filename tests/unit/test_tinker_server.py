"""The Tinker SDK, unmodified, against a server on a tiny model. Expected losses are PyTorch's, in float64."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

pytest.importorskip("tinker")
pytest.importorskip("torch")

import tinker  # noqa: E402
import torch  # noqa: E402
from tinker.types import GetInfoResponse  # noqa: E402

from jax_agent_rl.config.loading import build_tree  # noqa: E402
from jax_agent_rl.config.tinker_server import TinkerServerSettings  # noqa: E402
from jax_agent_rl.models.hf import save_hf  # noqa: E402
from jax_agent_rl.tinker_server.database import Database  # noqa: E402
from jax_agent_rl.tinker_server.serve import open_server  # noqa: E402
from tests.tiny_chat import CONFIG, params, tokenizer  # noqa: E402

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
    loop, started, url = asyncio.new_event_loop(), threading.Event(), []

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


def connect(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-test")


@pytest.fixture(scope="module")
def service(model_folder, tmp_path_factory) -> Iterator[tinker.ServiceClient]:
    with serving(model_folder, tmp_path_factory.mktemp("state")) as url:
        yield connect(url)


def trainer(service: tinker.ServiceClient, seed: int = 0) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=RANK, seed=seed).result()


def data(count: int = 3, seed: int = 0) -> list[tinker.Datum]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = rng.integers(3, CONFIG.vocab_size, rng.integers(6, 20))
        size = len(ids) - 1
        inputs = {
            "weights": rng.choice([0.0, 1.0], size).astype(np.float32),
            "logprobs": rng.normal(-6, 0.3, size).astype(np.float32),
            "advantages": rng.normal(size=size).astype(np.float32),
        }
        made.append(datum_of(ids.tolist(), **inputs))
    return made


def datum_of(ids: list[int], **inputs: Any) -> tinker.Datum:
    """A datum of all ids but the last, whose targets are all but the first."""
    given: Any = {"target_tokens": ids[1:]} | inputs  # arrays and lists, which Datum converts
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def logprobs_of(output) -> list[np.ndarray]:
    return [np.array(one["logprobs"].tolist()) for one in output.loss_fn_outputs]


def peer_logprobs(model_folder: Path, batch: list[tinker.Datum]) -> list[np.ndarray]:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    found = []
    for datum in batch:
        ids = torch.tensor(datum.model_input.to_ints())
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].tolist())
        with torch.no_grad():
            found.append(torch.log_softmax(peer(ids[None]).logits[0], -1).gather(1, targets[:, None])[:, 0].numpy())
    return found


LOSSES: dict[str, Callable] = {
    "cross_entropy": lambda lp, w, old, a: -(w * lp),
    "importance_sampling": lambda lp, w, old, a: -np.exp(lp - old) * a * w,
    "ppo": lambda lp, w, old, a: -np.minimum(np.exp(lp - old) * a, np.clip(np.exp(lp - old), 0.8, 1.2) * a) * w,
    "cispo": lambda lp, w, old, a: -np.clip(np.exp(lp - old), 0.8, 1.2) * lp * a * w,
    "dro": lambda lp, w, old, a: -(lp * a - 0.5 * 0.1 * (lp - old) ** 2) * w,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_log_probs_are_those_of_pytorch(service, model_folder, loss):
    batch = data()
    config = {"beta": 0.1} if loss == "dro" else None
    output = trainer(service).forward_backward(batch, loss, config).result()
    expected = peer_logprobs(model_folder, batch)
    for ours, theirs in zip(logprobs_of(output), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)

    def total(datum: tinker.Datum, logprobs: np.ndarray) -> float:
        names = ("weights", "logprobs", "advantages")
        return LOSSES[loss](logprobs, *(np.array(datum.loss_fn_inputs[name].tolist()) for name in names)).sum()

    sums = [total(*both) for both in zip(batch, expected, strict=True)]
    assert output.metrics["loss:sum"] == pytest.approx(sum(sums), rel=1e-4)


def test_a_client_learns_samples_and_goes_on_from_what_it_saved(service):
    client, batch = trainer(service), data()
    losses = []
    for _ in range(5):
        computed = client.forward_backward(batch, "cross_entropy")
        client.optim_step(ADAM).result()
        losses.append(computed.result().metrics["loss:sum"])
    assert losses[-1] < 0.95 * losses[0]
    path = client.save_state("five").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    for one in (client, again):
        one.forward_backward(batch, "cross_entropy").result()
        one.optim_step(ADAM).result()
    mine, its = (logprobs_of(one.forward(batch, "cross_entropy").result()) for one in (client, again))
    assert all(map(np.array_equal, mine, its))
    assert [
        one.tinker_path
        for one in tinker.RestClient(base_url=service.holder._base_url, api_key="tml-test")
        .list_checkpoints(path.split("/")[2])
        .result()
        .checkpoints
    ] == [path]


def test_custom_losses_run_at_the_client(service, model_folder):
    batch, client, plain = data(), trainer(service), trainer(service)

    def squared(batch: list[tinker.Datum], logprobs: list[torch.Tensor]):
        return sum((one**2).sum() for one in logprobs), {}

    client.forward_backward_custom(batch, squared).result()
    expected = peer_logprobs(model_folder, batch)
    slopes = [np.float32(-2 * one) for one in expected]  # cross-entropy with minus the derivative as weights
    weighted = [
        datum_of(
            [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]],
            weights=slope,
        )
        for datum, slope in zip(batch, slopes, strict=True)
    ]
    plain.forward_backward(weighted, "cross_entropy").result()
    for one in (client, plain):
        one.optim_step(ADAM).result()
    mine, its = (logprobs_of(one.forward(batch, "cross_entropy").result()) for one in (client, plain))
    for a, b in zip(mine, its, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_samples_of_several_adapters_and_of_the_base_have_the_log_probs_of_their_weights(service):
    clients = [trainer(service, seed) for seed in range(3)]
    for number, client in enumerate(clients[1:]):
        client.forward_backward(data(seed=number), "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    samplers.append(service.create_sampling_client(base_model="tiny"))
    prompt = tinker.ModelInput.from_ints([5, 9, 17])
    asked = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=7, stop=[])
    futures = [one.sample(prompt, num_samples=2, sampling_params=asked) for one in samplers]
    answers = [future.result().sequences for future in futures]
    for client, sequences in zip([*clients, clients[0]], answers, strict=True):  # an untrained adapter changes nothing
        for sequence in sequences:
            assert len(sequence.tokens) == 8 and sequence.stop_reason == "length"
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
        rounds = [[one.sample(prompt, 1, greedy) for one in samplers] for _ in range(2)]
        first, second = [[future.result().sequences[0].tokens for future in one] for one in rounds]
        assert first == second and len(set(map(tuple, first))) > 1


def test_prompt_log_probs_are_those_of_the_model(service, model_folder):
    (datum,) = data(1)
    ids = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    sampler = service.create_sampling_client(base_model="tiny")
    first, *rest = sampler.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()
    (expected,) = peer_logprobs(model_folder, [datum])
    assert first is None
    np.testing.assert_allclose(rest, expected, atol=1e-4)


def test_a_server_that_was_killed_goes_on_where_it_was(model_folder, tmp_path):
    """Five updates, the third and fifth of them after a restart, are those of a server without one."""
    batch = data()

    def step(client: tinker.TrainingClient, number: int) -> None:
        client.forward_backward(data(seed=number), "cross_entropy").result()
        client.optim_step(ADAM).result()

    with serving(model_folder, tmp_path / "whole") as url:
        client = trainer(connect(url))
        for number in range(5):
            step(client, number)
        client.forward_backward(batch, "cross_entropy").result()  # lost gradients would show in the next update
        step(client, 9)
        expected = logprobs_of(client.forward(batch, "cross_entropy").result())
    port = 0
    for numbers in ((0, 1), (2, 3), (4,), ()):
        with serving(model_folder, tmp_path / "killed", port=port) as url:
            if port == 0:
                client, port = trainer(connect(url)), int(url.rpartition(":")[2])
            for number in numbers:
                step(client, number)
            if numbers == (4,):
                client.forward_backward(batch, "cross_entropy").result()
            if not numbers:
                step(client, 9)
                found = logprobs_of(client.forward(batch, "cross_entropy").result())
    assert all(map(np.array_equal, found, expected))


def test_a_request_that_is_sent_again_is_not_repeated(tmp_path):
    store = Database(tmp_path)
    store.add_session("s")
    store.add_model("m", "s", {})
    first = store.add_request("m:1", "m", "optim_step", b"{}")
    assert first is not None and store.add_request("m:1", "m", "optim_step", b"{}") is None
    assert [request.id for request in store.queued()] == ["m:1"]
    store.finish(first, b"result")
    assert store.queued() == []
    again = Database(tmp_path).request("m:1")
    assert again is not None and again.result == b"result"


def test_whole_models_are_trained_and_sampled_from_one_at_a_time(model_folder, tmp_path):
    with serving(model_folder, tmp_path, lora=None) as url:
        service = connect(url)
        with pytest.raises(tinker.BadRequestError, match="this server trains whole models, not adapters"):
            trainer(service)
        # The SDK's service client asks for adapters only; its training client works with any model.
        post = httpx.Client(base_url=url).post
        body = {"session_id": service.holder.get_session_id(), "model_seq_id": 9, "base_model": "tiny"}
        model = post("/api/v1/create_model", json=body).json()["model_id"]
        info = GetInfoResponse.model_validate(post("/api/v1/get_info", json={"model_id": model}).json())
        client = tinker.TrainingClient(service.holder, model_seq_id=9, model_id=model, info=info)
        before = client.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"]
        client.optim_step(tinker.AdamParams(learning_rate=0.003)).result()
        assert client.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"] < before
        sampler = client.save_weights_and_get_sampling_client()
        sampler.sample(tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=3)).result()
        base = service.create_sampling_client(base_model="tiny")
        assert base.sample(tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=3)).result().sequences


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_tokens": np.array([5, 5, 5], np.int64)}, "target_tokens must be the input shifted by one"),
        ({"weights": np.ones(2, np.float32)}, r"weights has shape \[2\], the input \[3\]"),
        ({"target_tokens": np.ones((3, 2), np.int64)}, "several values per token"),
    ],
)
def test_a_batch_that_is_not_computed_is_refused_and_the_next_one_is(service, changed, message):
    client = trainer(service)
    with pytest.raises(tinker.RequestFailedError, match=message):
        client.forward_backward([datum_of([5, 6, 7, 8], **changed)], "cross_entropy").result()
    right = datum_of([5, 6, 7, 8])
    assert client.forward_backward([right], "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_model_that_is_not_served_is_named(service):
    with pytest.raises(tinker.NotFoundError, match="this server has the model 'tiny', not 'huge'"):
        service.create_lora_training_client(base_model="huge", rank=RANK).result()
    with pytest.raises(tinker.BadRequestError, match="adapters of rank 4, not 8"):
        service.create_lora_training_client(base_model="tiny", rank=8).result()
