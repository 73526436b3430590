#!/bin/sh
# mini-swe-agent: Chat Completions, through LiteLLM.
set -e
. /tmp/agent/python.sh
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini
run_python "runpy.run_module('minisweagent.run.mini', run_name='__main__')" \
  --yolo --exit-immediately --model openai/policy --task "$TASK_INSTRUCTION" --output /tmp/mini.json
