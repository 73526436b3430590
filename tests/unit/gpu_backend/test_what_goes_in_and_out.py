"""Requests in vLLM's words, and vLLM's outputs as chunks; vLLM itself is not needed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_backend.backend import VllmBackend
from gpu_backend.requests import LiveRequest, RequestAdmission, expand_versions, vllm_sampling
from gpu_backend.settings import VllmSettings
from jax_agent_rl.errors import BackendError, PromptTooLongError
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import RoutedExperts, SamplingParams, StopReason, digest_ids
from tests.messages import raises

SETTINGS = VllmSettings(model="m", max_model_len=20, adapters={"math": "/adapters/math"})
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def to_text(ids) -> str:
    return "".join(LETTERS[i % 26] for i in ids)


def request(
    prompt=(5, 6, 7), *, max_tokens=8, lora=None, multi_modal=None, **sampling
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        lora=lora,
        multi_modal=multi_modal or {},
    )


def admission(decode_text=to_text) -> RequestAdmission:
    return RequestAdmission(
        SETTINGS, vocabulary=97, eos_ids=frozenset({2}), decode_text=decode_text
    )


def live(**sampling) -> LiveRequest:
    return LiveRequest(admission().admit(request(**sampling), ()))


def output(ids, *, finished=None, log_prob=-0.5, prompt=(5, 6, 7), cached=0, routed=None):
    """A vLLM ``RequestOutput`` with these new ids."""
    log_probs = [{i: SimpleNamespace(logprob=log_prob)} for i in ids]
    completion = SimpleNamespace(
        token_ids=list(ids), logprobs=log_probs, finish_reason=finished, routed_experts=routed
    )
    return SimpleNamespace(
        outputs=[completion],
        finished=finished is not None,
        prompt_token_ids=list(prompt),
        num_cached_tokens=cached,
    )


def test_every_stopping_id_becomes_a_plain_stop_id():
    words = vllm_sampling(admission().admit(request(stop_token_ids=(9,)), ()))
    assert words["stop_token_ids"] == [2, 9]
    assert words["ignore_eos"]
    assert words["logprobs"] == 0
    assert vllm_sampling(admission().admit(request(ignore_eos=True), ()))["stop_token_ids"] == []


def test_greedy_requests_are_not_truncated():
    words = vllm_sampling(
        admission().admit(request(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1), ())
    )
    assert (words["temperature"], words["top_p"], words["top_k"], words["min_p"]) == (
        0.0,
        1.0,
        0,
        0.0,
    )
    words = vllm_sampling(
        admission().admit(request(temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, seed=11), ())
    )
    values = (words["temperature"], words["top_p"], words["top_k"], words["min_p"], words["seed"])
    assert values == (0.7, 0.5, 3, 0.1, 11)


def test_the_context_limit_caps_max_tokens():
    assert admission().admit(request([5] * 15, max_tokens=50), ()).max_tokens == 5


@pytest.mark.parametrize(
    ("bad", "error", "named"),
    [
        (request([5] * 20), PromptTooLongError, ("20 ids", "max_model_len=20")),
        (request([5, 97]), BackendError, "[0, 97)"),
        (request(lora="poetry"), BackendError, ("'poetry'", "['math']")),
        (
            request(multi_modal={"image": ("x",)}),
            BackendError,
            ("1 of kind 'image'", "takes 0"),
        ),
    ],
)
def test_what_vllm_could_not_do_is_refused_with_the_value(bad, error, named):
    with raises(error, value=named):
        admission().admit(bad, ())


def test_stop_strings_need_a_tokenizer_and_ids_must_be_unique():
    with pytest.raises(BackendError, match="no tokenizer"):
        admission(decode_text=None).admit(request(stop=("x",)), ())
    with pytest.raises(BackendError, match="already running"):
        admission().admit(request(), {"r"})


def test_eos_is_kept_with_its_log_prob():
    state = live()
    assert state.take(output([30, 31]), [(4, 0)]).final is None
    final = state.take(output([2], finished="stop", cached=2), [(4, 0)]).final
    assert final.token_ids == (30, 31, 2)
    assert final.log_probs == (-0.5,) * 3
    assert (final.stop_reason, final.stop_match, final.cached_tokens) == (StopReason.EOS, None, 2)
    assert final.context_digest == digest_ids([5, 6, 7, 30, 31, 2])


def test_a_stop_string_keeps_the_ids_up_to_the_one_that_completes_it():
    state = live(stop=("bc",))
    chunk = state.take(output([0, 1, 2 + 26, 3]), [(0, 0)])
    assert chunk.final.token_ids == (0, 1, 28)
    assert chunk.token_ids == (0, 1, 28)
    assert (chunk.stop_reason, chunk.final.stop_match) == (StopReason.STOP, "bc")
    assert not state.left_engine  # vLLM does not know: it must be aborted there


def test_an_extra_stop_id_is_named():
    final = live(stop_token_ids=(9,)).take(output([4, 9], finished="stop"), [(0, 0)]).final
    assert (final.stop_reason, final.stop_match, final.token_ids) == (StopReason.STOP, "9", (4, 9))


@pytest.mark.parametrize(
    ("vllm", "ours"), [("abort", StopReason.ABORTED), ("length", StopReason.LENGTH)]
)
def test_an_end_without_a_new_id_still_is_an_end(vllm: str, ours: StopReason):
    state = live()
    state.take(output([30]), [(0, 0)])
    chunk = state.take(output([], finished=vllm), [(0, 0)])
    assert chunk.token_ids == ()
    assert chunk.final.token_ids == (30,)
    assert chunk.stop_reason is ours


def test_an_engine_side_error_is_an_error():
    with pytest.raises(BackendError, match="'error'"):
        live().take(output([], finished="error"), [(0, 0)])


def test_missing_log_probs_are_an_error():
    bare = output([30, 31])
    bare.outputs[0].logprobs = bare.outputs[0].logprobs[:1]
    with raises(BackendError, value=("2 ids", "1 log-probs")):
        live().take(bare, [(0, 0)])


def test_one_output_may_span_an_update():
    state = live()
    state.take(output([30, 31]), [(1, 0)])
    chunk = state.take(output([32, 33, 34]), [(1, 0), (2, 3)])
    assert chunk.policy_versions == (1, 2, 2)


def test_versions_follow_their_spans():
    spans = [(1, 0), (2, 5), (7, 6)]
    assert expand_versions(spans, 4, 4) == [1, 2, 7, 7]
    assert expand_versions(spans, 9, 0) == [] == expand_versions([], 0, 0)
    with pytest.raises(ValueError, match="before the first"):
        expand_versions([(1, 3)], 2, 1)
    with pytest.raises(ValueError, match="before the first"):
        expand_versions([], 0, 1)


def test_under_a_grammar_ids_come_at_the_end_all_of_them_constrained():
    checks = RequestAdmission(
        SETTINGS, vocabulary=97, eos_ids=frozenset({2}), decode_text=None, grammars=True
    )
    asked = request(grammar="start: /x/")
    state = LiveRequest(checks.admit(asked, ()))
    assert state.take(output([30, 31]), [(4, 0)]) is None
    chunk = state.take(output([2], finished="stop"), [(4, 0), (5, 2)])
    assert chunk.token_ids == chunk.final.token_ids == (30, 31, 2)
    assert chunk.policy_versions == (
        4,
        4,
        5,
    )
    assert chunk.constrained == chunk.final.constrained == (True,) * 3
    aborted = LiveRequest(checks.admit(asked, ()))
    aborted.take(output([30, 31]), [(4, 0)])
    final = aborted.take(
        output([], finished="abort"), [(4, 0)]
    ).final  # it begins anew: vLLM cannot resume it
    assert (final.token_ids, final.stop_reason) == ((), StopReason.ABORTED)
    assert final.context_digest == digest_ids(asked.prompt_ids)
    with pytest.raises(BackendError, match="resumes"):
        checks.admit(replace(asked, resumed=1), ())
    with pytest.raises(BackendError, match="cannot follow"):
        admission().admit(asked, ())


async def test_a_grammar_that_takes_too_long_to_compile_never_reaches_vllm():
    checks = RequestAdmission(
        SETTINGS, vocabulary=97, eos_ids=frozenset({2}), decode_text=None, grammars=True
    )
    await checks.check_grammar(request())
    await checks.check_grammar(request(grammar="start: /x/ <[2]>"))
    with pytest.raises(BackendError, match="maxItems=10000000"):
        await checks.check_grammar(
            request(grammar='start: %json {"type": "array", "maxItems": 10000000}')
        )


def test_experts_begin_as_asked_and_end_with_the_kept_ids():
    asked = replace(request((5, 6, 7), stop=("d",)), routed_experts_prompt_start=2)
    live = LiveRequest(admission().admit(asked, ()))
    assert vllm_sampling(live.run)["routed_experts_prompt_start"] == 2
    assert live.take(output([1, 5]), [(0, 0)]).final is None
    rows = np.arange(12, dtype=np.uint8).reshape(
        6, 1, 2
    )  # of positions 2 to 7: vLLM sampled 9 ids, and fed 8
    chunk = live.take(output([3, 4, 5, 6], finished="length", routed=rows), [(0, 0)])
    assert chunk.final.token_ids == (1, 5, 3)  # the stop string is complete
    assert chunk.final.routed_experts == RoutedExperts.of(2, rows[:3])


def test_a_backend_declares_experts_if_its_engine_is_asked_to_return_them():
    for engine_args in ({}, {"enable_return_routed_experts": True}):
        backend = VllmBackend(replace(SETTINGS, engine_args=engine_args))
        assert backend.capabilities.routed_experts == bool(engine_args)
