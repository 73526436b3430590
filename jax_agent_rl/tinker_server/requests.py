"""The SDK's requests in JSON, one schema for each route.

Types, names and sizes are checked before anything is done. Fields that the server does not read are
ignored, as newer SDKs send more.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from jax_agent_rl.tinker_server.wire import MOST_IDS, BadRequest
from jax_agent_rl.types.token_ids import ID_BOUND
from jax_agent_rl.utils.ids import SafeId
from jax_agent_rl.utils.wrong_values import describe_problems

MOST_SAMPLES = 4096
"""Samples of one request."""
MOST_STOPS = 64
"""Stop ids or strings of one request."""
MAX_NAME = 512
"""Characters of a model's, sampler's, request's or checkpoint's name."""
MAX_METADATA = 64
"""Entries of metadata."""

SequenceNumber = Annotated[int, Field(ge=0, lt=2**53)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_Ids = Annotated[list[Annotated[int, Field(ge=-ID_BOUND, lt=ID_BOUND)]], Field(fail_fast=True)]
_Indices = Annotated[list[Annotated[int, Field(ge=0, lt=2**53)]], Field(fail_fast=True)]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=256)], Any], Field(max_length=MAX_METADATA)
]


MAX_BODY_BYTES = 1 << 20
"""Limit of the body of a request that holds no tokens."""


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    def to_json(self) -> bytes:
        """Return the fields that were given, as the database keeps them."""
        return self.model_dump_json(exclude_unset=True).encode()

    @classmethod
    def from_json(cls, body: bytes | None) -> Self:
        """Read what :meth:`to_json` returned.

        Raises:
            BadRequest: this version of the server does not take it.
        """
        try:
            return cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise BadRequest(describe_problems(error)) from None


class ModelRequest(_Request):
    """A request about a model: ``get_info``, ``unload_model``."""

    model_id: Name
    seq_id: SequenceNumber | None = None


class SessionRequest(_Request):
    """``session_heartbeat``."""

    session_id: SafeId


class FutureRequest(_Request):
    """``retrieve_future``, ``cancel_future``."""

    request_id: Name


class WeightsInfoRequest(_Request):
    """``weights_info``."""

    tinker_path: Name


class TtlRequest(_Request):
    """``checkpoints/…/ttl``."""

    ttl_seconds: FiniteFloat | None = None


class _LoraFields(_Request):
    rank: int
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_mlp: bool = True
    train_attn: bool = True


class _OptimizerFields(_Request):
    type: str = "adamw"


class CreateModelRequest(_Request):
    """``create_model``."""

    session_id: SafeId
    model_seq_id: SequenceNumber
    base_model: str | None = None
    lora_config: _LoraFields | None = None
    optimizer_config: _OptimizerFields = _OptimizerFields()
    user_metadata: _Metadata | None = None


class _AdamFields(_Request):
    learning_rate: FiniteFloat = 0.0001
    beta1: FiniteFloat = 0.9
    beta2: FiniteFloat = 0.95
    eps: FiniteFloat = 1e-12
    weight_decay: FiniteFloat = 0.0
    grad_clip_norm: FiniteFloat = 0.0


class OptimStepRequest(ModelRequest):
    """``optim_step``."""

    adam_params: _AdamFields | None = None


class SaveRequest(ModelRequest):
    """``save_weights``, ``save_weights_for_sampler``."""

    path: SafeId | None = None
    overwrite: bool = False
    ttl_seconds: FiniteFloat | None = None
    sampling_session_seq_id: SequenceNumber | None = None
    user_metadata: _Metadata | None = None


class LoadRequest(_Request):
    """``load_weights``, into a model, or into a new one of a session."""

    model_id: Name | None = None
    seq_id: SequenceNumber | None = None
    session_id: SafeId | None = None
    model_seq_id: SequenceNumber | None = None
    path: Name
    optimizer: bool = False
    user_metadata: _Metadata | None = None


class CreateSamplerRequest(_Request):
    """``create_sampling_session``."""

    session_id: SafeId
    sampling_session_seq_id: SequenceNumber
    base_model: str | None = None
    model_path: Name | None = None


class _Chunk(_Request):
    type: str = "encoded_text"
    tokens: _Ids = []


class _Prompt(_Request):
    chunks: Annotated[list[_Chunk], Field(max_length=100_000, fail_fast=True)]


class _Tensor(_Request):
    shape: Annotated[_Indices, Field(max_length=2)]
    data: _Ids
    sparse_crow_indices: _Indices | None = None
    sparse_col_indices: _Indices | None = None


class _SamplingFields(_Request):
    max_tokens: Annotated[int, Field(ge=0, lt=ID_BOUND)] | None = None
    temperature: FiniteFloat = 1.0
    top_p: FiniteFloat = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=ID_BOUND)] = -1
    seed: Annotated[int, Field(ge=-(2**62), lt=2**62)] | None = None
    stop: (
        Annotated[str, Field(max_length=1024)]
        | Annotated[list[Annotated[int, Field(ge=0, lt=ID_BOUND)]], Field(max_length=MOST_STOPS)]
        | Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=MOST_STOPS)]
        | None
    ) = None


class SampleRequest(_Request):
    """``asample``."""

    prompt: _Prompt
    sampling_params: _SamplingFields
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    sampling_session_id: Name | None = None
    seq_id: SequenceNumber | None = None
    model_path: Name | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=0, lt=ID_BOUND)] | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_IDS)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_IDS)] = 0
    target_prompt_logprobs: _Tensor | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
