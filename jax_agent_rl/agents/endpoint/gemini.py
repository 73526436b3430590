"""Google's Gemini API: its requests as chat requests, its answers, stream events and errors.

::

    systemInstruction, contents[parts], tools, generationConfig ─► ChatRequest ─► generation
    candidates[content, finishReason], usageMetadata            ◄─ GeminiAnswer

``functionResponse`` parts become tool messages before the other parts of their content, ``thought``
parts reasoning. Contents of the model in a row are one turn, as clients keep the pieces of a stream
apart. A last content of the model is continued. Names may be written as ``topP`` or ``top_p``, as
in all JSON of Google's. Reference: the API reference of ``models.generateContent``, versions v1 and
v1beta.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from jax_agent_rl.agents.endpoint.answers import (
    ApiAnswer,
    ApiCall,
    ApiCount,
    reasoning_tokens,
    token_texts,
)
from jax_agent_rl.agents.endpoint.requests import (
    ApiError,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    Texts,
    read_chat,
)
from jax_agent_rl.agents.endpoint.sessions import Piece
from jax_agent_rl.agents.session_tree import RecordedTurn
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.reply import ReplyPart, ToolCall
from jax_agent_rl.tools.schema import function_tool
from jax_agent_rl.types.token_ids import ID_BOUND

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_NOT_THE_POLICYS = "log-probs would not be those of the policy"
_TEXT_ALONE = "answers are text; leave it out"
_NO_FILE = "send text and images in the request, images as inlineData"
_NOT_OF_IMAGES = {
    "audio_metadata": _NO_FILE,
    "document_metadata": _NO_FILE,
    "file_data": _NO_FILE,
    "media_processing": _NO_FILE,
    "media_resolution": "model.max_pixels limits an image's size",
    "spreadsheet_metadata": _NO_FILE,
    "video_metadata": _NO_FILE,
}
"""What a part may have besides an image or a text."""


class _GoogleObject(ApiRequest):
    """An object of a request, with names in either spelling."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        names = _snake_names(cls)
        return {names.get(name, name): value for name, value in fields.items()}


@functools.cache
def _snake_names(cls: type[_GoogleObject]) -> dict[str, str]:
    """Return the names of a class's parameters by their other spelling."""
    known = cls.model_fields.keys() | cls.WITHOUT_EFFECT | cls.REFUSED.keys()
    return {to_camel(name): name for name in known}


# --- contents -------------------------------------------------------------------------------------


class GeminiBlob(_GoogleObject):
    """Bytes in the request: an image."""

    WITHOUT_EFFECT = frozenset({"display_name"})

    mime_type: str
    data: str

    @property
    def chat_part(self) -> dict[str, Any]:
        """The image as a part of a chat message, which refuses what is not an image."""
        # Google's clients write base64 in either alphabet.
        data = self.data.replace("-", "+").replace("_", "/")
        url = f"data:{self.mime_type};base64,{data}"
        return {"type": "image_url", "image_url": {"url": url}}


class GeminiFunctionCall(_GoogleObject):
    """A call that the model made."""

    REFUSED = {
        "partial_args": "send the whole call",
        "will_continue": "send the whole call",
    }

    id: str = ""
    name: str
    args: dict[str, Any] = Field(default_factory=dict)


class GeminiFunctionResponsePart(_GoogleObject):
    """An image that a function returned."""

    REFUSED = _NOT_OF_IMAGES

    inline_data: GeminiBlob


