"""LoRA adapters named per request, on the JAX engine; the reference is transformers with PEFT's own
adapter.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.errors import BackendError, ConfigError, WeightUpdateError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.models.lora import (
    adapted_targets,
    blank_adapter,
    read_peft,
    save_peft,
    scaled_adapter,
)
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.messages import raises
from tests.tiny import FOUR_SLOTS, TINY, logprobs_of, tiny_params

PROMPT = np.random.default_rng(0).integers(3, TINY.vocab_size, 21).tolist()
MATH = LoraConfig(rank=3, alpha=6.0)
PROSE = LoraConfig(rank=2, alpha=1.0, targets=("q_proj", "v_proj", "down_proj"))
SHAPES_OF = TINY.parameter_shapes()["layers"]


def drawn(lora: LoraConfig, seed: int) -> dict:
    """Random adapters in the learner's layout."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    adapters = {}
    for target in adapted_targets(lora, TINY):
        name = target.removesuffix("_proj")
        layers, out, inputs = SHAPES_OF[name]
        adapters[name] = {"a": draw(layers, lora.rank, inputs), "b": draw(layers, out, lora.rank)}
    return {"adapters": adapters}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The model, and two PEFT adapters of different ranks and targets."""
    root = tmp_path_factory.mktemp("adapters")
    save_hf(root / "model", TINY, tiny_params())
    for name, lora, seed in (("math", MATH, 1), ("prose", PROSE, 2)):
        save_peft(root / name, lora, TINY, drawn(lora, seed), base=str(root / "model"))
    return {name: root / name for name in ("model", "math", "prose")}


def peft_logprobs(
    folders: Mapping[str, Path], adapter: str, ids: list[int], count: int
) -> np.ndarray:
    """Log-probs of the last ``count`` ids by transformers with PEFT, in float64."""
    peft, torch, transformers = (
        pytest.importorskip(name) for name in ("peft", "torch", "transformers")
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["model"], dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(model, folders[adapter]).double().eval()
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    return scores[np.arange(len(ids) - count - 1, len(ids) - 1), ids[-count:]]


@contextlib.asynccontextmanager
async def running(folders: Mapping[str, Path], **options):
    adapters = {name: read_peft(folders[name], TINY, key="adapters") for name in ("math", "prose")}
    backend = JetStreamBackend(
        TINY, tiny_params(), FOUR_SLOTS, version=1, adapters=adapters, **options
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def ask(
    backend: JetStreamBackend, adapter: str | None, *, name: str = "r", **request
) -> TokenOutput:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    return await backend.generate(
        GenerateRequest(
            request_id=f"{name}-{adapter}",
            prompt_ids=tuple(PROMPT),
            sampling=sampling,
            lora=adapter,
            **request,
        )
    )


async def test_adapters_run_side_by_side_each_as_peft_computes_it(folders):
    async with running(folders) as backend:
        assert backend.capabilities.lora
        plain, math, prose = await asyncio.gather(
            *(ask(backend, name) for name in (None, "math", "prose"))
        )
        assert (await backend.metrics()).recompilations == 0
    np.testing.assert_allclose(
        plain.log_probs, logprobs_of(tiny_params(), PROMPT, plain.token_ids), atol=1e-4
    )
    for name, output in (("math", math), ("prose", prose)):
        expected = peft_logprobs(folders, name, [*PROMPT, *output.token_ids], 8)
        np.testing.assert_allclose(output.log_probs, expected, atol=1e-4)
        without_adapter = logprobs_of(tiny_params(), PROMPT, output.token_ids)
        assert np.abs(without_adapter - output.log_probs).max() > 0.1


async def test_a_cached_prefix_is_reused_under_its_own_adapter_only(folders):
    async with running(folders) as backend:
        first = [await ask(backend, name, name="first") for name in (None, "math", "prose")]
        again = [await ask(backend, name, name="again") for name in (None, "math", "prose")]
    assert [output.cached_tokens for output in first] == [0, 0, 0]
    assert [output.cached_tokens for output in again] == [len(PROMPT) - 1] * 3
    for computed, cached in zip(first, again, strict=True):
        assert computed.token_ids == cached.token_ids
        np.testing.assert_allclose(cached.log_probs, computed.log_probs, atol=1e-4)


async def test_adapters_stay_over_new_weights(folders):
    new = tiny_params(1)
    save_hf(folders["model"].parent / "new", TINY, new)
    async with running(folders) as backend:
        await ask(backend, "math", name="before")
        await backend.update_weights(WeightUpdate(version=2, kind="arrays", payload=new))
        output = await ask(backend, "math")
    expected = peft_logprobs(
        {**folders, "model": folders["model"].parent / "new"},
        "math",
        [*PROMPT, *output.token_ids],
        8,
    )
    np.testing.assert_allclose(output.log_probs, expected, atol=1e-4)
    assert set(output.policy_versions) == {2}


async def test_adapters_in_training_change_with_an_update_and_compile_nothing(folders):
    adapters = {name: blank_adapter(MATH, TINY) for name in ("solver", "checker")}
    backend = JetStreamBackend(TINY, tiny_params(), FOUR_SLOTS, version=1, adapters=adapters)
    await backend.start()
    try:
        blank = await ask(backend, "solver", name="blank")
        compiled = (await backend.metrics()).recompilations
        trained = {
            "solver": scaled_adapter(MATH, drawn(MATH, 1)),
            "checker": blank_adapter(MATH, TINY),
        }
        update = WeightUpdate(version=2, kind="arrays", payload=tiny_params(), adapters=trained)
        await backend.update_weights(update)
        solver, checker = [await ask(backend, name) for name in ("solver", "checker")]
        alone = WeightUpdate(version=3, kind="arrays", payload={}, partial=True, adapters=adapters)
        await backend.update_weights(alone)
        again = await ask(backend, "solver", name="again")
        assert (await backend.metrics()).recompilations == compiled
    finally:
        await backend.close()
    assert set(solver.policy_versions) == {2}
    assert solver.cached_tokens == 0
    assert checker.token_ids == blank.token_ids, "it was not trained"
    assert again.token_ids == blank.token_ids and set(again.policy_versions) == {3}, (
        "adapters change alone"
    )
    np.testing.assert_allclose(
        blank.log_probs, logprobs_of(tiny_params(), PROMPT, blank.token_ids), atol=1e-4
    )
    expected = peft_logprobs(folders, "math", [*PROMPT, *solver.token_ids], 8)
    np.testing.assert_allclose(solver.log_probs, expected, atol=1e-4)


async def test_one_adapter_changes_alone_and_one_that_does_not_fit_changes_nothing(folders):
    async with running(folders) as backend:
        old_outputs = [await ask(backend, name, name="before") for name in ("math", "prose")]
        wide = scaled_adapter(
            LoraConfig(rank=4, alpha=4.0), drawn(LoraConfig(rank=4, alpha=4.0), 3)
        )
        update = WeightUpdate(
            version=2,
            kind="arrays",
            payload={},
            partial=True,
            adapters={"math": blank_adapter(MATH, TINY), "prose": wide},
        )
        with raises(WeightUpdateError, value="rank 4", fix="rank 3"):
            await backend.update_weights(update)
        with raises(WeightUpdateError, value="['law']", fix="['math', 'prose']"):
            await backend.update_weights(
                replace(update, adapters={"law": blank_adapter(MATH, TINY)})
            )
        again = [await ask(backend, name, name="again") for name in ("math", "prose")]
        assert [x.token_ids for x in again] == [x.token_ids for x in old_outputs]
        new = {"prose": scaled_adapter(PROSE, drawn(PROSE, 4))}
        await backend.update_weights(
            WeightUpdate(version=2, kind="arrays", payload={}, partial=True, adapters=new)
        )
        math, prose = [await ask(backend, name, name="after") for name in ("math", "prose")]
    save_peft(
        folders["model"].parent / "poems", PROSE, TINY, drawn(PROSE, 4), base=str(folders["model"])
    )
    assert math.token_ids == old_outputs[0].token_ids
    poems = {**folders, "poems": folders["model"].parent / "poems"}
    expected = peft_logprobs(poems, "poems", [*PROMPT, *prose.token_ids], 8)
    np.testing.assert_allclose(prose.log_probs, expected, atol=1e-4)


async def test_an_unknown_adapter_is_refused_by_name(folders):
    async with running(folders) as backend:
        with raises(BackendError, value="'law'", fix="['math', 'prose']"):
            await ask(backend, "law")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, {"key": "use_dora", "value": "True"}),
        ({"bias": "all"}, {"key": "bias", "value": "'all'"}),
        ({"modules_to_save": ["lm_head"]}, {"key": "modules_to_save"}),
        ({"rank_pattern": {"q_proj": 8}}, {"key": "rank_pattern"}),
        ({"r": None}, {"key": "rank r"}),
    ],
)
def test_adapters_of_other_kinds_are_refused(folders, tmp_path, change, named):
    folder = shutil.copytree(folders["math"], tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | change))
    with raises(ConfigError, **named):
        read_peft(folder, TINY, key="rollout.adapters.math")


def test_an_adapter_of_another_model_is_refused(folders):
    with raises(ConfigError, value="another model"):
        read_peft(folders["math"], replace(TINY, hidden_size=64), key="rollout.adapters.math")
    with raises(ConfigError, key="layers.2"):
        read_peft(folders["math"], replace(TINY, num_layers=2), key="rollout.adapters.math")
    with raises(ConfigError, value="holds no adapter_config.json"):
        read_peft(folders["model"], TINY, key="rollout.adapters.math")
