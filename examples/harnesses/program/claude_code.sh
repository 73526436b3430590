#!/bin/sh
# Claude Code: the Messages API. Arguments go to it: --continue /compact, for example.
set -e
export PATH="/tmp/harnesses/node_modules/.bin:/tmp/node/bin:$PATH"
if [ $# = 0 ]; then set -- "$TASK_INSTRUCTION"; fi
claude --print --dangerously-skip-permissions --model policy "$@"
