"""Requests of OpenAI's chat and text completion APIs, as far as the engines can honour them.

One rule for all APIs (:class:`ApiRequest`): a parameter that is null was not given; one that is
known to change the answer and cannot be honoured is refused by name; any other that is not known is
ignored, with one warning, as clients send new ones with every release. Reference: the API reference
of ``/v1/chat/completions`` and ``/v1/completions``; ``top_k``, ``min_p``, ``return_token_ids``,
``chat_template_kwargs``, ``continue_final_message`` and ``add_generation_prompt`` are vLLM's
extensions. Structured output is the grammar of a turn::

    tool_choice       required, or a function's name   ─► a call of any tool, or of that one
    response_format   json_object, json_schema         ─► an answer in JSON; with tools, or a call
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.grammar_limits import GrammarBusyError, GrammarError
from jax_agent_rl.chat.template import check_template_kwargs
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.types.token_ids import ID_BOUND

Prompt = str | list[int]
# Lists of clients are read up to what is wrong first: a problem is an object for each wrong value.
_Ids = Annotated[list[int], Field(fail_fast=True)]
_ListOfIds = Annotated[list[_Ids], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ApiError(Exception):
    """An answer that is an error; each API has a shape for it.

    Clients repeat what failed with 408, 409, 429 or 5xx unless ``x-should-retry`` says no: a
    repeated request is only wanted where it could go better.

    Attributes:
        code: what a program can tell the error by, in OpenAI's words.
        param: the parameter that is wrong.
        retry: whether the same request could succeed later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry = retry


logger = logging.getLogger(__name__)

REFUSED = "refused"
"""Type of the validation error of a parameter that cannot be honoured."""
_NEUTRAL = (False, "", [])
"""Values with which a refused parameter asks for nothing; 0 is equal to False."""
_MAX_WARNINGS = 100
_warned: set[tuple[str, str]] = set()
"""Parameters, by the kind of request, that were warned of; bounded, as clients choose the names."""


class ApiRequest(BaseModel):
    """A request of any API, or an object in one.

    The module docstring says what happens to its parameters.
    """

    model_config = ConfigDict(extra="ignore")

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Parameters that leave the answer as it is here: bookkeeping, speed, caches, and wishes that
    nothing can force."""
    REFUSED: ClassVar[dict[str, str]] = {}
    """Parameters that would change the answer and cannot be honoured, each with what to do instead.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_parameters(cls, fields: Any) -> Any:
        """Return the parameters that are not null; refuse some, and warn of unknown ones."""
        if not isinstance(fields, Mapping):
            return fields
        parameters = {name: value for name, value in fields.items() if value is not None}

        for name, instead in cls.REFUSED.items():
            if name in parameters and parameters[name] not in _NEUTRAL:
                raise PydanticCustomError(
                    REFUSED,
                    "{name} is not supported; {instead}",
                    {"name": name, "instead": instead},
                )

        known = cls.model_fields.keys() | cls.WITHOUT_EFFECT | cls.REFUSED.keys()
        for name in parameters.keys() - known:
            _warn_of_unknown(cls.__name__, str(name))
        return parameters


def _warn_of_unknown(kind: str, name: str) -> None:
    if (kind, name) in _warned or len(_warned) >= _MAX_WARNINGS:
        return
    _warned.add((kind, name))
    logger.warning(
        "a client sends the parameter %.80r of %s, which is not known here and ignored", name, kind
    )


class _StreamOptions(ApiRequest):
    WITHOUT_EFFECT = frozenset({"include_obfuscation"})

    include_usage: bool = False


