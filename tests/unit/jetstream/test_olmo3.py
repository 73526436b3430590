"""OLMo 3 in the engine: nothing normalizes what its layers read.

Expected log-probs are those of one full pass of the learner's model.
"""

from __future__ import annotations

import pytest

from tests.driven_engine import finished
from tests.tiny import OLMO3, tiny_adapter, tiny_params, with_adapter
from tests.unit.jetstream.test_gemma4 import SHARED, assert_scored, scheduler, submit
from tests.unit.jetstream.test_speculation import KERNELS


@pytest.mark.parametrize("kernels", KERNELS)
def test_chunked_shared_and_preempted_contexts_are_sampled_as_they_are_scored(kernels: str):
    prompts = {"a": [*SHARED, 5], "bb": [*SHARED, 6], "ccc": SHARED[:2:-1]}
    on = scheduler(OLMO3, kernels)
    for name, prompt in prompts.items():
        submit(on, name, prompt)
    outputs = finished(on)
    assert outputs["bb"].cached_tokens >= 32
    assert sum(output.num_preempted for output in outputs.values()) > 0
    for name, prompt in prompts.items():
        assert_scored(OLMO3, prompt, outputs[name])


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_of_every_matrix_computes_what_the_merged_matrices_do(kernels: str):
    adapter = tiny_adapter(OLMO3)
    assert adapter.weights.keys() == {"q", "k", "v", "o", "gate", "up", "down"}
    merged = with_adapter(tiny_params(config=OLMO3), adapter)

    on = scheduler(OLMO3, kernels, adapters={"tuned": adapter})
    submit(on, "a", SHARED[:20], count=8)
    submit(on, "b", SHARED[:20], count=8, lora="tuned")
    outputs = finished(on)
    assert_scored(OLMO3, SHARED[:20], outputs["a"])
    assert_scored(OLMO3, SHARED[:20], outputs["b"], merged)
