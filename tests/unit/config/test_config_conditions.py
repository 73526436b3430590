"""A key that is set although nothing uses it is refused, by one mechanism for all keys."""

from pathlib import Path

import pytest

from jax_agent_rl.agents import (
    AgentLoop,
    OpenAIAgentLoop,
    openai_agent,
    register_agent,
    select_agents,
)
from jax_agent_rl.agents.loop import AGENTS
from jax_agent_rl.config import Config, build, load
from jax_agent_rl.config.base import Either, Facts, WhenCommand, unused
from jax_agent_rl.deploy.plan.architectures import architecture_folder
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.runtime import build as runtime_build
from tests.config_values import all_conditions, keys, other_value, replaced, with_condition
from tests.messages import raises

MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
ROOT = Path(__file__).parents[3]
RECIPES = [file for file in sorted((ROOT / "configs").glob("*.yaml")) if file.stem != "tool_server"]
RECIPE_AGENTS = {"swe_qwen3_8b": "command"}
"""The agents of recipes that are not for tool_agent."""
EXAMPLES = {
    "gsm8k_tool": "tool_agent",
    "openai_agent": "openai_agent",
    "python_agent": "text_tool_agent",
    "reasoning_gym": "environment_agent",
    "search_agent": "search_agent",
    "textworld": "environment_agent",
}
CONDITIONAL = []
for path, section, name in keys(Config):
    if all_conditions(Config, path):
        CONDITIONAL.append(pytest.param(path, section.model_fields[name], id=path))
EVERY_AGENT = frozenset({*AGENTS, OpenAIAgentLoop.name})


def row(agent: str | None = None) -> dict:
    return {"prompt": [{"role": "user", "content": "go"}], "agent_name": agent}


def require_used(config, rows):
    problems = list(unused(config, Facts(agents=select_agents(config, rows))))
    if problems:
        raise ConfigError(problems)


def about(path: str, config, facts: Facts) -> list[str]:
    return [line for line in unused(config, facts) if line.startswith(f"{path}=")]


@pytest.mark.parametrize(("path", "field"), CONDITIONAL)
def test_a_conditional_key_is_taken_only_where_all_its_conditions_hold(path: str, field):
    config = replaced(build(MINIMAL), path, other_value(field))
    nobody = Facts(agents=frozenset(), has_vision=False, is_recurrent=False)
    everybody = Facts(agents=EVERY_AGENT, has_vision=True, is_recurrent=True)
    fulfilled = config
    for condition in all_conditions(Config, path):
        broken = with_condition(condition, config, nobody, holding=False)
        of_a_command = isinstance(condition, WhenCommand) or (
            isinstance(condition, Either)
            and any(isinstance(part, WhenCommand) for part in condition.parts)
        )
        assert (broken is None) == of_a_command
        if broken is not None:
            (line,) = about(path, broken, nobody)
            assert "is used only" in line
            assert "remove it" in line
        fulfilled = with_condition(condition, fulfilled, everybody, holding=True)
        assert fulfilled is not None
    assert about(path, fulfilled, everybody) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "agent.max_turns=9",
            "agent.max_turns=9 is used only by server_tool_agent; no row selects it",
        ),
        (
            "agent.mask_observations=false",
            "agent.mask_observations=false is used only by server_tool_agent",
        ),
        ("agent.rollout_mode=sync", "no row selects it"),
        ("agent.max_concurrent_trajectories=2", "no row selects it"),
        (
            "tool_config.max_tool_turns=7",
            "tool_config.max_tool_turns=7 is used only by text_tool_agent",
        ),
        ("search.topk=9", "search.topk=9 is used only by search_agent; no row selects it"),
        (
            "environments.scope=global",
            "environments.scope=global is used only by environment_agent",
        ),
        (
            "agent.run_timeout=5",
            "is used only by react_agent, openai_agent, command and harbor; no row selects",
        ),
    ],
)
def test_keys_of_agents_that_no_row_selects_are_refused_once_rows_are_known(
    override: str, message: str
):
    config = build(MINIMAL, [override])
    with pytest.raises(ConfigError) as caught:
        require_used(config, [row("tool_agent"), row("tool_agent")])
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["agent.max_turns=9"], [row("tool_agent"), row("server_tool_agent")]),
        (["agent.max_turns=9", "agent.default_agent=server_tool_agent"], [row()]),
        (["tool_config={enabled: true, max_tool_turns: 7}"], [row()]),
        (["agent.enable_search=true", "search.topk=9"], [row()]),
        (["agent.tool_timeout=3", "interactions.timeout=3"], [row("interaction_agent")]),
    ],
)
def test_an_agents_key_is_taken_where_a_row_selects_it_or_a_derived_one(overrides, rows):
    require_used(build(MINIMAL, overrides), rows)


