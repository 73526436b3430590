"""Messages to token ids and back, so that no sampled id is ever re-tokenized.

``codec`` what agents use · ``template`` chat templates, and messages put into words a template knows · ``delta`` the
text a template adds after a sampled turn · ``special`` special tokens in text · ``loading`` tokenizers from a model's
folder · ``formats`` how tool calls are written. transformers is imported only where a tokenizer is loaded.
"""

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.types import Reply, ToolCall

__all__ = ["ChatCodec", "Reply", "ToolCall"]
