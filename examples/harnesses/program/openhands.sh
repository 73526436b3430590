#!/bin/sh
# OpenHands' SDK: Chat Completions, through LiteLLM. The argument `small` is for models of small contexts.
set -e
. /tmp/agent/python.sh
run_python "runpy.run_path('/tmp/agent/openhands_agent.py', run_name='__main__')" "$@"