class GeminiFunctionResponse(_GoogleObject):
    """What a function returned."""

    REFUSED = {
        "scheduling": "send all results with the next request",
        "will_continue": "send the whole result",
    }

    id: str = ""
    name: str
    response: dict[str, Any] = Field(default_factory=dict)
    parts: Annotated[list[GeminiFunctionResponsePart], Field(fail_fast=True)] = Field(
        default_factory=list
    )

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The result as a chat message's content.

        Text under ``output`` or ``error`` alone is shown as it is, anything else as JSON.
        """
        value: Any = self.response
        if len(value) == 1:
            (key,) = value
            if key in ("output", "error"):
                value = value[key]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not self.parts:
            return text
        images = [part.inline_data.chat_part for part in self.parts]
        return [*images, {"type": "text", "text": text}]


class GeminiPart(_GoogleObject):
    """A part of a content: text, a thought, an image, a call or its result."""

    WITHOUT_EFFECT = frozenset({"part_metadata", "speech_metadata", "thought_signature"})
    REFUSED = _NOT_OF_IMAGES | {
        "audio_transcription": _NO_FILE,
        "code_execution_result": "give the model a function that runs code",
        "executable_code": "give the model a function that runs code",
        "tool_call": "call tools in the client, and send functionCall",
        "tool_response": "call tools in the client, and send functionResponse",
    }

    text: str | None = None
    thought: bool = False
    inline_data: GeminiBlob | None = None
    function_call: GeminiFunctionCall | None = None
    function_response: GeminiFunctionResponse | None = None

    @model_validator(mode="after")
    def _has_one_content(self) -> GeminiPart:
        contents = (self.text, self.inline_data, self.function_call, self.function_response)
        if sum(content is not None for content in contents) != 1:
            raise ValueError("needs one of text, inlineData, functionCall and functionResponse")
        return self

    @property
    def chat_part(self) -> dict[str, Any]:
        """Text or an image as a part of a chat message."""
        if self.inline_data is not None:
            return self.inline_data.chat_part
        return {"type": "text", "text": self.text}


class GeminiContent(_GoogleObject):
    """What somebody said: a turn, or a part of one."""

    role: Literal["user", "model", "function"] = "user"
    parts: Annotated[list[GeminiPart], Field(fail_fast=True)] = Field(default_factory=list)


# --- tools ----------------------------------------------------------------------------------------

_OWN_FUNCTION = "give the model a function of your own"


class GeminiFunctionDeclaration(_GoogleObject):
    """A function that the model may call."""

    WITHOUT_EFFECT = frozenset({"response", "response_json_schema"})

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    behavior: Literal["BLOCKING", "UNSPECIFIED"] | None = None

    @property
    def chat_tool(self) -> dict[str, Any]:
        """The function as a tool of a chat request."""
        schema = self.parameters_json_schema
        if schema is None and self.parameters is not None:
            schema = json_schema(self.parameters)
        if not schema:
            schema = {"type": "object", "properties": {}}
        return function_tool(self.name, self.description, schema)


class GeminiTool(_GoogleObject):
    """Functions; tools that Google's servers run are refused."""

    REFUSED = {
        "code_execution": _OWN_FUNCTION,
        "computer_use": _OWN_FUNCTION,
        "enterprise_web_search": _OWN_FUNCTION,
        "exa_ai_search": _OWN_FUNCTION,
        "file_search": _OWN_FUNCTION,
        "google_maps": _OWN_FUNCTION,
        "google_search": _OWN_FUNCTION,
        "google_search_retrieval": _OWN_FUNCTION,
        "mcp_servers": "call them in the client, and pass their tools as functions",
        "parallel_ai_search": _OWN_FUNCTION,
        "retrieval": _OWN_FUNCTION,
        "url_context": _OWN_FUNCTION,
    }

    function_declarations: Annotated[list[GeminiFunctionDeclaration], Field(fail_fast=True)] = (
        Field(default_factory=list)
    )


class GeminiFunctionCallingConfig(_GoogleObject):
    """Which functions the turn may or must call."""

    WITHOUT_EFFECT = frozenset({"stream_function_call_arguments"})

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE"] = "AUTO"
    allowed_function_names: Texts = Field(default_factory=list)

    def tool_choice(self, names: Sequence[str]) -> Any:
        """Return a chat request's ``tool_choice``; ``names`` are the names of all functions.

        Raises:
            ApiError: it allows several functions, but not all.
        """
        if self.mode == "NONE":
            return "none"
        if self.mode != "ANY":
            return "auto"

        allowed = set(self.allowed_function_names)
        if len(allowed) == 1:
            (name,) = allowed
            return {"type": "function", "function": {"name": name}}

        if allowed and allowed != set(names):
            raise ApiError(
                400,
                "allowedFunctionNames: a call of any function or of a certain one can be demanded,"
                " not of several; leave the others out of tools",
                param="toolConfig",
            )
        return "required"


class GeminiToolConfig(_GoogleObject):
    """How tools are used."""

    WITHOUT_EFFECT = frozenset({"include_server_side_tool_invocations", "retrieval_config"})

    function_calling_config: GeminiFunctionCallingConfig = Field(
        default_factory=GeminiFunctionCallingConfig
    )


