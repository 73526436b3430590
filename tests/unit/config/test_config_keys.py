"""No key is dead: the program reads each one while it does a little of everything.

::

    actions below ──► Section.__getattribute__, recorded ──► the keys that were read
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import BaseModel
from rich.console import Console

import jax_agent_rl
from jax_agent_rl.agents import HarborAgent, OpenAIAgentLoop, SearchAgent, TextToolAgent, ToolAgent
from jax_agent_rl.agents.command.agent import CommandAgent
from jax_agent_rl.collect.filters import select
from jax_agent_rl.collect.strategies import Growth, Outcome, make_strategy
from jax_agent_rl.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    LearnerConfig,
    SearchConfig,
    ToolClientConfig,
    load,
)
from jax_agent_rl.config.algorithm import (
    ADV_ESTIMATORS,
    FILTER_NAMES,
    LOSS_MODES,
    GdpoConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from jax_agent_rl.config.base import Section
from jax_agent_rl.config.default_agent import default_agent
from jax_agent_rl.config.kl import KLConfig
from jax_agent_rl.config.learner import LoraConfig, MultihostConfig
from jax_agent_rl.config.rollout import StrategyConfig
from jax_agent_rl.config.task import CurriculumConfig
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.experience import Scores, build_experience
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.losses.policy import (
    POLICY_LOSSES,
    SELECTORS,
    LossConfig,
    Terms,
    select_terms,
)
from jax_agent_rl.learner.optimizer import make_optimizer
from jax_agent_rl.rewards import registry
from jax_agent_rl.runtime import build as runtime_build
from jax_agent_rl.runtime import train as runtime_train
from jax_agent_rl.runtime.engines import backend_factories, make_client, read_model
from jax_agent_rl.runtime.multihost import initialize
from jax_agent_rl.runtime.rollouts import open_codec
from jax_agent_rl.runtime.scoring import open_scorer
from jax_agent_rl.runtime.teachers import check_teachers
from jax_agent_rl.runtime.transports import make_transport
from jax_agent_rl.testing.fakes import NoCheckpoints
from jax_agent_rl.tools import ToolRegistry
from jax_agent_rl.tools.calculator import calculator
from tests.agent_testbed import ACT, AgentHarness, server_tool_stage
from tests.config_values import keys
from tests.fake_training import IdleLearner
from tests.fakes import ScriptedBackend
from tests.http_service import ToolServer
from tests.tiny import TINY, tiny_params
from tests.tiny_chat import params
from tests.tiny_run import tiny_recipe
from tests.trajectories import random_groups, trajectory

PROGRAM = str(Path(jax_agent_rl.__file__).parent)
CONFIG = f"{PROGRAM}/config"
IDENTITY = f"{PROGRAM}/runtime/identity.py"
"""Reads every key of ``BY_CONTENT``, to compare runs."""
CALL = '<call>calculator {"expression": "1 + 2"}</call>'
KEYS = {path: (section, name) for path, section, name in keys(Config)}

READ_ELSEWHERE = {
    # Ray has to be started
    "runtime/placement.py": {
        "rollout.num_engines": "rollout.num_engines",
        "rollout.gpus_per_engine": "rollout.gpus_per_engine",
        "rollout.ray_address": "rollout.ray_address",
    },
    # a program has to run in a container or a sandbox
    "agents/command/agent.py": {
        "agent.command.verifier_timeout": "self._settings.verifier_timeout",
    },
    "agents/command/containers.py": {"agent.command.image": "self.settings.image"},
    # Harbor has to be installed, which needs Python 3.12
    "agents/harbor/agent.py": {
        "agent.harbor.environment": "self._settings.environment",
        "agent.harbor.endpoint.url": "self._settings.endpoint.url",
        "agent.harbor.mounts": "self._settings.mounts",
        "agent.harbor.reward_key": "self._settings.reward_key",
        "agent.harbor.start_attempts": "self._settings.start_attempts",
        "agent.harbor.trials_dir": "self._settings.trials_dir",
    },
    "agents/harbor/trial.py": {
        "agent.harbor.agent_options": "settings.agent_options",
        "agent.harbor.agent_env": "settings.agent_env",
        "agent.harbor.model": "settings.model",
        "agent.harbor.environment_options": "settings.environment_options",
    },
    "agents/command/machines.py": {
        f"agent.harbor.local.{name}": f"settings.{name}"
        for name in (
            "cpu_seconds",
            "memory_mb",
            "processes",
            "disk_mb",
            "workspace_mb",
            "workspace_entries",
        )
    },
    # the weights of a critic have to be loaded
    "runtime/build.py": {
        "critic.path": "config.critic.path",
        "algorithm.observation_loss.template": "loss.template",
    },
    # an engine, a learner's update or a vision model has to be compiled
    "runtime/scoring.py": {
        "reward.judge.max_model_len": "config.max_model_len",
        "algorithm.feedback.template": "feedback.template",
        "algorithm.feedback.max_length": "feedback.max_length",
    },
    "learner/learner.py": {
        "algorithm.kl.target": "kl.target",
        "algorithm.kl.horizon": "kl.horizon",
        "learner.max_nonfinite_steps": "self._config.max_nonfinite_steps",
    },
    "learner/image_packing.py": {"learner.row_patches": "config.row_patches"},
    "trainer/agreement.py": {
        "trainer.on_disagreement": "self._runtime.config.trainer.on_disagreement",
    },
    "agreement/report.py": {"trainer.agreement_tolerance": "config.trainer.agreement_tolerance"},
    # MLflow takes seconds to import
    "observe/sinks/traces.py": {
        "trace.project": "config.project",
        "trace.mlflow_tracking_uri": "config.mlflow_tracking_uri",
    },
    # another name of rollout.group_size, read when a configuration is made
    "config/run.py": {"agent.n": "agent.get('n')"},
}
"""Keys that no action below reads, by the file that does, with its expression and the reason."""


@contextmanager
def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[type, str]]]:
    """Yield the set of (section, key) that the program reads meanwhile."""
    found: set[tuple[type, str]] = set()

    def read(section: Section, name: str) -> Any:
        if name in type(section).model_fields and is_use(sys._getframe(1)):
            found.add((type(section), name))
        return object.__getattribute__(section, name)

    def is_use(frame: FrameType) -> bool:
        """Return whether a key is read by the program, not to check or to compare it.

        A property of a section reads on behalf of whoever asks for it.
        """
        while frame.f_code is read.__code__ or frame.f_code.co_filename.startswith(CONFIG):
            is_check = "." not in frame.f_code.co_qualname
            if is_check and frame.f_code is not default_agent.__code__:
                return False
            frame = frame.f_back
        file = frame.f_code.co_filename
        return file.startswith(PROGRAM) and file != IDENTITY

    def dump(section: Section, **options: Any) -> dict[str, Any]:
        if options.get("mode") != "json":  # such a tree is saved, not used
            names = type(section).model_fields.keys() - options.get("exclude", set())
            found.update((type(section), name) for name in names)
        return BaseModel.model_dump(section, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Section, "__getattribute__", read, raising=False)
        patch.setattr(Section, "model_dump", dump)
        yield found


# --- a little of everything -----------------------------------------------------------------------

MASKED = dict.fromkeys(FILTER_NAMES, "mask")
RUNS: dict[str, Any] = {
    "sync": {
        "algorithm": {
            "filters": {**MASKED, "repetition": "drop", "final_answer": "x"},
            "shaping": {"overlong_buffer": 4, "repetition_factor": 0.1},
            "max_resample_rounds": 1,
        },
        "reward": {"remote": {"url": "http://127.0.0.1:1", "data_sources": ["of_a_server"]}},
        "trace": {"sinks": ["files"]},
        "trainer": {"eval_every": 1},
    },
    "fully_async": {"trainer": {"mode": "fully_async"}},
    "tree_grpo": {"rollout": {"strategy": {"name": "tree_grpo"}, "group_size": 6}},
    "treerl": {"rollout": {"strategy": {"name": "treerl", "treerl": {"m": 1}}, "group_size": 5}},
}


async def train(folder: Path, patch: pytest.MonkeyPatch, sections: Any) -> None:
    """Run a whole training on a scripted engine, with a learner that learns nothing."""
    config = load(tiny_recipe(folder, **sections), ["trainer.steps=2"])
    codec = open_codec(config)
    reply = [*codec.encode_text("one two"), *codec.eos_token_ids]
    engines = {"jetstream": lambda: ScriptedBackend(codec, lambda request: reply)}
    patch.setattr(runtime_build, "backend_factories", lambda *_, **__: engines)
    patch.setattr(runtime_build, "make_learner", lambda *_, **__: IdleLearner())
    patch.setattr(runtime_train, "open_checkpointer", lambda *_, **__: NoCheckpoints())
    patch.setattr(runtime_train, "reward_plot", lambda *_, **__: None)
    await runtime_train.train(config, resume=False, console=Console(file=io.StringIO()))


async def make_engines(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make what generates and scores: engines of every backend, a judge, teachers, processes."""
    teacher = str(folder / "model")
    sections = {"reward": {"judge": {"model": "policy"}}, "distill": {"teachers": [teacher]}}
    config = load(tiny_recipe(folder, **sections))
    codec = open_codec(config)
    model = read_model(config, codec)
    client = make_client(config, codec)
    check_teachers(config)
    with contextlib.suppress(ConfigError):  # this machine has no sandbox
        async with open_scorer(config, {"judge", "sandbox"}, client=client, codec=codec):
            pass

    for backend in ("jetstream", "vllm", "sglang", "remote"):
        rollout = config.rollout.model_copy(update={"backend": backend, "urls": ("http://a:1",)})
        pixels = config.model.model_copy(update={"min_pixels": 1, "max_pixels": 2})
        changed = config.model_copy(update={"rollout": rollout, "model": pixels})
        factories = backend_factories(
            changed, codec, weights=lambda: (model, params()), print_line=print
        )
        for make in factories.values():
            make()
        make_transport(changed, model, client.pool, probe_ids=[3, 4])

    patch.setattr(jax.distributed, "initialize", lambda **_: None)
    initialize(MultihostConfig(coordinator="a:1", num_processes=2, process_id=0))