@pytest.mark.parametrize(
    ("override", "is_refused"),
    [
        (
            "rollout.backend=vllm",
            True,
        ),
        ("rollout.jetstream={}", False),
        ("rollout.jetstream=null", False),
        ("rollout.jetstream.dtype=null", False),
        ("rollout.backend=jetstream", False),
    ],
)
def test_keys_of_another_engine_are_refused_with_a_way_to_reset_them(
    override: str, is_refused: bool
):
    overrides = ["rollout.jetstream.dtype=bfloat16", override]
    if not is_refused:
        assert build(MINIMAL, overrides)
        return
    with raises(
        ConfigError,
        key="rollout.jetstream.dtype",
        value="bfloat16",
        fix=("rollout.backend=jetstream", "rollout.jetstream=null"),
    ):
        build(MINIMAL, overrides)


def test_a_users_agent_may_read_any_key_and_an_openai_client_only_its_own():
    @register_agent("conditions_own")
    class Own(AgentLoop):
        async def play(self, request):
            raise NotImplementedError

    openai_agent("conditions_client")(lambda base_url, api_key, row: None)
    try:
        config = build(MINIMAL, ["agent.max_turns=9", "agent.run_timeout=5"])
        require_used(config, [row("conditions_own")])
        assert select_agents(config, [row("conditions_client")]) == {
            "openai_agent",
            "conditions_client",
            "single_turn_agent",
        }
        with raises(ConfigError, key="agent.max_turns", value=9, fix="server_tool_agent") as caught:
            require_used(config, [row("conditions_client")])
        assert len(caught.value.problems) == 1
    finally:
        del AGENTS["conditions_own"], AGENTS["conditions_client"]


def test_what_the_environment_says_of_tools_is_for_any_run(monkeypatch):
    monkeypatch.setenv("TOOL_SERVER_URL", "http://env:1")
    monkeypatch.setenv("MAX_TOOL_TURNS", "7")
    config = build(MINIMAL)
    assert (config.tool_config.server_url, config.tool_config.max_tool_turns) == ("http://env:1", 7)
    require_used(config, [row("tool_agent")])
    with raises(ConfigError, key="tool_config.max_tool_turns", value=8):
        require_used(build(MINIMAL, ["tool_config.max_tool_turns=8"]), [row("tool_agent")])


@pytest.mark.parametrize(
    ("file", "agent"),
    [
        *(
            pytest.param(file, RECIPE_AGENTS.get(file.stem, "tool_agent"), id=file.stem)
            for file in RECIPES
        ),
        *(
            pytest.param(ROOT / "examples" / name / "config.yaml", agent, id=name)
            for name, agent in EXAMPLES.items()
        ),
    ],
)
def test_a_shipped_recipe_sets_no_key_that_its_agent_does_not_use(file: Path, agent: str):
    agents = {agent}
    if agent == "command":
        agents.add("openai_agent")  # which it is a kind of
    facts = Facts(agents=frozenset(agents), has_vision=False, is_recurrent=False)
    assert list(unused(load(file), facts)) == []


def test_a_default_that_is_written_out_is_no_use():
    tree = build(MINIMAL).model_dump(mode="json")
    require_used(build(tree), [row("single_turn_agent")])


def test_a_run_refuses_what_neither_its_rows_agents_nor_its_model_use():
    with architecture_folder("smollm2-135m") as model:
        keys = [
            "agent.max_turns=9",
            "model.min_pixels=4",
            "model.max_pixels=8",
            "learner.row_patches=9",
            "rollout.jetstream.patch_buckets=[8]",
            "rollout.jetstream.state_checkpoints=8",
        ]
        config = build(MINIMAL, [f"model.path={model}", *keys])
        with pytest.raises(ConfigError) as caught:
            runtime_build.require_used(config, [row("tool_agent")])
    refused_keys = [problem.partition("=")[0] for problem in caught.value.problems]
    assert sorted(refused_keys) == sorted(key.partition("=")[0] for key in keys)
    assert any(
        "by vision models; the one at model.path has no vision" in p for p in caught.value.problems
    )
