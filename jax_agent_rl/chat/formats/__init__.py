"""Tool-call formats by name (``agent.tool_format``), and which one a chat template speaks.

``types`` what a format is · ``scan`` the walk all share · ``literals`` values without evaluation · one module for each
way of writing: ``hermes``, ``bare_json``, ``tagged``, ``sections``, ``pythonic``, ``gemma``, ``harmony``, ``text_tag``.
"""

from __future__ import annotations

from jax_agent_rl.chat.formats import bare_json, gemma, harmony, hermes, pythonic, sections, tagged, text_tag
from jax_agent_rl.chat.formats.types import Reply, ToolCall, ToolFormat
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
    gemma.GEMMA,
    gemma.GEMMA4,
    harmony.FORMAT,
    hermes.FORMAT,
    bare_json.FORMAT,
    pythonic.FORMAT,
    text_tag.FORMAT,
)
FORMATS: dict[str, ToolFormat] = {form.name: form for form in _ORDERED}

__all__ = ["FORMATS", "Reply", "ToolCall", "ToolFormat", "detect_format", "get_format"]


def get_format(name: str) -> ToolFormat:
    """The format called ``name``.

    Raises:
        ConfigError: unknown name.
    """
    if name not in FORMATS:
        raise ConfigError(f"agent.tool_format={name!r} is unknown; there are {sorted(FORMATS)}")
    return FORMATS[name]


def detect_format(template: str) -> ToolFormat:
    """The format a chat template (its source) tells its model to write.

    A template that knows no tools is told of them by us, in hermes.

    Raises:
        ConfigError: it has tools, in no format known here.
    """
    for form in _ORDERED:
        if form.is_of(template):
            return form
    if "tools" not in template:
        return FORMATS["hermes"]
    raise ConfigError(
        "agent.tool_format='auto': the model's chat template writes tool calls in a format that is not recognised; "
        f"set agent.tool_format to one of {sorted(FORMATS)}"
    )