_NUMBERS_OF = frozenset(
    {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)
_MAX_DIGITS = 18


def json_schema(schema: Any) -> Any:
    """Return a schema of Google's as JSON Schema.

    Google's has types in capitals, ``nullable``, numbers that are text, and says in
    ``propertyOrdering`` what JSON Schema says by order.
    """
    if not isinstance(schema, Mapping):
        return schema

    converted: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("nullable", "propertyOrdering"):
            continue
        if key == "type" and isinstance(value, str):
            value = value.lower()
        elif key == "properties" and isinstance(value, Mapping):
            value = _ordered_properties(value, schema.get("propertyOrdering"))
        elif key in ("additionalProperties", "items"):
            value = json_schema(value)
        elif key == "anyOf" and isinstance(value, list):
            value = [json_schema(option) for option in value]
        elif key in _NUMBERS_OF and isinstance(value, str):
            if value.isdecimal() and len(value) <= _MAX_DIGITS:
                value = int(value)

        converted[key] = value

    if schema.get("nullable") is True:
        _allow_null(converted)
    return converted


def _allow_null(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]


def _ordered_properties(properties: Mapping[str, Any], ordering: Any) -> dict[str, Any]:
    names: list[str] = []
    if isinstance(ordering, list):
        names = [name for name in ordering if isinstance(name, str) and name in properties]
    ordered = {name: json_schema(properties[name]) for name in names}
    for name, schema in properties.items():
        if name not in ordered:
            ordered[name] = json_schema(schema)
    return ordered


# --- requests -------------------------------------------------------------------------------------


class GeminiThinkingConfig(_GoogleObject):
    """Whether the answer shows the model's reasoning; ``maxOutputTokens`` bounds it."""

    WITHOUT_EFFECT = frozenset({"thinking_budget", "thinking_level"})

    include_thoughts: bool = False


class GeminiGenerationConfig(_GoogleObject):
    """How to sample, and the form of the answer."""

    WITHOUT_EFFECT = frozenset({"enable_enhanced_civic_answers"})
    REFUSED = {
        "audio_timestamp": _TEXT_ALONE,
        "audio_transcription_config": _TEXT_ALONE,
        "frequency_penalty": _NOT_THE_POLICYS,
        "image_config": _TEXT_ALONE,
        "logprobs": "log-probs are those of the sampled tokens alone; use responseLogprobs",
        "media_resolution": "model.max_pixels limits an image's size",
        "model_selection_config": "name the model",
        "presence_penalty": _NOT_THE_POLICYS,
        "routing_config": "name the model",
        "speech_config": _TEXT_ALONE,
    }

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=ID_BOUND)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    candidate_count: Annotated[int, Field(ge=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Texts | None = None
    response_logprobs: bool = False
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[Literal["TEXT", "text"]] | None = None
    thinking_config: GeminiThinkingConfig = Field(default_factory=GeminiThinkingConfig)

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The form of the answer, as a chat request has it."""
        schema = self.response_json_schema
        if schema is None and self.response_schema is not None:
            schema = json_schema(self.response_schema)
        if schema is not None:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        if self.response_mime_type == "application/json":
            return {"type": "json_object"}
        return None


class GeminiRequest(_GoogleObject):
    """``POST /v1beta/models/MODEL:generateContent`` and ``:streamGenerateContent``."""

    WITHOUT_EFFECT = frozenset({"labels", "model", "safety_settings", "service_tier", "store"})
    REFUSED = {
        "cached_content": "send the conversation as contents",
        "continuation_token": "send the conversation as contents",
        "generation_output_config": "the answer is in the response alone; leave it out",
        "model_armor_config": "leave it out",
    }

    contents: Annotated[list[GeminiContent], Field(min_length=1, fail_fast=True)]
    system_instruction: GeminiContent | None = None
    tools: Annotated[list[GeminiTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_config: GeminiToolConfig = Field(default_factory=GeminiToolConfig)
    generation_config: GeminiGenerationConfig = Field(default_factory=GeminiGenerationConfig)
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_request(self, model: str, *, stream: bool = False) -> ChatRequest:
        """Return the equivalent chat request.

        Raises:
            ApiError, ValidationError: it demands what cannot be honoured.
        """
        messages: list[dict[str, Any]] = []
        if self.system_instruction is not None:
            messages.append({"role": "system", "content": _text(self.system_instruction)})
        messages += _chat_messages(self.contents)

        functions = []
        for tool in self.tools:
            functions += tool.function_declarations
        config = self.generation_config
        fields: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "continue_final_message": self.contents[-1].role == "model",
            "stream": stream,
            "n": config.candidate_count,
            "max_tokens": config.max_output_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "seed": config.seed,
            "stop": config.stop_sequences,
            "logprobs": config.response_logprobs,
            "response_format": config.response_format,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if functions:
            names = [function.name for function in functions]
            fields["tools"] = [function.chat_tool for function in functions]
            fields["tool_choice"] = self.tool_config.function_calling_config.tool_choice(names)
        return read_chat(fields)


class GeminiCountRequest(_GoogleObject):
    """``POST /v1beta/models/MODEL:countTokens``: contents, or a whole request."""

    WITHOUT_EFFECT = GeminiRequest.WITHOUT_EFFECT
    REFUSED = GeminiRequest.REFUSED

    generate_content_request: GeminiRequest

    @model_validator(mode="before")
    @classmethod
    def _contents_alone(cls, fields: Any) -> Any:
        """Return contents, and what may stand beside them, as a whole request."""
        if not isinstance(fields, Mapping):
            return fields
        if fields.keys().isdisjoint({"generateContentRequest", "generate_content_request"}):
            return {"generate_content_request": dict(fields)}
        return fields


def _text(instruction: GeminiContent) -> str:
    texts: list[str] = []
    for part in instruction.parts:
        if part.text is None:
            raise ApiError(
                400, "systemInstruction: a part of it is not text", param="systemInstruction"
            )
        texts.append(part.text)
    return "\n".join(texts)


def _chat_messages(contents: Sequence[GeminiContent]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    unanswered: list[GeminiFunctionCall] = []  # calls of the last turn
    previous_role = ""
    for content in contents:
        if content.role == "model":
            if previous_role != "model":
                unanswered = []
                messages.append({"role": "assistant", "content": []})
            _add_to_turn(messages[-1], content)
            unanswered += [part.function_call for part in content.parts if part.function_call]
        else:
            messages += _user_messages(content, unanswered)
        previous_role = content.role
    return messages


def _add_to_turn(message: dict[str, Any], content: GeminiContent) -> None:
    """Add a content of the model to the message of its turn."""
    for part in content.parts:
        if part.function_call is not None:
            call = part.function_call
            function = {"name": call.name, "arguments": call.args}
            encoded = {"id": call.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(encoded)
        elif part.thought and part.text is not None:
            message["reasoning"] = message.get("reasoning", "") + part.text
        elif part.function_response is not None:
            raise ApiError(
                400, "contents: a functionResponse belongs to the role 'user'", param="contents"
            )
        else:
            message["content"].append(part.chat_part)


def _user_messages(
    content: GeminiContent, unanswered: list[GeminiFunctionCall]
) -> Iterator[dict[str, Any]]:
    """Yield the messages of a content that the model did not write.

    Args:
        unanswered: calls of the turn before; those that it answers are removed.
    """
    user_parts = []
    for part in content.parts:
        result = part.function_response
        if part.function_call is not None:
            raise ApiError(
                400, "contents: a functionCall belongs to the role 'model'", param="contents"
            )
        if result is None:
            user_parts.append(part.chat_part)
            continue

        # Google's clients need not send ids: results of a function are in the order of its calls.
        call_id = result.id
        for call in unanswered:
            if call.name == result.name and result.id in ("", call.id):
                call_id = call.id
                unanswered.remove(call)
                break
        message = {"role": "tool", "name": result.name, "content": result.content}
        if call_id:
            message["tool_call_id"] = call_id
        yield message
    if user_parts:
        yield {"role": "user", "content": user_parts}


# --- answers --------------------------------------------------------------------------------------


class GeminiCount(ApiCount):
    """The answer to a request that counts."""

    def __init__(self, call: ApiCall) -> None:
        request = GeminiCountRequest.model_validate(call.body).generate_content_request
        self.model_request = request.chat_request(call.model)

    def answer(self, count: int) -> dict[str, Any]:
        return {"totalTokens": count}


class GeminiAnswer(ApiAnswer):
    """The answer to one request.

    Attributes:
        model_request: the equivalent chat request.

    Raises:
        ApiError, ValidationError: a field is missing, wrong or not supported.
    """

    ping = ""  # Google's clients take any line for data
    is_stream = False

    def __init__(self, call: ApiCall) -> None:
        request = GeminiRequest.model_validate(call.body)
        self.model_request: ChatRequest | CompletionRequest = request.chat_request(
            call.model, stream=self.is_stream
        )
        self._config = request.generation_config
        self._head = {"modelVersion": call.model, "responseId": uuid.uuid4().hex}
        # Parts by candidate that are sent with the next ones, or with the candidate's end: clients
        # drop a turn whose last piece has no content.
        self._held: dict[int, list[dict[str, Any]]] = {}

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        candidates = []
        for piece in choices:
            assert piece.turn is not None
            parts: list[dict[str, Any]] = []
            for part in piece.turn.reply.parts:
                parts += self._parts_of_reply(part)
            candidates.append(self._complete(codec, piece, parts))
        return {
            "candidates": candidates,
            "usageMetadata": _usage(codec, choices),
            **self._head,
        }

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if piece.reasoning:
            parts += self._thought(piece.reasoning)
        if piece.text:
            parts.append({"text": piece.text})
        if piece.call is not None:
            parts.append(_call_part(piece.call))
        if not parts:
            return

        held = self._held.get(piece.index)
        self._held[piece.index] = parts
        if held:
            yield {"candidates": [_candidate(piece, held)], **self._head}

    def closing(self, codec: ChatCodec, choices: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(choices, start=1):
            candidate = self._complete(codec, piece, self._held.get(piece.index, []))
            event = {"candidates": [candidate], **self._head}
            if number == len(choices):
                event["usageMetadata"] = _usage(codec, choices)
            yield event

    @staticmethod
    def failure(problem: ApiError) -> dict[str, Any]:
        default = "INTERNAL" if problem.status >= 500 else "INVALID_ARGUMENT"
        error: dict[str, Any] = {
            "code": problem.status,
            "message": str(problem),
            "status": _STATUSES.get(problem.status, default),
        }
        if problem.param is not None:
            violation = {"field": problem.param, "description": str(problem)}
            kind = "type.googleapis.com/google.rpc.BadRequest"
            error["details"] = [{"@type": kind, "fieldViolations": [violation]}]
        return {"error": error}

    def _complete(
        self, codec: ChatCodec, piece: Piece, parts: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a candidate that has ended."""
        assert piece.turn is not None
        is_cut = piece.turn.reply.finish_reason == "length"
        candidate = _candidate(piece, parts or [{"text": ""}])
        candidate["finishReason"] = "MAX_TOKENS" if is_cut else "STOP"
        if self._config.response_logprobs:
            candidate |= _logprobs(codec, piece.turn)
        return candidate

    def _parts_of_reply(self, part: ReplyPart) -> list[dict[str, Any]]:
        if part.kind == "text":
            return [{"text": part.text}]
        if part.call is not None:
            return [_call_part(part.call)]
        return self._thought(part.text)

    def _thought(self, reasoning: str) -> list[dict[str, Any]]:
        if not reasoning or not self._config.thinking_config.include_thoughts:
            return []
        return [{"text": reasoning, "thought": True}]


class GeminiStream(GeminiAnswer):
    """The answer to one request, in pieces.

    Raises:
        ApiError: it is not to be sent as server-sent events, besides what :class:`GeminiAnswer`
            raises.
    """

    is_stream = True

    def __init__(self, call: ApiCall) -> None:
        if call.query.get("alt") != "sse":
            raise ApiError(400, "streams are sent as server-sent events: add ?alt=sse", param="alt")
        super().__init__(call)


def _candidate(piece: Piece, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts}, "index": piece.index}


def _call_part(call: ToolCall) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": call.name, "args": dict(call.arguments)}}


def _logprobs(codec: ChatCodec, turn: RecordedTurn) -> dict[str, Any]:
    """Return the log-probs and ids of a turn's tokens, as a candidate has them."""
    output = turn.output
    chosen = []
    for token, token_id, logprob in zip(
        token_texts(codec, turn), output.token_ids, output.log_probs, strict=True
    ):
        chosen.append({"token": token, "tokenId": token_id, "logProbability": logprob})
    return {
        "avgLogprobs": sum(output.log_probs) / len(output.log_probs),
        "logprobsResult": {"chosenCandidates": chosen},
    }


def _usage(codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, int]:
    """Return the tokens of a prompt and all its candidates."""
    sampled = 0
    thoughts = 0
    for piece in choices:
        assert piece.turn is not None
        sampled += len(piece.turn.output.token_ids)
        thoughts += reasoning_tokens(codec, piece.turn)

    # All choices answer one prompt, which is counted once.
    first_turn = choices[0].turn
    assert first_turn is not None
    prompt = len(first_turn.prompt_ids)

    usage = {
        "promptTokenCount": prompt,
        "cachedContentTokenCount": first_turn.output.cached_tokens,
        "candidatesTokenCount": sampled - thoughts,
        "totalTokenCount": prompt + sampled,
    }
    if thoughts:
        usage["thoughtsTokenCount"] = thoughts
    return usage
