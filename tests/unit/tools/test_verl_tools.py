"""Tool classes written for verl run as they are: as verl documents them, with its imports and its
YAML.
"""

import importlib.util
import sys
import textwrap

import pytest
import yaml
from PIL import Image

from jax_agent_rl.agents import ToolAgent
from jax_agent_rl.chat.formats import Reply, ToolCall
from jax_agent_rl.config import ToolsConfig
from jax_agent_rl.errors import ConfigError, ToolDefinitionError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.tools import ToolRegistry, ToolResponse, ToolSession
from jax_agent_rl.tools.registry import open_tools
from jax_agent_rl.tools.verl import VerlTool
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import AgentHarness, assert_token_exact, episode_request
from tests.fakes import FakeCodec
from tests.messages import assert_message, raises
from tests.tiny_chat import TinyCodec, assert_exact, tiny_context

needs_no_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is not None, reason="verl itself is installed"
)

GRADER = '''
import os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class Grader(BaseTool):
    """Compares an answer to the row's, as verl's GSM8K tool does; its ids are its own."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._states = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        own = uuid4().hex
        self._states[own] = {"truth": ground_truth, "answer": "", "best": 0.0}
        LOG.append(("create", instance_id, ground_truth))
        return own, ToolResponse()

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        state = self._states[instance_id]
        state["answer"] = parameters["answer"]
        score = await self.calc_reward(instance_id)
        step = 0.0 if score > state["best"] else self.config["penalty"]
        state["best"] = score
        extra = {"tries": 1, "right": score == 1.0, "status": "done", "error": None}
        return ToolResponse(f"{score=}"), step, extra

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._states[instance_id]
        return 1.0 if state["answer"] == state["truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._states[instance_id]
        LOG.append(("release", len(self._states)))
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "grade",
        "description": "Grades an answer.",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "The answer to the question"}
            },
            "required": ["answer"],
        },
    },
}
ENTRY = {
    "class_name": "FILE:Grader",
    "config": {"type": "native", "penalty": -0.05},
    "tool_schema": SCHEMA,
}
ROW = {
    "prompt": [{"role": "user", "content": "what is one plus two"}],
    "extra_info": {"tools_kwargs": {"grade": {"create_kwargs": {"ground_truth": "3"}}}},
}


@pytest.fixture
def write(tmp_path):
    """Write a module and the YAML that lists its class; returns the section."""

    def config(code=GRADER, *, name="verl_style", **changes):
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(code))
        entry = {**ENTRY, **changes}
        entry["class_name"] = entry["class_name"].replace("FILE", str(file))
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
        return ToolsConfig(tool_config_path=str(tmp_path / "tools.yaml"))

    return config


def session(tools, row=ROW, **fields):
    kwargs = row["extra_info"]["tools_kwargs"]
    return ToolSession(
        tools,
        "t",
        kwargs=kwargs,
        timeout=5.0,
        shorten=lambda text: FakeCodec().truncate(text, 50, "right"),
        **fields,
    )


def instance_of(tools):
    assert isinstance(tools["grade"], VerlTool)
    return tools["grade"].wrapped


def log_of(tools):
    return vars(sys.modules[type(instance_of(tools)).__module__])["LOG"]


async def test_the_documented_life_of_a_tool_with_its_step_rewards(write):
    async with open_tools(write()) as tools:
        assert tools.select()["grade"].schema == SCHEMA
        stage = AgentHarness(
            ToolAgent,
            ['<call>grade {"answer": "2"}</call>', '<call>grade {"answer": "3"}</call>', "it is 3"],
            shared={"tools": tools},
        )
        trajectory = await stage.run(ROW)
        assert [(c.observation, c.reward, c.error) for c in trajectory.tool_calls] == [
            ("score=0.0", -0.05, None),
            ("score=1.0", 0.0, None),
        ]
        assert_token_exact(trajectory, stage.backend.requests)
        assert trajectory.tool_scores == {"grade": 1.0}
        counts = {
            key: value for key, value in trajectory.metrics.items() if key.startswith("tool/")
        }
        assert counts == {
            "tool/grade/tries": 2.0,
            "tool/grade/right": 1.0,
        }, "other metrics are no numbers"
        assert log_of(tools.select()) == [("create", "t", "3"), ("release", 0)]


async def test_a_trajectory_on_an_engine_with_a_real_tokenizer(write):
    class Grading(TinyCodec):
        def parse_reply(self, sampled_ids, tools=(), *, context_ids=None):
            calls = (ToolCall(name="grade", arguments={"answer": str(len(sampled_ids))}),)
            return Reply(content=self.decode(sampled_ids).strip(), tool_calls=calls)

    async with (
        open_tools(write()) as tools,
        tiny_context(
            tools=tools.select().values(), codec=Grading(), max_assistant_turns=3
        ) as context,
    ):
        sampling = SamplingParams(max_tokens=40, seed=1, stop=tuple("aeiou"))  # ends its turns soon
        trajectory = await ToolAgent(context).play(episode_request(ROW, sampling))
        assert_exact(trajectory, context.client.pool.servers[0].backend)  # type: ignore[attr-defined]
        assert [call.reward for call in trajectory.tool_calls] == [-0.05, -0.05]
        assert log_of(tools.select()) == [("create", "t", "3"), ("release", 0)]


CREATES = {
    "keywords": (
        "async def create(self, instance_id=None, ground_truth=None): {}; return instance_id,"
        " ToolResponse()"
    ),
    "one argument": (
        "async def create(self, instance_id=None, create_kwargs=None): "
        "ground_truth = create_kwargs['ground_truth']; {}; return instance_id, ToolResponse()"
    ),
    "any keywords": (
        "async def create(self, instance_id, **kwargs): "
        "ground_truth = kwargs['create_kwargs']['ground_truth']; {}; "
        "return instance_id, ToolResponse()"
    ),
    "no id": (
        "async def create(self, **kwargs): ground_truth = kwargs['ground_truth']; {}; return None,"
        " ToolResponse()"
    ),
    "id alone": (
        "async def create(self, instance_id=None, ground_truth=None, **kwargs): {}; "
        "return instance_id"
    ),
}


@pytest.mark.parametrize("create", CREATES.values(), ids=CREATES)
async def test_create_is_called_as_its_signature_wants(write, create):
    code = f"""
    from verl.tools.base_tool import BaseTool, ToolResponse

    class Grader(BaseTool):
        {create.format("self.truth = ground_truth")}

        async def execute(self, instance_id, parameters, **kwargs):
            return f"{{instance_id}}: {{parameters['answer'] == self.truth}}", 0.5, {{}}
    """
    async with open_tools(write(code)) as tools, session(tools.select()) as opened:
        record = await opened.call("grade", {"answer": "3"})
        assert (record.observation, record.reward, record.error) == ("t: True", 0.5, None)
        assert await opened.calc_rewards() == {"grade": 0.0}, "as verl's base class has it"


async def test_images_reach_the_model(write):
    code = """
    from PIL import Image
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    class Grader(BaseTool):
        def get_openai_tool_schema(self):
            return OpenAIFunctionToolSchema.model_validate(
                {"type": "function", "function": {"name": "grade", "description": "Looks."}}
            )

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text="a wall", image=[Image.new("RGB", (2, 2), "red")]), None, {}
    """
    async with open_tools(write(code, tool_schema=None)) as tools:
        stage = AgentHarness(
            ToolAgent,
            ["<call>grade {}</call>", "it is red"],
            codec=FakeCodec(modalities=frozenset({"image"})),
            capabilities=Capabilities(
                max_model_len=1000, max_concurrent=8, multi_modal=frozenset({"image"})
            ),
            shared={"tools": tools},
        )
        trajectory = await stage.run()
    (image,) = stage.backend.requests[1].multi_modal["image"]
    assert isinstance(image, Image.Image)
    assert image.getpixel((0, 0)) == (255, 0, 0)
    assert "<image> a wall" in stage.text(trajectory)
    assert trajectory.tool_calls[0].reward == 0.0


async def test_an_older_class_that_returns_plain_text_and_knows_no_base_class(write):
    code = """
    class Grader:
        def __init__(self, config, tool_schema):
            self.tool_schema, self.name = tool_schema, tool_schema.function.name

        async def create(self, instance_id=None, **kwargs):
            return instance_id

        async def execute(self, instance_id, parameters, **kwargs):
            return "so it is", 1.0, {}

        async def calc_reward(self, instance_id, **kwargs):
            return 0.25

        async def release(self, instance_id, **kwargs):
            return None
    """
    async with open_tools(write(code)) as tools, session(tools.select()) as opened:
        record = await opened.call("grade", {"answer": "3"})
        assert (record.observation, record.reward) == ("so it is", 1.0)
        assert await opened.calc_rewards() == {"grade": 0.25}


async def test_a_create_that_fails_is_not_released(write):
    code = GRADER.replace("own = uuid4().hex", "raise OSError('no room')")
    async with open_tools(write(code)) as tools:
        async with session(tools.select()) as opened:
            record = await opened.call("grade", {"answer": "3"})
        assert record.observation == "Error: grade is not available: no room"
        assert log_of(tools.select()) == []


async def test_what_create_answers_is_named_as_not_shown(write, caplog):
    code = GRADER.replace("return own, ToolResponse()", "return own, ToolResponse('welcome')")
    async with open_tools(write(code)) as tools, session(tools.select()):
        assert_message(caplog.text, key="grade.create", value="not shown")
        assert "welcome" in caplog.text


@needs_no_verl
async def test_verl_is_there_only_while_a_class_is_loaded(write):
    async with open_tools(write()):
        assert importlib.util.find_spec("verl") is None
        assert not [m for m in sys.modules if m.startswith("verl")]
    with raises(ConfigError, value="'verl.workers'"):
        async with open_tools(write("import verl.workers", name="needs_more")):
            pass
    assert "verl" not in sys.modules


@needs_no_verl
def test_verls_function_tools_are_ours(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(
        "from verl.tools.function_tool import function_tool\n"
        "@function_tool\ndef double(x: int) -> str:\n    '''Doubles.'''\n    return str(2 * x)\n"
    )
    assert list(ToolRegistry.from_path(str(file))) == ["double"]


async def test_a_verl_that_is_installed_is_used_itself(write, tmp_path, monkeypatch):
    for package in ("verl", "verl/tools"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    source = VerlTool.__module__
    (tmp_path / "verl/tools/schemas.py").write_text(
        f"from {source} import OpenAIFunctionToolSchema as Mine, VerlResponse as ToolResponse\n"
        "class OpenAIFunctionToolSchema(Mine): pass\n"
    )
    (tmp_path / "verl/tools/base_tool.py").write_text(
        f"from {source} import VerlBaseTool as BaseTool\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code = GRADER.replace(
        "from verl.utils.rollout_trace import rollout_trace_op", "rollout_trace_op = lambda f: f"
    )
    try:
        async with open_tools(write(code)) as tools:
            schema = instance_of(tools.select()).tool_schema
            assert type(schema).__module__ == "verl.tools.schemas"
            assert "verl" in sys.modules
    finally:
        for name in [m for m in sys.modules if m.partition(".")[0] == "verl"]:
            del sys.modules[name]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A working directory of its own, on the path, as modules beside a configuration are."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [m for m in sys.modules if m.partition(".")[0] == "verl"]:
        del sys.modules[name]


def files(folder, **contents):
    for path, content in contents.items():
        file = folder / path.replace("__in__", "/").replace("__dot__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


INIT = "verl__in____init____dot__py"
LAYOUTS = {
    "an empty folder": {"verl__in__README__dot__md": ""},
    "a clone": {
        f"verl__in__{INIT}": "",
        "verl__in__verl__in__tools__in__base_tool__dot__py": "import not_there",
    },
    "a package that needs what is missing": {INIT: "import not_there"},
    "a package of another kind": {
        INIT: "x = 1",
        "verl__in__tools__dot__py": "raise RuntimeError('not for you')",
    },
}


@needs_no_verl
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_interface_is_there_whatever_is_called_verl(write, alone, layout):
    files(alone, **LAYOUTS[layout])
    async with open_tools(write()) as tools, session(tools.select()) as opened:
        assert (await opened.call("grade", {"answer": "3"})).observation == "score=1.0"
    assert not [name for name in sys.modules if name.startswith("verl")], (
        "nothing of it stays imported"
    )


OWN = """
from verl.utils.score import score

from .base_tool import BaseTool
from .schemas import ToolResponse

class Own(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=score(parameters["answer"])), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return ["what", "it", "found"]
"""


@needs_no_verl
async def test_verls_own_classes_run_from_its_files_without_all_that_verl_needs(write, alone):
    files(
        alone,
        **{
            INIT: "import not_there",
            "verl__in__tools__in____init____dot__py": "",
            "verl__in__tools__in__own_tool__dot__py": OWN,
            "verl__in__utils__in____init____dot__py": "import not_there",
            "verl__in__utils__in__score__dot__py": (
                "def score(answer):\n    return f'scored {answer}'\n"
            ),
        },
    )
    async with open_tools(write(class_name="verl.tools.own_tool.Own")) as tools:
        async with session(tools.select()) as opened:
            assert (await opened.call("grade", {"answer": "3"})).observation == "scored 3"
            assert await opened.calc_rewards() == {}, "what is no number is no reward"


@needs_no_verl
@pytest.mark.parametrize(
    ("layout", "class_name", "named"),
    [
        ({}, "verl.tools.gsm8k_tool.Gsm8kTool", ["pip install --no-deps verl==0.7.1"]),
        (
            {f"verl__in__{INIT}": ""},
            "verl.tools.gsm8k_tool.Gsm8kTool",
            ["verl is not installed", "PYTHONPATH=verl"],
        ),
        (
            {INIT: "import not_there"},
            "verl.tools.gsm8k_tool.Gsm8kTool",
            ["cwd/verl", "No module named 'not_there'"],
        ),
        (
            {INIT: "", "verl__in__tools__in__own_tool__dot__py": "import ray_or_so"},
            "verl.tools.own_tool.Own",
            ["it imports 'ray_or_so', which is not installed"],
        ),
    ],
)
async def test_a_failed_import_names_key_cause_and_package(write, alone, layout, class_name, named):
    files(alone, **layout)
    with pytest.raises(ConfigError) as refused:
        async with open_tools(write(class_name=class_name)):
            pass
    message = str(refused.value)
    assert "tools.yaml (tools[0]).class_name" in message
    assert all(words in message for words in named)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            GRADER.replace("parameters: dict[str, Any], **kwargs", "parameters, agent_data"),
            "requires agent_data",
        ),
        (GRADER.replace("class Grader(BaseTool)", "class Grader"), "not a subclass"),
        (
            GRADER.replace('config["penalty"]', "penalty").replace(
                "_states = {}", "x = config['no']"
            ),
            "KeyError",
        ),
    ],
)
async def test_a_class_that_cannot_run_is_refused_with_its_place(write, code, message):
    code = code.replace("async def release", "def release") if message == "not a subclass" else code
    with raises(ToolDefinitionError, key="tools.yaml (tools[0])", value=message):
        async with open_tools(write(code)):
            pass


async def test_a_class_without_a_schema_is_refused(write):
    with raises(ToolDefinitionError, key="Grader", fix="tool_schema"):
        async with open_tools(write(tool_schema=None)):
            pass


def test_a_response_takes_its_text_by_position():
    assert ToolResponse("text") == ToolResponse(text="text")
    assert ToolResponse("text").text == "text"
    with pytest.raises(TypeError):
        ToolResponse("text", ("image",))  # type: ignore[misc]
