"""A tokenizer of bytes and a chat template, made here so that no model's files are needed."""

from __future__ import annotations

from jax_agent_rl.chat.codec import ChatCodec

_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def codec() -> ChatCodec:
    """Ids 0 to 2 are special, 2 ends a turn, each other one is a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<|pad|>", "<|start|>", "<|end|>")
    alphabet = _bytes_in_order()
    pieces = {piece: i for i, piece in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return ChatCodec(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=_TEMPLATE
        )
    )


def _bytes_in_order() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it prints, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
