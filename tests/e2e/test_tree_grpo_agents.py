"""Tree-GRPO on agents with a tool server, tools by text, a retrieval server and an environment: one
step of a whole run each, on a random model whose vocabulary has whole calls as single tokens, so
that it makes some.
"""

import copy
import io
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.config import load
from jax_agent_rl.environments import Environment, Observation, base
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.runtime.train import train
from tests.http_service import ToolServer, serve
from tests.tiny_chat import CONFIG, params, tokenizer
from tests.tiny_run import step_records, tiny_recipe

M = 2
N = 3
K = 3
TREES = [
    "rollout.strategy.name=tree_grpo",
    f"rollout.strategy.tree_grpo={{m: {M}, n: {N}, l: 1, k: {K}}}",
    f"rollout.group_size={M * K}",
    "algorithm.adv_estimator=tree_grpo",
]


class Echo(Environment):
    """Says how many words it has heard; a fifth of a point for each of three turns."""

    turns = words = 0

    async def reset(self, *, greeting: str) -> Observation:
        return Observation.say(greeting)

    async def step(self, reply) -> Observation:
        self.turns = self.turns + 1
        self.words = self.words + len(reply.content.split())
        return Observation.say(f"{self.words} words", score=0.2, done=self.turns == 3)


@asynccontextmanager
async def tool_server() -> AsyncIterator[str]:
    async with ToolServer(lambda action: f" {len(action)} ") as server:
        yield server.url
    assert server.closed and set(server.closed.values()) == {1}, (
        "every environment was closed, once"
    )


@asynccontextmanager
async def retriever() -> AsyncIterator[str]:
    async def answer(request: Request) -> JSONResponse:
        queries = (await request.json())["queries"]
        return JSONResponse(
            {"result": [[{"document": {"contents": f"about {query}"}}] for query in queries]}
        )

    async with serve(Starlette(routes=[Route("/retrieve", answer, methods=["POST"])])) as url:
        yield f"{url}/retrieve"


@asynccontextmanager
async def nothing() -> AsyncIterator[str]:
    yield ""


AGENTS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "server_tool_agent": (
        tool_server,
        "<py>{}</py>",
        {
            "agent": {
                "tool_server_url": "URL",
                "action_stop_tokens": ["</py>"],
                "max_turns": 3,
                "max_obs_length": 16,
            }
        },
        {},
    ),
    "text_tool_agent": (
        tool_server,
        "<tool>{}</tool>",
        {"tool_config": {"enabled": True, "server_url": "URL", "request_interval": 0}},
        {},
    ),
    "search_agent": (
        retriever,
        "<search>{}</search>",
        {"agent": {"enable_search": True}, "search": {"server_url": "URL", "topk": 1}},
        {},
    ),
    "environment_agent": (
        nothing,
        "w{}",
        {},
        {"environment_kwargs": {"name": "echo", "greeting": "go on"}},
    ),
}


def write_run(
    folder: Path, agent: str, word: str, sections: dict[str, Any], extra: dict[str, Any], url: str
) -> Path:
    """Write the recipe of a run; ``word`` makes the tokens that the vocabulary has room for."""
    sections = json.loads(json.dumps(sections).replace("URL", url))
    limits = {"max_prompt_length": 64, "max_response_length": 96}
    if agent != "server_tool_agent":
        limits["max_tool_response_length"] = 16
    recipe = tiny_recipe(
        folder,
        **sections | {"agent": limits | sections.get("agent", {})},
        rollout={"prompts_per_step": 3, "max_model_len": 160},
        learner={"pack_length": 192},
        algorithm={"filter_zero_variance": False},
        trainer={"steps": 1, "checkpoint_every": 0},
        data={"eval": None},
    )
    weights = dict(params())
    if agent == "environment_agent":  # turns end by themselves alone: the end has to be likely
        weights["embed"] = weights["embed"].at[CONFIG.eos_token_ids[0]].multiply(3.0)
    save_hf(folder / "model", CONFIG, weights)
    words = copy.deepcopy(tokenizer())
    words.add_tokens([word.format(number) for number in range(CONFIG.vocab_size - len(words))])
    words.save_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "agent_name": agent, "extra_info": extra}) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return recipe