# An observation between separators, longer than what is left for it.
TURNS = {"enable_mtrl": True, "mtrl_sep": "<o>{obs}</o>", "max_response_length": 8}


async def play() -> None:
    """Let each agent play a trajectory."""
    tools = {"tools": ToolRegistry([calculator])}
    async with ToolServer() as server:
        client = {"tool_config": ToolClientConfig(server_url=server.url, request_interval=0)}
        for harness in (
            server_tool_stage(server, [ACT, "so 3"], mask_void_traj=True, max_turns=1),
            server_tool_stage(server, [ACT, "3"], **TURNS),
            AgentHarness(TextToolAgent, ["<tool> 1 </tool>", "3"], shared=client),
            AgentHarness(ToolAgent, [CALL, "3"], shared=tools, history_window=1),
            AgentHarness(ChatTwice, ["hello"]),
        ):
            await harness.run()
            await harness.agent.close()
    search = SearchConfig(server_url="http://127.0.0.1:1")
    AgentHarness(SearchAgent, [], shared={"search": search})
    command = AgentHarness(CommandAgent, [], command={"argv": ["true"]})
    with contextlib.suppress(ConfigError):  # this machine has no sandbox
        await command.agent.preflight()
    with contextlib.suppress(ConfigError):  # without a harness
        await AgentHarness(HarborAgent, []).agent.preflight()


