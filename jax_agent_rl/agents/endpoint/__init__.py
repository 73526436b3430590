"""The OpenAI-compatible endpoint: any client of that API talks to the policy, and its exact ids are on record.

``wire`` requests and answers in OpenAI's shape · ``failures`` errors in OpenAI's shape · ``sessions`` who may talk to
which recorder · ``checks`` what is rejected before sampling · ``work`` a request's generations, whole or streamed ·
``app`` the routes.
"""