class _Sampled(ApiRequest):
    """The fields both kinds of request share; unsupported ones may only be neutral."""

    WITHOUT_EFFECT = frozenset(
        {
            "metadata",
            "moderation",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "session_id",  # Harbor's; the path or the header X-Session-Id names a session here
            "store",
            "user",
        }
    )
    REFUSED = {
        "allowed_token_ids": "log-probs would not be those of the policy",
        "bad_words": "log-probs would not be those of the policy",
        "guided_choice": "use response_format",
        "guided_grammar": "use response_format",
        "guided_json": "use response_format",
        "guided_regex": "use response_format",
        "ignore_eos": "the policy ends its turns itself",
        "logits_processors": "log-probs would not be those of the policy",
        "min_tokens": "the policy ends its turns itself",
        "prompt_logprobs": "log-probs are those of the sampled tokens alone",
        "structured_outputs": "use response_format",
        "truncate_prompt_tokens": "shorten the conversation in the client",
        "use_beam_search": "turns are sampled",
    }

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=ID_BOUND)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | Texts | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    repetition_penalty: Literal[1] | None = None

    @field_validator("frequency_penalty", "presence_penalty", "logit_bias")
    @classmethod
    def _neutral(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported: log-probs would not be those of the policy")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("must not contain an empty string")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether the end of a stream reports usage; a whole answer always does."""
        return bool(self.stream_options and self.stream_options.include_usage)


class _NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"]
    function: _NamedFunction


class ChatRequest(_Sampled):
    """``POST /v1/chat/completions``.

    Effort and verbosity have no effect: ``max_tokens`` bounds reasoning and text.
    """

    WITHOUT_EFFECT = _Sampled.WITHOUT_EFFECT | {"prediction", "reasoning_effort", "verbosity"}
    REFUSED = _Sampled.REFUSED | {
        "audio": "answers are text; leave it out",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "web_search_options": "give the model a tool that searches",
    }

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    tools: Objects | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if value is None else check_template_kwargs(value)

    @field_validator("add_generation_prompt")
    @classmethod
    def _generation_prompt(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value is not None and value == bool(info.data.get("continue_final_message")):
            raise ValueError("is the opposite of continue_final_message; leave it out")
        return value

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in value or ():
            function = tool.get("function")
            if (
                tool.get("type") != "function"
                or not isinstance(function, dict)
                or not function.get("name")
            ):
                raise ValueError(
                    f'needs {{"type": "function", "function": {{"name": …}}}}, got {tool!r:.120}'
                )
        return value

    @field_validator("tool_choice")
    @classmethod
    def _known_tool(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool["function"]["name"] for tool in info.data.get("tools") or ()]
        if value == "required" and not names:
            raise ValueError("a call is required, but there are no tools")
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise ValueError(f"there is no tool {value.function.name!r}; there are {names}")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _no_alternatives(cls, value: int | None) -> int | None:
        if value:
            raise ValueError(
                "is not supported: log-probs are those of the sampled tokens alone; leave it out"
            )
        return value

    @field_validator("response_format")
    @classmethod
    def _format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        match value:
            case (
                None
                | {"type": "text" | "json_object"}
                | {"type": "json_schema", "json_schema": {"schema": dict()}}
            ):
                return value
            case {"type": "json_schema"}:
                raise ValueError(
                    'needs {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
                )
        raise ValueError(f"type {value.get('type')!r} is none of text, json_object and json_schema")

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The schema of an answer; None if it may be any text."""
        match self.response_format:
            case {"type": "json_object"}:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return schema
        return None

    @property
    def limit(self) -> int | None:
        """Maximum ids of the turn: the smaller one of the API's old and new names for it."""
        if self.max_tokens is None:
            return self.max_completion_tokens
        if self.max_completion_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, self.max_completion_tokens)

    @property
    def forces_call(self) -> bool:
        """Whether the turn has to call a tool."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools that the prompt describes."""
        if self.tools is None or self.tool_choice == "none":
            return []
        return self.tools


class CompletionRequest(_Sampled):
    """``POST /v1/completions``: text or ids, one prompt or several."""

    prompt: Annotated[str | _Ids | Texts | _ListOfIds, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Literal[0, 1] | bool | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def limit(self) -> int:
        return self.max_tokens

    @property
    def prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]


def read_chat(fields: dict[str, Any]) -> ChatRequest:
    """Return a request of another API, translated to these fields.

    Raises:
        ValidationError: a field's value is not supported.
    """
    return ChatRequest.model_validate(fields)


def nested_schema(answer_format: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return another API's format of the answer as ``response_format``.

    There a schema is in an object of its own.
    """
    if answer_format.get("type") != "json_schema":
        return answer_format
    schema = dict(answer_format)
    del schema["type"]
    return {"type": "json_schema", "json_schema": schema}


def check_prompt(model_request: ChatRequest | CompletionRequest, context: AgentContext) -> None:
    """Refuse a prompt that cannot fit, before it is tokenized.

    This is possible because an id stands for a bounded number of characters.

    Raises:
        ApiError: the prompt is too long, empty, or has ids that the tokenizer does not know.
    """
    max_ids = context.longest
    max_characters = max_ids * context.codec.longest_token
    if isinstance(model_request, ChatRequest):
        characters = sum(_characters(message) for message in model_request.messages)
        images = sum(_images(message) for message in model_request.messages)
        min_ids = len(model_request.messages) + images  # each takes at least one
        if min_ids > max_ids or characters > max_characters:
            raise _too_long("messages", context)
        return

    for prompt in model_request.prompts:
        if not prompt:
            raise ApiError(400, "prompt is empty", param="prompt")
        if isinstance(prompt, str):
            if len(prompt) > max_characters:
                raise _too_long("prompt", context)
            continue

        if len(prompt) > max_ids:
            raise _too_long("prompt", context)
        vocab_size = context.codec.vocab_size
        for token_id in prompt:
            if not 0 <= token_id < vocab_size:
                message = (
                    f"prompt has the id {token_id}; those of this model are 0 to {vocab_size - 1}"
                )
                raise ApiError(400, message, param="prompt")


def check_sampling(sampling: SamplingParams, engines: Iterable[Capabilities]) -> None:
    """Refuse sampling that one of the engines cannot do.

    Raises:
        ApiError: it cannot.
    """
    for capabilities in engines:
        if not capabilities.any_sampling:
            supported = {
                "temperature": sampling.temperature in (0, 1),
                "top_p": sampling.top_p == 1,
                "top_k": not sampling.top_k,
                "min_p": not sampling.min_p,
            }
            for param, is_supported in supported.items():
                if not is_supported:
                    value = getattr(sampling, param)
                    message = f"{param}={value} is not supported by this engine; leave it out"
                    raise ApiError(400, message, param=param)
        if sampling.stop and not capabilities.stop_strings:
            raise ApiError(400, "stop is not supported by this engine; leave it out", param="stop")


def check_structure(
    model_request: ChatRequest | CompletionRequest, engines: Iterable[Capabilities]
) -> bool:
    """Return whether a request demands structured output.

    Raises:
        ApiError: it does, and one of the engines cannot follow a grammar.
    """
    param = _structure_param(model_request)
    if param is not None and not all(able.grammars for able in engines):
        raise ApiError(
            400, f"{param}: this engine cannot follow a grammar; ask for it in words", param=param
        )
    return param is not None


def _structure_param(model_request: ChatRequest | CompletionRequest) -> str | None:
    """Return the parameter that demands a structure, if any."""
    if not isinstance(model_request, ChatRequest):
        return None
    if model_request.forces_call:
        return "tool_choice"
    if model_request.answer_schema is not None:
        return "response_format"
    return None


def grammar_of(model_request: ChatRequest | CompletionRequest, codec: ChatCodec) -> str | None:
    """Return the grammar that a request demands of its turn, if any.

    Raises:
        ApiError: there is none for the format, a schema cannot be followed, parameters contradict
            each other, or too many grammars are being compiled.
    """
    if not isinstance(model_request, ChatRequest):
        return None
    if (
        model_request.parallel_tool_calls is False
        and model_request.prompt_tools
        and not model_request.forces_call
    ):
        message = (
            "one call at a time is supported with a tool_choice that forces a call only;"
            " leave it out"
        )
        raise ApiError(400, message, param="parallel_tool_calls")
    param = _structure_param(model_request)
    if param is None:
        return None

    tools = model_request.prompt_tools
    several_calls = model_request.parallel_tool_calls is not False
    if isinstance(model_request.tool_choice, NamedTool):
        name = model_request.tool_choice.function.name
        tools = [tool for tool in tools if tool["function"]["name"] == name][:1]
        several_calls = False
    answer_schema = None if model_request.forces_call else model_request.answer_schema
    try:
        return codec.turn_grammar(tools=tools, several=several_calls, answer=answer_schema)
    except GrammarBusyError as error:
        raise ApiError(429, f"{param}: {error}", code="busy", param=param, retry=True) from None
    except GrammarError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def _characters(message: Mapping[str, Any]) -> int:
    """Return the length of a message's text; other content is refused later."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    characters = 0
    for part in _parts(message):
        text = part.get("text")
        if isinstance(text, str):
            characters += len(text)
    return characters


def _images(message: Mapping[str, Any]) -> int:
    return sum(part.get("type") == "image_url" for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, Mapping)]


def _too_long(param: str, context: AgentContext) -> ApiError:
    message = (
        f"{param} cannot fit into a context of {context.longest} ids; shorten the conversation"
    )
    return ApiError(400, message, code="context_length_exceeded", param=param)
