"""The endpoint: any OpenAI or Anthropic client talks to the policy; its exact ids are on record.

- ``requests``: chat and text requests, and what is refused before sampling.
- ``answers``: their answers, whole or streamed, and errors in OpenAI's shape.
- ``responses``: OpenAI's Responses API.
- ``messages``: Anthropic's Messages API.
- ``sessions``: who may talk to which recorder, and a request's generations.
- ``app``: the routes.
"""