class ChatTwice(OpenAIAgentLoop):
    """A client of the endpoint that edits its history."""

    @staticmethod
    async def function(base_url: str, api_key: str, row: Any) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers) as client:
            for content in ("a", "b"):
                messages = [{"role": "user", "content": content}]
                body = {"model": "policy", "messages": messages}
                answer = await client.post("/chat/completions", json=body)
                answer.raise_for_status()


def learn() -> None:
    """Make learners, and compute what a step learns from."""
    groups = random_groups(0)
    config = LearnerConfig(lora=LoraConfig(), lr_scheduler_type="wsd", ema_decay=0.5)
    critic = CriticConfig(lr_scheduler_type="wsd")
    algorithm = AlgorithmConfig(
        adv_estimator="gae", kl=KLConfig(where="loss"), gdpo=GdpoConfig(reward_keys=("score",))
    )
    learner = Learner(
        TINY,
        tiny_params(),
        algorithm=algorithm,
        config=config,
        critic=critic,
        temperature=1.0,
        total_steps=10,
    )
    learner.packer.mini_batches(groups)
    optimized_params = {"embed": jnp.ones(2)}
    for section in (config, critic):
        optimizer = make_optimizer(section, 0.1)
        optimizer.update(optimized_params, optimizer.init(optimized_params), optimized_params)

    trajectories = [t for group in groups for t in group.trajectories]
    old = [np.zeros(t.num_sampled) for t in trajectories]
    scores = Scores(
        old=old,
        ref=old,
        values=[np.zeros(len(t.response_ids) + 1) for t in trajectories],
    )
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs=("token_k1",), rollout_rs_threshold=(2.0,)
    )
    for name in ADV_ESTIMATORS:
        changes = {"adv_estimator": name, "rollout_correction": correction}
        changed = algorithm.model_copy(update=changes)
        select(groups, changed)
        build_experience(groups, changed, scores, kl_coef=0.1, masked=())

    values = dict.fromkeys(Terms.__annotations__, jnp.zeros((1, 2)))
    terms = Terms(**{**values, "sequence": jnp.zeros((1, 2), int)})
    for name in LOSS_MODES:
        policy_loss = PolicyLossConfig(loss_mode=name)
        loss = LossConfig(low=0.2, high=0.2, dual=3.0, policy_loss=policy_loss)
        POLICY_LOSSES[name](terms, loss)
        if name in SELECTORS:
            active = [x == 0 for x in old]
            select_terms(old, {"advantage": old}, active, loss, seed=0)


