"""The endpoint: any OpenAI or Anthropic client talks to the policy, and its exact ids are on record.

``wire`` chat and text requests, and what is rejected before sampling · ``answers`` their answers, whole or streamed ·
``responses`` OpenAI's Responses API · ``messages`` Anthropic's Messages API · ``failures`` errors in OpenAI's shape ·
``sessions`` who may talk to which recorder, and a request's generations · ``app`` the routes.
"""