def grpo(rewards: np.ndarray) -> np.ndarray:
    """Formula of the paper: deviations over the unbiased standard deviation."""
    return (rewards - rewards.mean()) / (
        np.sqrt(((rewards - rewards.mean()) ** 2).sum() / (len(rewards) - 1)) + 1e-6
    )


@pytest.mark.parametrize("agent", AGENTS)
async def test_one_step_of_tree_grpo(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "ENVIRONMENTS", {**base.ENVIRONMENTS, "echo": Echo})
    asked = defaultdict(list)
    stream = JetStreamBackend.stream

    async def watched(self, request):
        async for chunk in stream(self, request):
            if chunk.final is not None:
                asked[request.session_id].append((request.prompt_ids, chunk.final))
            yield chunk

    monkeypatch.setattr(JetStreamBackend, "stream", watched)
    opened, word, sections, extra = AGENTS[agent]
    async with opened() as url:
        config = load(write_run(tmp_path, agent, word, sections, extra, url), TREES)
        summary = await train(config, resume=False, console=Console(file=io.StringIO()))
    folder = tmp_path / "run"
    records = [r for r in read_records(folder / "trajectories.jsonl") if r["split"] == "train"]
    (step,) = step_records(folder)
    by_id = {r["trajectory_id"]: r for r in records}

    # The trees: M per prompt, with branches after turns, not only at the prompt.
    groups = defaultdict(list)
    for record in records:
        assert record["agent_name"] == agent
        groups[record["group_id"]].append(record)
    branched = [r for r in records if r["fork"] and r["fork"]["turns"] > 0]
    assert len(branched) >= 3
    assert len(groups) == 3
    assert summary["started"] == 3 * M * (1 + N)
    assert set(summary["dropped"]) == {"not_selected"}
    assert all(
        turn["tool_calls"] or agent == "environment_agent"
        for r in branched
        for turn in r["turns"][:1]
    )

    # What a branch inherits is its parent's, id by id, and the engine sampled only what follows.
    for record in records:
        fork = record["fork"] or {"turns": 0}
        spans = [turn["sampled"] + turn["appended"] for turn in record["turns"]]
        inherited = sum(spans[: fork["turns"]])
        parent = by_id.get(fork.get("parent_id"))
        if fork["turns"] and parent:
            for key in ("response_ids", "rollout_logprobs", "policy_versions", "response_mask"):
                assert record[key][:inherited] == parent[key][:inherited]
        answers = asked[record["trajectory_id"]]
        assert [len(output.token_ids) for _, output in answers] == [
            t["sampled"] for t in record["turns"][fork["turns"] :]
        ]
        assert list(answers[0][0]) == record["prompt_ids"] + record["response_ids"][:inherited]
    assert step["tree/inherited_tokens"] == sum(
        turn["sampled"] for r in branched for turn in r["turns"][: r["fork"]["turns"]]
    )

    # The advantage: among all of the prompt, plus among those of the tree.
    for members in groups.values():
        rewards = np.array([r["reward"] for r in members])
        trees = np.array(
            [r["fork"]["tree_id"] if r["fork"] else r["trajectory_id"] for r in members]
        )
        assert sorted(np.unique(trees, return_counts=True)[1]) == [K] * M
        expected = grpo(rewards)
        for tree in np.unique(trees):
            expected[trees == tree] += grpo(rewards[trees == tree])
        for record, advantage in zip(members, expected, strict=True):
            mask = np.array(record["response_mask"], bool)
            assert np.allclose(np.array(record["advantages"], float)[mask], advantage, atol=1e-5)
    assert any(r["advantages"][0] for r in records)
    assert np.isfinite(step["loss"])
    assert step["compared_gap_max"] < 1e-4
    assert step["trained_tokens"] > 0
