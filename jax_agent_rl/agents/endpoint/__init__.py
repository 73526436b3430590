"""The OpenAI-compatible endpoint: any client of that API talks to the policy, and its exact ids are on record.

``wire`` requests and answers in OpenAI's shape, and what is rejected before sampling · ``failures`` errors in OpenAI's
shape · ``sessions`` who may talk to which recorder, and a request's generations · ``app`` the routes.
"""
