"""A real vLLM engine on tiny models. One engine serves most tests, so each test brings the weights
it needs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import yaml
from flax import nnx

from gpu_backend.backend import VllmBackend
from gpu_backend.settings import DISTRIBUTIONS, VllmSettings
from jax_agent_rl.data.tasks import prepare_calculator
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.files import cache_root
from tests.tiny import tiny_params

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"
TOKENIZER = cache_root() / "models" / "smollm2-135m-instruct"

# Heads of 32: the smallest vLLM's CPU attention has a kernel for.
SMALL = DecoderConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)
MAX_MODEL_LEN = 256
ENGINE_ARGS = {"max_num_batched_tokens": 1000}
"""Further arguments of the shared engine: no default, and more than a step of any test has."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROBE = [list(range(3, 40)), [50, 60, 70, 80, 90, 3, 4, 5]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = not any(_installed(name) for name in DISTRIBUTIONS)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed (third_party/vllm.md says how)")
                )


def _installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def to_text(ids: Sequence[int]) -> str:
    """A made-up tokenizer: one letter per id."""
    return "".join(LETTERS[i % 26] for i in ids)


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, SMALL.vocab_size, length).tolist()


def small_params(seed: int = 0) -> Any:
    return tiny_params(seed, SMALL)


def request(
    name: str, prompt: Sequence[int], *, max_tokens: int = 8, **fields: Any
) -> GenerateRequest:
    request_fields = {
        key: fields.pop(key)
        for key in ("priority", "lora", "multi_modal", "session_id")
        if key in fields
    }
    sampling = {"temperature": 0.0, "ignore_eos": True} | fields
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        **request_fields,
    )


@contextlib.asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[VllmBackend]:
    """A started engine on a model folder, closed in the end."""
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "kv_cache_gib": 0.125}
    backend = VllmBackend(
        VllmSettings(model=str(folder), **defaults | settings), version=1, decode_text=to_text
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


class Reference:
    """transformers on the same folder: the golden reference."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float64 [T, V]."""
        with self._torch.no_grad():
            return self.model(self._torch.tensor([list(ids)])).logits[0].double().numpy()

    def logprobs(
        self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        scores = self.logits([*prompt, *sampled])[len(prompt) - 1 : -1] / temperature
        peak = scores.max(-1, keepdims=True)
        normalized = scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))
        return normalized[np.arange(len(sampled)), list(sampled)]

    def greedy(
        self, prompt: Sequence[int], count: int, eos: frozenset[int] = frozenset()
    ) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] in eos:
                break
        return ids[len(prompt) :]


@dataclass
class Engine:
    """The shared engine, and what it takes to bring it to a known state."""

    backend: VllmBackend
    files: FileTransport
    folder: Path
    references: dict[int, Reference] = field(default_factory=dict)

    def update(self, seed: int, **fields: Any) -> WeightUpdate:
        """Weights of ``small_params(seed)`` as the next version."""
        version = self.backend.policy_version + 1
        update = self.files.write(small_params(seed), version)
        # Without digests: tests change the files.
        return replace(update, **{"digests": {}} | fields)

    async def serve(self, seed: int) -> int:
        """Takes the weights and returns their version."""
        await self.backend.update_weights(self.update(seed))
        return self.backend.policy_version

    def reference(self, seed: int) -> Reference:
        if seed not in self.references:
            folder = self.folder / f"reference-{seed}"
            save_hf(folder, SMALL, small_params(seed))
            self.references[seed] = Reference(folder)
        return self.references[seed]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_hf(folder, SMALL, small_params(0))
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("weights")
    files = FileTransport(SMALL, probe_ids=PROBE, folder=folder)
    async with running(model_folder, engine_args=ENGINE_ARGS) as backend:
        yield Engine(backend, files, folder)


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared: Engine) -> Engine:
    """The shared engine with the weights of seed 0."""
    await shared.serve(0)
    return shared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The calculator example's configuration on a random model, made small; ``run_dir`` is
    ``tmp_path / "run"``.
    """
    if not TOKENIZER.is_dir():
        pytest.skip("needs the quickstart's tokenizer: jax-agent-rl fetch-model")
    config = replace(SMALL, vocab_size=49152, eos_token_ids=())
    params = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    save_hf(tmp_path / "model", config, params, tokenizer_from=TOKENIZER)
    rows, _ = prepare_calculator(tmp_path / "data", train=8, heldout=2)
    tree = yaml.safe_load(CALCULATOR.read_text())
    tree |= {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(rows)},
    }
    tree["rollout"] |= {"prompts_per_step": 2, "group_size": 2, "max_in_flight": 4}
    tree["agent"] |= {"max_response_length": 24}
    tree["algorithm"] = {"filter_zero_variance": False}
    tree["learner"] |= {"pack_length": 384}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file
