"""The Tinker server under clients that train an adapter each, all at once, through the SDK.

    python benchmarks/service.py                                  # 1, 4 and 16 adapters
    python benchmarks/service.py --adapters 4 --rounds 5 --set compute_dtype=bfloat16

Every client has SmolLM2-135M's adapter of rank 32 and repeats: forward_backward on random sequences
with an update, new weights for a sampler, samples from them. The server is a process of its own.
After a round that compiles, each line is one JSON object: tokens trained and sampled per second by
all clients together over whole rounds, the rate of each part while only that part ran, and seconds
of a client's round in the median and at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import tinker
from common import argument_parser, cpu, random_ids

from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model

NAME = "smollm2"


@contextlib.contextmanager
def serving(overrides: list[str]) -> Iterator[str]:
    """Run a server in a process of its own; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"model.path={fetch_quickstart_model()}",
            f"model_name={NAME}",
            f"state_dir={folder}",
            "port=0",
        ]
        command = [
            sys.executable,
            "-u",
            "-m",
            "jax_agent_rl.cli",
            "tinker-server",
            *settings,
            *overrides,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("serving "):
                    break
            else:
                raise RuntimeError(
                    f"the server ended with status {process.wait()}: {' '.join(command)}"
                )
            _, _, url = line.rpartition("=")
            yield url.strip()
        finally:
            process.terminate()
            process.wait()


class Client:
    """One client, with an adapter.

    Args:
        number: seed of the adapter and of the sequences.
        barrier: waits for all clients.
    """

    def __init__(
        self, url: str, number: int, arguments: argparse.Namespace, barrier: Barrier
    ) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        self._trainer = self._service.create_lora_training_client(
            base_model=NAME, rank=32, seed=number
        ).result()
        self._number = number
        self._arguments = arguments
        self._barrier = barrier

    def round(self, seed: int) -> tuple[float, float, float]:
        """Train, publish and sample once.

        Returns:
            Seconds until all clients have trained, seconds until all have sampled after that, and
            the seconds that this client alone took for both.
        """
        seed += 1000 * self._number
        batch = self._draw_batch(seed)

        self._barrier.wait()
        start = time.perf_counter()
        computed = self._trainer.forward_backward(batch, "cross_entropy")
        self._trainer.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        computed.result()
        sampler = self._trainer.save_weights_and_get_sampling_client().result()
        own_training_seconds = time.perf_counter() - start

        self._barrier.wait()
        sampling_start = time.perf_counter()
        self._sample(sampler, seed)
        own_sampling_seconds = time.perf_counter() - sampling_start

        self._barrier.wait()
        training_seconds = sampling_start - start
        sampling_seconds = time.perf_counter() - sampling_start
        return training_seconds, sampling_seconds, own_training_seconds + own_sampling_seconds

    def _draw_batch(self, seed: int) -> list[tinker.Datum]:
        arguments = self._arguments
        rows = random_ids(arguments.sequences, arguments.length + 1, seed=seed)
        batch = []
        for row in rows.tolist():
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:]},
            )
            batch.append(datum)
        return batch

    def _sample(self, sampler: tinker.SamplingClient, seed: int) -> None:
        arguments = self._arguments
        params = tinker.SamplingParams(max_tokens=arguments.tokens, temperature=1.0, stop=[])
        prompts = random_ids(arguments.prompts, arguments.prompt_length, seed=seed)
        futures = []
        for ids in prompts.tolist():
            prompt = tinker.ModelInput.from_ints(ids)
            futures.append(sampler.sample(prompt, arguments.samples, params))
        for future in futures:
            for sequence in future.result().sequences:
                assert len(sequence.tokens) == arguments.tokens


def measure(url: str, count: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the figures of so many adapters."""
    barrier = Barrier(count)
    clients = [Client(url, number, arguments, barrier) for number in range(count)]
    rounds = []
    with ThreadPoolExecutor(count) as pool:
        for seed in range(arguments.rounds + 1):
            rounds.append(list(pool.map(Client.round, clients, [seed] * count)))

    # [rounds, clients] each, without the first round, which compiles.
    training, sampling, client_seconds = np.array(rounds[1:]).transpose(2, 0, 1)
    trained_tokens = count * arguments.sequences * arguments.length
    sampled_tokens = count * arguments.prompts * arguments.samples * arguments.tokens
    training_seconds = training.max(1).mean()
    sampling_seconds = sampling.max(1).mean()
    round_seconds = np.mean(training.max(1) + sampling.max(1))
    return {
        "adapters": count,
        "trained_per_s": round(trained_tokens / round_seconds, 1),
        "sampled_per_s": round(sampled_tokens / round_seconds, 1),
        "trained_per_s_of_training": round(trained_tokens / training_seconds, 1),
        "sampled_per_s_of_sampling": round(sampled_tokens / sampling_seconds, 1),
        "round_median_s": round(float(np.median(client_seconds)), 2),
        "round_max_s": round(float(client_seconds.max()), 2),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3, help="after the first")
    parser.add_argument("--sequences", type=int, default=4, help="a client trains on in a round")
    parser.add_argument("--length", type=int, default=128, help="their tokens")
    parser.add_argument("--prompts", type=int, default=2, help="a client samples from in a round")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each sample")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the server"
    )
    arguments = parser.parse_args()
    adapters = max(arguments.adapters)
    print(cpu())
    with serving([f"max_sampled_adapters={adapters}", *arguments.set]) as url:
        for count in arguments.adapters:
            print(json.dumps(measure(url, count, arguments)), flush=True)


if __name__ == "__main__":
    main()
