"""Teachers that are served elsewhere: what is asked of them, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import httpx
import numpy as np
import pytest

from jax_agent_rl.config import TeacherConfig, build
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.runtime.multihost import decode_groups, encode_groups
from jax_agent_rl.runtime.served_teachers import CompletionsTeacher, ServedTeachers
from jax_agent_rl.testing.conformance.models import log_softmax
from jax_agent_rl.types import Group
from tests.messages import raises
from tests.toy_backend import MODELS, VOCAB, ToyBackend
from tests.trajectories import trajectory

URL = "http://teacher:8000/v1"
LOGITS = MODELS["base"].logits


def vllm_answer(request: dict) -> dict:
    """What `vllm serve` answers: for each position but the first, ids as text with log-prob and
    rank.
    """
    ids = request["prompt"]
    k = request["prompt_logprobs"]
    positions: list[dict | None] = [None]
    for logs, sampled_id in zip(log_softmax(LOGITS(ids[:-1])), ids[1:], strict=True):
        rank = {int(id_): number + 1 for number, id_ in enumerate(np.argsort(-logs))}
        listed_ids = {sampled_id, *(id_ for id_, number in rank.items() if number <= k)}
        positions.append(
            {
                str(i): {"logprob": float(logs[i]), "rank": rank[i], "decoded_token": "?"}
                for i in listed_ids
            }
        )
    return {"choices": [{"text": "?", "prompt_logprobs": positions}]}


def completions(answer: Callable[[dict], dict | httpx.Response], **changes) -> CompletionsTeacher:
    def handle(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == f"{URL}/completions"
        reply = answer(json.loads(request.content))
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, json=reply)

    teacher = TeacherConfig.model_validate({"path": "big", "url": URL} | changes)
    return CompletionsTeacher(teacher, transport=httpx.MockTransport(handle))


IDS = [5, 9, 4, 11, 7, 3]


@pytest.mark.parametrize("top_k", [0, 3])
async def test_completions_give_the_log_probs_of_the_ids_that_were_sent(top_k: int):
    client = completions(vllm_answer)
    scores = await client.score(IDS, start=2, top_k=top_k)
    logs = log_softmax(LOGITS(IDS[:-1]))[1:]
    np.testing.assert_allclose(scores.log_probs, logs[np.arange(4), IDS[2:]])
    if top_k:
        np.testing.assert_array_equal(scores.top_ids, np.argsort(-logs, axis=-1)[:, :top_k])
        np.testing.assert_allclose(scores.top_log_probs, -np.sort(-logs, axis=-1)[:, :top_k])
    else:
        assert scores.top_ids == ()
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "no log-probs"}]},
        {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1.0, "rank": 1}}]}]},
        {
            "choices": [
                {"prompt_logprobs": [None, *({"1": {"logprob": -1.0, "rank": 1}} for _ in IDS[1:])]}
            ]
        },
    ],
    ids=["none", "too few", "of other ids"],
)
async def test_an_answer_without_them_is_refused_with_the_way_to_serve_a_teacher(answer: dict):
    client = completions(lambda request: answer)
    with raises(BackendError, key="prompt_logprobs", value="6 ids", fix="vLLM"):
        await client.score(IDS)
    await client.close()


async def test_what_the_server_says_is_shown():
    said = "Requested prompt logprobs of 32, which is greater than max allowed: 20"
    client = completions(lambda request: httpx.Response(400, text=said))
    with pytest.raises(BackendError, match=said):
        await client.score(IDS, top_k=32)
    await client.close()


async def test_a_rollout_server_scores_as_its_engine_does():
    inner = ToyBackend()
    await inner.start()
    http = RolloutServer(inner)
    await http.start()
    remote = RemoteBackend(http.url)
    await remote.start()
    try:
        assert remote.capabilities.scoring
        assert await remote.score(IDS, start=2, top_k=3) == await inner.score(IDS, start=2, top_k=3)
    finally:
        await remote.close()
        await http.close()
        await inner.close()


def group_of(*sources: str) -> Group:
    """A trajectory for each data source: two turns with a tool's answer between them, and a segment
    of another.
    """
    sample = trajectory([5, 9], [4, 11, 7, 3, 8], mask=[1, 1, 0, 0, 1])
    segment = trajectory([5, 6], [7, 10])
    return Group(
        group_id="g",
        trajectories=tuple(
            replace(
                sample, trajectory_id=f"g-{i}", row={"data_source": source}, segments=(segment,)
            )
            for i, source in enumerate(sources)
        ),
    )


def teachers(client, *, top_k: int = 0, **changes) -> ServedTeachers:
    elsewhere = TeacherConfig.model_validate(
        {"path": "big", "url": URL, "data_sources": ["math*"]} | changes
    )
    local_teacher = TeacherConfig(path="small")
    return ServedTeachers(
        [(elsewhere, client), (local_teacher, None)], top_k=top_k, vocab_size=VOCAB
    )


@pytest.mark.parametrize("top_k", [0, 2])
async def test_every_token_in_the_loss_is_scored_in_the_context_of_its_sequence(top_k: int):
    scored, unscored = (await teachers(ToyBackend(), top_k=top_k)([group_of("math/1", "code")]))[
        0
    ].trajectories
    assert unscored.teacher_scores is None  # the learner's to score
    scores = scored.teacher_scores
    assert scores is not None
    expected: list[np.ndarray] = []
    for ids, at in (([5, 6, 7, 10], [2, 3]), ([5, 9, 4, 11, 7, 3, 8], [2, 3, 6])):
        logs = log_softmax(LOGITS(ids[:-1]))
        expected += [logs[i - 1] for i in at]
    np.testing.assert_allclose(
        scores.log_probs, [x[i] for x, i in zip(expected, [7, 10, 4, 11, 8], strict=True)]
    )
    assert len(scores.top_ids) == (5 if top_k else 0)
    for top_ids, logs in zip(scores.top_ids, expected, strict=False):
        assert list(top_ids) == np.argsort(-logs)[:top_k].tolist()


async def test_scores_reach_the_other_processes_of_a_learner_to_the_last_bit():
    groups = await teachers(ToyBackend(), top_k=2)([group_of("math")])
    (received,) = decode_groups(json.loads(json.dumps(encode_groups(groups))))
    assert received.trajectories[0].teacher_scores == groups[0].trajectories[0].teacher_scores
    assert received.trajectories[0].row == {"data_source": "math"}


async def test_a_teacher_that_fails_is_one_error():
    class Fails(ToyBackend):
        async def score(self, token_ids, *, start=1, top_k=0):
            raise BackendError("the teacher is gone")

    with pytest.raises(BackendError, match="teacher is gone"):
        await teachers(Fails())([group_of("math", "math")])


async def test_ids_that_the_policy_lacks_are_refused():
    served = ServedTeachers(
        [(TeacherConfig(path="big", url=URL), ToyBackend())], top_k=VOCAB, vocab_size=VOCAB - 1
    )
    with raises(BackendError, value=f"id {VOCAB - 1}"):
        await served([group_of("math")])


async def test_no_more_requests_run_at_once_than_allowed():
    class Counts(ToyBackend):
        busy = 0
        peak = 0

        async def score(self, token_ids, *, start=1, top_k=0):
            self.busy += 1
            self.peak = max(self.peak, self.busy)
            await asyncio.sleep(0)  # the others' turn
            scores = await super().score(token_ids, start=start, top_k=top_k)
            self.busy -= 1
            return scores

    client = Counts()
    await teachers(client, max_in_flight=1)([group_of(*["math"] * 6)])
    assert client.peak == 1


@pytest.mark.parametrize(
    "override", ["rollout.temperature=0.8", "rollout.top_p=0.9", "agent.constrain_tool_calls=true"]
)
def test_a_served_teacher_and_another_distribution_are_refused(override: str):
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    teacher = {"distill": {"teachers": [{"path": "big", "url": URL}]}}
    assert build(tree | teacher)
    with raises(ConfigError, value="temperature 1"):
        build(tree | teacher, [override])
    assert build(tree | {"distill": {"teachers": "big"}}, [override])
