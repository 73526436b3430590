#!/bin/sh
# Gemini CLI: Google's API. The sandbox is this project's, so that every folder is trusted.
set -e
export PATH="/tmp/harnesses/node_modules/.bin:/tmp/node/bin:$PATH"
export GEMINI_CLI_TRUST_WORKSPACE=true
mkdir -p "$HOME/.gemini"
echo '{"security": {"auth": {"selectedType": "gemini-api-key"}}}' > "$HOME/.gemini/settings.json"
gemini --model policy --yolo --prompt "$TASK_INSTRUCTION"
