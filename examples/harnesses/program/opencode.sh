#!/bin/sh
# OpenCode: Chat Completions.
set -e
export PATH="/tmp/harnesses/node_modules/.bin:/tmp/node/bin:$PATH"
export OPENCODE_CONFIG_CONTENT='{
  "provider": {"policy": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"policy": {}}
  }},
  "permission": "allow", "autoupdate": false, "share": "disabled"
}'
opencode run --model policy/policy "$TASK_INSTRUCTION"
