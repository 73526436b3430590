"""Tool-call formats by name, and the one that a chat template uses."""

from __future__ import annotations

from jax_agent_rl.chat.formats import json_calls, literal_calls, sections, tagged
from jax_agent_rl.chat.formats.base import ToolFormat
from jax_agent_rl.errors import ConfigError

_ORDERED = (
    tagged.QWEN3_CODER,  # before hermes and glm, whose outer tag it shares
    tagged.GLM,
    tagged.SEED,
    tagged.MINIMAX,
    sections.KIMI,
    sections.DEEPSEEK_V3,  # before V3.1, whose tokens it shares
    sections.DEEPSEEK_V31,
    sections.MISTRAL,
    literal_calls.GEMMA,
    literal_calls.GEMMA4,
    literal_calls.OLMO3,
    sections.HARMONY,
    json_calls.HERMES,
    json_calls.LLAMA3,
    literal_calls.PYTHONIC,
    json_calls.TEXT_TAG,
)
FORMATS: dict[str, ToolFormat] = {form.name: form for form in _ORDERED}


def get_format(name: str) -> ToolFormat:
    """Return the format called ``name``.

    Raises:
        ConfigError: unknown name.
    """
    if name not in FORMATS:
        raise ConfigError(f"agent.tool_format={name!r} is unknown; there are {sorted(FORMATS)}")
    return FORMATS[name]


def detect_format(template: str) -> ToolFormat:
    """Return the format that a chat template, given as source, makes its model write.

    For a template without tools it is hermes.

    Raises:
        ConfigError: the template has tools in an unknown format.
    """
    for form in _ORDERED:
        if form.matches(template):
            return form
    if "tools" not in template:
        return FORMATS["hermes"]
    raise ConfigError(
        "agent.tool_format='auto': the model's chat template writes tool calls in a format that is"
        f" not recognised; set agent.tool_format to one of {sorted(FORMATS)}"
    )
