"""An engine with recurrent layers says what the learner says, whatever became of its states."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream import inspection
from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import Params
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput
from tests.driven_engine import finished
from tests.tiny import DELTA_NETS, full_logits, logprobs_of, tiny_adapter, tiny_params, with_adapter
from tests.unit.jetstream.test_speculation import Eager, Known

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=320,
    decode_steps=4,
    prefill_buckets=(8, 32),
)
PROMPTS = [
    np.random.default_rng(i).integers(3, DELTA_NETS.vocab_size, n).tolist()
    for i, n in enumerate((20, 25, 30))
]
COUNT = 14


@functools.cache
def programs(shapes: EngineShapes, *options: object) -> ProgramTable:
    """Compiled once for all tests."""
    return ProgramTable()


@functools.cache
def weights(seed: int = 0) -> Params:
    return tiny_params(seed, DELTA_NETS)


def scheduler(shapes: EngineShapes = SHAPES, **options: Any) -> Scheduler:
    table = programs(shapes, *options.items())
    engine = JaxEngine(DELTA_NETS, shapes, program_table=table, **options)
    return Scheduler(engine, engine.load_params(weights()), version=1, decode_text=text)


def text(ids: Sequence[int]) -> str:
    return "".join(chr(0x100 + i) for i in ids)


def submit(
    on: Scheduler,
    name: str,
    prompt: Sequence[int],
    *,
    session: str | None = None,
    lora: str | None = None,
    **sampling: Any,
) -> None:
    chosen = {"max_tokens": COUNT, "temperature": 1.0, "seed": len(name), "ignore_eos": True}
    on.submit(
        GenerateRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(**chosen | sampling),
            session_id=session,
            lora=lora,
        )
    )


def finished_cleanly(on: Scheduler) -> dict[str, TokenOutput]:
    """Run until nothing does, and until no request has a slot."""
    outputs = finished(on)
    assert not on.block_manager.states.running, "a request left its slot behind"
    return outputs


def run(on: Scheduler, name: str, prompt: Sequence[int], **options: Any) -> TokenOutput:
    """Run one request to its end."""
    submit(on, name, prompt, **options)
    return finished_cleanly(on)[name]


def assert_exact(prompt: Sequence[int], output: TokenOutput, params: Params | None = None) -> None:
    """Compare an output with what the learner says."""
    expected = logprobs_of(params or weights(), prompt, output.token_ids, config=DELTA_NETS)
    np.testing.assert_allclose(output.log_probs, expected, atol=5e-5)


def test_prompts_of_any_length_in_chunks_of_any_length():
    on = scheduler()
    ids = [*PROMPTS[2], *PROMPTS[1]]
    lengths = (1, 2, 8, 9, 10, 31, 33, 34, 50)
    for length in lengths:
        submit(on, str(length), [length, *ids[1:length]], max_tokens=6)
    outputs = finished_cleanly(on)
    for length in lengths:
        assert_exact([length, *ids[1:length]], outputs[str(length)])


def test_greedy_decoding_takes_the_likeliest_ids():
    output = run(scheduler(), "greedy", PROMPTS[0], temperature=0.0)
    logits = full_logits(weights(), [*PROMPTS[0], *output.token_ids], DELTA_NETS)
    assert output.token_ids == tuple(logits[len(PROMPTS[0]) - 1 : -1].argmax(axis=1))


def test_the_next_turn_begins_with_the_state_that_the_last_one_ended_with():
    on = scheduler()
    first = run(on, "1", PROMPTS[0], session="s")
    context = [*PROMPTS[0], *first.token_ids, 5, 6]
    second = run(on, "2", context, session="s")
    assert second.cached_tokens == len(PROMPTS[0]) + COUNT - 1
    assert on.metrics().recomputed_tokens == 0
    assert_exact(context, second)


def test_samples_of_a_prompt_begin_with_copies_of_one_state():
    on = scheduler()
    for number in range(3):
        submit(on, str(number), PROMPTS[1], seed=number)
    outputs = finished_cleanly(on)
    assert len({output.token_ids for output in outputs.values()}) == 3
    assert sorted(output.cached_tokens for output in outputs.values()) == [0, 24, 24]
    for output in outputs.values():
        assert_exact(PROMPTS[1], output)


def test_a_branch_within_an_output_computes_again_from_the_checkpoint_before_it():
    on = scheduler()
    first = run(on, "first", PROMPTS[0])
    branch = [*PROMPTS[0], *first.token_ids[:5], 7, 8]
    output = run(on, "branch", branch)
    assert output.cached_tokens == len(PROMPTS[0]) - 1
    assert on.metrics().recomputed_tokens == 6
    assert_exact(branch, output)
    again = run(on, "again", [*branch[:-2], 9, 9])
    assert again.cached_tokens == len(branch) - 2, "the fork is a checkpoint now"
    assert_exact([*branch[:-2], 9, 9], again)


def test_who_is_preempted_samples_what_it_would_have():
    tight = scheduler(replace(SHAPES, kv_cache_tokens=160))
    roomy = scheduler()
    outputs = []
    for on in (tight, roomy):
        for number, prompt in enumerate(PROMPTS):
            submit(on, str(number), prompt, seed=number, max_tokens=30)
        outputs.append(finished_cleanly(on))
    preempted, wanted = outputs
    assert preempted["2"].num_preempted > 0
    for name, output in preempted.items():
        assert output.token_ids == wanted[name].token_ids
        assert_exact(PROMPTS[int(name)], output)


def test_a_state_that_was_evicted_is_computed_again():
    on = scheduler(replace(SHAPES, state_checkpoints=0, max_concurrent_decodes=1))
    first = run(on, "first", PROMPTS[0], session="s")
    run(on, "other", PROMPTS[1])
    context = [*PROMPTS[0], *first.token_ids, 5, 6]
    second = run(on, "second", context, session="s")
    assert second.cached_tokens == 0
    assert on.metrics().recomputed_tokens == len(PROMPTS[0]) + COUNT - 1
    assert_exact(context, second)


def test_a_state_that_was_on_the_host_comes_back_bit_by_bit():
    shapes = replace(
        SHAPES,
        state_checkpoints=0,
        max_concurrent_decodes=1,
        kv_cache_tokens=64,
        kv_offloading_bytes=1 << 20,
    )
    contexts = []
    outputs = []
    for num_others in (0, 2):
        on = scheduler(shapes)
        first = run(on, "first", PROMPTS[0], session="s")
        for number in range(num_others):
            run(on, f"other {number}", PROMPTS[1 + number])
        contexts.append([*PROMPTS[0], *first.token_ids, 5, 6])
        outputs.append(run(on, "second", contexts[-1], session="s"))
        moved = bool(on.host_cache.saved)
        assert moved == bool(num_others)
    there, back = outputs
    assert there.cached_tokens == back.cached_tokens == len(PROMPTS[0]) + COUNT - 1
    assert there.token_ids == back.token_ids
    assert there.log_probs == back.log_probs
    assert_exact(contexts[0], back)


def test_new_weights_begin_with_new_states():
    on = scheduler()
    submit(on, "running", PROMPTS[0], session="s")
    run_id = "running"
    on.step()
    on.set_weights(on.engine.load_params(weights(1)), 2)
    assert not on.block_manager.states.checkpoints
    submit(on, "fresh", PROMPTS[0])
    outputs = finished_cleanly(on)
    assert outputs["fresh"].cached_tokens == 0
    assert_exact(PROMPTS[0], outputs["fresh"], weights(1))
    assert set(outputs[run_id].policy_versions) == {1, 2}
    context = [*PROMPTS[0], *outputs[run_id].token_ids, 5]
    second = run(on, "second", context, session="s")
    assert second.cached_tokens < len(PROMPTS[0]), "what ran on has a state of both weights"
    assert_exact(context, second, weights(1))


def test_no_turn_of_a_trajectory_of_several_versions_begins_with_a_state_of_older_weights():
    on = scheduler(replace(SHAPES, kv_offloading_bytes=1 << 20))
    context = list(PROMPTS[0])
    for version in (1, 2, 3):
        on.set_weights(on.engine.load_params(weights(version)), version)
        output = run(on, f"turn {version}", context, session="s", max_tokens=8)
        assert output.policy_versions == (version,) * 8
        assert output.cached_tokens == 0
        assert_exact(context, output, weights(version))
        context += [*output.token_ids, 5, 6]


def test_who_is_preempted_after_an_update_has_a_state_of_the_new_weights_alone():
    on = scheduler(replace(SHAPES, kv_cache_tokens=160))
    for number, prompt in enumerate(PROMPTS):
        submit(on, str(number), prompt, seed=number, max_tokens=30)
    on.step()
    on.set_weights(on.engine.load_params(weights(1)), 2)
    output = finished_cleanly(on)["2"]
    assert output.num_preempted > 0
    assert set(output.policy_versions) == {1, 2}

    expected = logprobs_of(weights(1), PROMPTS[2], output.token_ids, config=DELTA_NETS)
    errors = np.abs(output.log_probs - expected)
    assert errors[-3:].max() < 5e-5, "the last ids came after the preemption"
    updated = output.policy_versions.index(2)
    assert errors[updated] > 1e-3, "what runs on keeps its state through an update"


@pytest.mark.parametrize("wrong", [1, 3, 100])
def test_speculation_leaves_the_state_after_the_accepted_ids(wrong: int):
    plain = scheduler()
    for number, prompt in enumerate(PROMPTS):
        submit(plain, str(number), prompt, session=str(number), seed=number, max_tokens=20)
    wanted = finished_cleanly(plain)

    on = scheduler(replace(SHAPES, num_speculative_tokens=4))
    on.speculation = Eager(on.engine, Known(wanted, wrong), on.counters)
    for number, prompt in enumerate(PROMPTS):
        submit(on, str(number), prompt, session=str(number), seed=number, max_tokens=20)
    outputs = finished_cleanly(on)
    assert on.metrics().drafts > 0
    on.speculation = None
    for number, prompt in enumerate(PROMPTS):
        output = outputs[str(number)]
        assert output.token_ids == wanted[str(number)].token_ids
        assert_exact(prompt, output)
        context = [*prompt, *output.token_ids, 5, 6]
        following = run(on, f"{number} again", context, session=str(number))
        assert following.cached_tokens == len(context) - 3
        assert_exact(context, following)


def test_a_draft_beyond_a_stop_id_does_not_advance_the_state():
    wanted = run(scheduler(), "0", PROMPTS[0], seed=3)
    stop = wanted.token_ids[5]
    on = scheduler(replace(SHAPES, num_speculative_tokens=4))
    on.speculation = Eager(on.engine, Known({"0": wanted}, 100), on.counters)
    output = run(on, "0", PROMPTS[0], seed=3, session="s", stop_token_ids=(stop,))
    assert output.stop_reason is StopReason.STOP
    on.speculation = None
    context = [*PROMPTS[0], *output.token_ids, 5, 6]
    following = run(on, "following", context, session="s")
    assert following.cached_tokens == len(context) - 3
    assert_exact(context, following)


def test_a_stop_id_in_the_middle_of_a_dispatch_leaves_the_state_before_it():
    wanted = run(scheduler(), "0", PROMPTS[0])
    on = scheduler()
    output = run(on, "0", PROMPTS[0], session="s", stop_token_ids=(wanted.token_ids[5],))
    context = [*PROMPTS[0], *output.token_ids, 5, 6]
    following = run(on, "following", context, session="s")
    assert following.cached_tokens == len(context) - 3
    assert_exact(context, following)


@pytest.mark.parametrize("use_cpu_kernels", [True, False], ids=["cpu kernels", "xla"])
def test_a_slot_that_has_finished_keeps_its_state_while_others_go_on(use_cpu_kernels: bool):
    shapes = replace(SHAPES, max_concurrent_decodes=8, kv_cache_tokens=512, decode_steps=8)
    on = scheduler(shapes, use_cpu_kernels=use_cpu_kernels)
    # A dispatch of eight slots ends when two have finished: the first waits for two steps.
    for number, count in enumerate((1, 3, 8, 8, 8, 8, 8, 8)):
        name = str(number)
        submit(on, name, PROMPTS[0], session=name, seed=number, max_tokens=count)
    first = finished_cleanly(on)["0"]
    context = [*PROMPTS[0], *first.token_ids, 5, 6]
    following = run(on, "following", context, session="0")
    assert following.cached_tokens == len(context) - 3
    assert_exact(context, following)


def test_a_stop_string_within_a_dispatch_discards_the_state_beyond_it():
    wanted = run(scheduler(), "0", PROMPTS[0])
    on = scheduler()
    output = run(on, "0", PROMPTS[0], session="s", stop=(text(wanted.token_ids[4:6]),))
    assert len(output.token_ids) == 6, "two of the dispatch's ids are cut off"
    context = [*PROMPTS[0], *output.token_ids, 5, 6]
    following = run(on, "following", context, session="s")
    assert following.cached_tokens == len(PROMPTS[0]) - 1, "the checkpoint after the prompt"
    assert_exact(context, following)


def test_an_aborted_request_leaves_a_state_of_what_it_had():
    on = scheduler()
    submit(on, "0", PROMPTS[0], session="s")
    on.step()
    _, chunk = on.abort("0")
    assert not on.block_manager.states.running
    context = [*PROMPTS[0], *chunk.final.token_ids, 5, 6]
    following = run(on, "following", context, session="s")
    assert following.cached_tokens == len(context) - 3
    assert_exact(context, following)


def test_given_ids_are_scored_as_the_learner_does():
    on = scheduler()
    context = [*PROMPTS[2], *PROMPTS[1]]
    scores = inspection.score(on, context, start=1, top_k=0)
    expected = logprobs_of(weights(), context[:1], context[1:], config=DELTA_NETS)
    np.testing.assert_allclose(scores.log_probs, expected, atol=5e-5)


def test_a_sleeping_engine_forgets_all_states():
    on = scheduler()
    run(on, "0", PROMPTS[0], session="s")
    on.sleep()
    on.wake()
    again = run(on, "1", PROMPTS[0], session="s")
    assert again.cached_tokens == 0
    assert_exact(PROMPTS[0], again)


def test_nothing_is_compiled_after_the_warm_up():
    shapes = replace(
        SHAPES,
        max_concurrent_decodes=2,
        kv_cache_tokens=64,
        state_checkpoints=1,
        kv_offloading_bytes=1 << 20,
        num_speculative_tokens=3,
    )
    engine = JaxEngine(DELTA_NETS, shapes, compile_ahead=True)
    on = Scheduler(engine, engine.load_params(weights()), version=1)
    on.cache = engine.warm_up(on.params, on.cache)
    for name, prompt in enumerate([*PROMPTS, PROMPTS[0], PROMPTS[0] + PROMPTS[1]]):
        submit(on, str(name), prompt, session=str(name))
    for name, output in finished_cleanly(on).items():
        context = [*([*PROMPTS, PROMPTS[0], PROMPTS[0] + PROMPTS[1]][int(name)])]
        assert_exact(context, output)
    run(on, "again", [*PROMPTS[0], 5, 6], session="0")
    assert on.metrics().recompilations == 0


@pytest.mark.parametrize("fused", [True, False])
def test_adapters_are_added_to_the_matrices_of_delta_nets(fused: bool):
    assert DELTA_NETS.delta_net is not None
    model = replace(DELTA_NETS, delta_net=replace(DELTA_NETS.delta_net, fused=fused))
    params = tiny_params(0, model)
    adapter = tiny_adapter(model)
    assert {"q", "delta_out", "delta_qkvz" if fused else "delta_qkv"} <= adapter.weights.keys()
    engine = JaxEngine(model, SHAPES, adapters={"a": adapter})
    on = Scheduler(engine, engine.load_params(params), version=1)
    run(on, "base", PROMPTS[0])
    output = run(on, "0", PROMPTS[0], lora="a")
    assert output.cached_tokens == 0, "the checkpoint after the prompt is the base model's"

    merged = with_adapter(params, adapter)
    expected = logprobs_of(merged, PROMPTS[0], output.token_ids, config=model)
    np.testing.assert_allclose(output.log_probs, expected, atol=2e-4)


def test_a_deterministic_engine_scores_bit_by_bit_what_it_sampled():
    shapes = replace(SHAPES, max_concurrent_decodes=2)
    table = ProgramTable()
    engine = JaxEngine(DELTA_NETS, shapes, program_table=table, deterministic=True)
    on = Scheduler(engine, engine.load_params(weights()), version=1)
    for number, prompt in enumerate(PROMPTS):
        submit(on, str(number), prompt)
    outputs = finished_cleanly(on)
    scorer = DeterministicScorer(
        DELTA_NETS, shapes, dtype=jnp.float32, program_table=table, temperature=1.0
    )
    contexts = [[*PROMPTS[i], *outputs[str(i)].token_ids] for i in range(3)]
    for number, log_probs in enumerate(scorer(weights(), contexts)):
        output = outputs[str(number)]
        assert tuple(log_probs[len(PROMPTS[number]) - 1 :].tolist()) == output.log_probs
        assert_exact(PROMPTS[number], output)


def test_int8_matrices_come_close():
    exact = run(scheduler(), "0", PROMPTS[0], temperature=0.0)
    on = scheduler(quantize="int8")
    output = run(on, "0", PROMPTS[0], temperature=0.0, max_tokens=1)
    layer = on.params.layers[0]
    assert {"delta_qkvz", "delta_out"} <= {
        name for name, x in layer.items() if len(jax.tree.leaves(x)) == 2
    }
    assert abs(output.log_probs[0] - exact.log_probs[0]) < 0.4
