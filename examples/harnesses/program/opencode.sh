#!/bin/sh
# OpenCode: Chat Completions. The argument `small` is for models of small contexts: three tools, and a prompt of one line.
set -e
export PATH="/tmp/harnesses/node_modules/.bin:/tmp/node/bin:$PATH"
agent='{}'
if [ "${1:-}" = small ]; then
  agent='{"build": {
    "prompt": "Work in the current folder. Call one tool at a time. When the task is done, say so.",
    "tools": {"*": false, "read": true, "edit": true, "bash": true}
  }}'
fi
export OPENCODE_CONFIG_CONTENT='{
  "provider": {"policy": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"policy": {}}
  }},
  "agent": '"$agent"',
  "permission": "allow", "autoupdate": false, "share": "disabled"
}'
opencode run --model policy/policy "$TASK_INSTRUCTION"
