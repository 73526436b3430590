#!/bin/sh
# Codex: the Responses API. The sandbox is this project's; a search on OpenAI's servers there is none.
set -e
export PATH="/tmp/harnesses/node_modules/.bin:/tmp/node/bin:$PATH" CODEX_HOME=/tmp/codex
mkdir -p "$CODEX_HOME"
endpoint="base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY', wire_api='responses'"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model policy \
  -c model_provider=policy -c "model_providers.policy={name='policy', $endpoint}" \
  -c 'web_search="disabled"' "$TASK_INSTRUCTION"
