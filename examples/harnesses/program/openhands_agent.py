"""An agent of OpenHands' SDK: its editor, and a tool that runs commands without a terminal.

The SDK's own terminal tool needs a pseudo-terminal, which the sandbox has none of.

With the argument ``small``, for models of small contexts, the agent has a prompt of one line, and
of the SDK's tools the one that ends the task.
"""

import os
import subprocess
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool
from openhands.tools.file_editor import FileEditorTool


class RunAction(Action):
    """A command of the shell."""

    command: str


class RunObservation(Observation):
    """What the command printed; the text is the observation's content."""


class Run(ToolExecutor[RunAction, RunObservation]):
    """Runs each command in a shell of its own."""

    def __call__(self, action: RunAction, conversation=None) -> RunObservation:
        result = subprocess.run(
            ["sh", "-c", action.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return RunObservation.from_text(f"{result.stdout}[exit status {result.returncode}]")


class RunTool(ToolDefinition[RunAction, RunObservation]):
    """The tool ``run``."""

    @classmethod
    def create(cls, conv_state):
        description = "Runs a command of the shell in the working folder."
        tool = cls(
            description=description,
            action_type=RunAction,
            observation_type=RunObservation,
            executor=Run(),
        )
        return [tool]


register_tool(RunTool.name, RunTool)
llm = LLM(
    model="openai/policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
tools = [Tool(name=RunTool.name), Tool(name=FileEditorTool.name)]
settings = {}
if sys.argv[1:] == ["small"]:
    tools = [Tool(name=RunTool.name)]
    settings = {
        "system_prompt": "Work in the current folder. Call one tool at a time.",
        "include_default_tools": ["FinishTool"],
    }
agent = Agent(llm=llm, tools=tools, **settings)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(os.environ["TASK_INSTRUCTION"])
conversation.run()