def draw() -> None:
    """Draw rows by difficulty: one that is never solved, and one that always is."""
    for pass_rate in (0.0, 1.0):
        cursor = DataCursor([{"question": 1}], seed=0, curriculum=CurriculumConfig(enabled=True))
        assert cursor.pools is not None
        cursor.pools.record({"question": 1}, pass_rate)
        cursor.draw()


def branch() -> None:
    """Decide about the branches of a trajectory whose second turn follows an observation."""
    arpo = make_strategy(StrategyConfig(name="arpo"))
    growth = Growth(group_size=2, seed=0)
    (start, *_) = arpo.next_wave(growth)
    two_turns = trajectory([1], [2, 3, 4], mask=[1, 0, 1])
    outcome = Outcome(trajectory_id="g-0", start=start, trajectories=(two_turns,))
    arpo.next_wave(replace(growth, waves=[[outcome]]))


async def do_everything(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Do all of the above."""
    for name, sections in RUNS.items():
        with patch.context() as patch_of_run:
            await train(folder / name, patch_of_run, sections)
    await make_engines(folder / "parts", patch)
    await play()
    branch()
    draw()
    learn()


async def test_every_key_is_read_by_these_actions_or_by_a_named_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))
    with recorded_reads(monkeypatch) as reads:
        await do_everything(tmp_path, monkeypatch)
    unread = [path for path, key in KEYS.items() if key not in reads]
    assert sorted(unread) == sorted(itertools.chain.from_iterable(READ_ELSEWHERE.values()))
    for file, reads_of_file in READ_ELSEWHERE.items():
        tree = ast.parse(Path(PROGRAM, file).read_text())
        expressions = {
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Call)
        }
        for path, expression in reads_of_file.items():
            assert expression in expressions, f"{file} does not read {path}"
