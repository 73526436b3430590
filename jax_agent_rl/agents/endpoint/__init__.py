"""The endpoint: OpenAI's, Anthropic's and Google's clients talk to the policy, all ids on record.

- ``requests``: chat and text requests, and what is refused before sampling.
- ``answers``: their answers, whole or streamed, and what answers are in every API.
- ``responses``: OpenAI's Responses API.
- ``messages``: Anthropic's Messages API.
- ``gemini``: Google's Gemini API.
- ``dialects``: the table of all APIs.
- ``sessions``: who may talk to which recorder, and a request's generations.
- ``app``: the routes.
"""
