#!/usr/bin/env bash
# Runs tests with pytest, and the few that failed once more. Sourced by launch/test.sh, after lib.sh.
MOST_REPEATED=5 # where more fail, or where this is 0, none runs again
UNSTEADY=0      # tests that failed beside others and passed alone

# run_tests PYTHON ARGUMENTS…: tests that failed run once more, alone: on a busy machine a test may have waited for too short a
# time. What fails again fails the call; what passes then is named, and is to be mended too.
run_tests() {
  local python="$1"
  shift
  if [ "$MOST_REPEATED" = 0 ]; then
    run "$python" -m pytest "$@"
    return
  fi

  local cache failed status=0
  cache="$(mktemp -d)"
  failed="$cache/v/cache/lastfailed"
  run "$python" -m pytest "$@" -o "cache_dir=$cache" || status=$?
  # 1: all have run, and some failed. Otherwise pytest was interrupted, or broke, and others have not run.
  if [ "$status" = 1 ] && [ -e "$failed" ]; then
    status=0
    repeat_failed "$python" "$@" || status=$?
  fi
  rm -r "$cache"
  return "$status"
}

# For run_tests, whose variables it uses.
repeat_failed() {
  local python="$1"
  shift
  local count
  count="$("$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$failed")"
  if [ "$count" -gt "$MOST_REPEATED" ]; then return 1; fi

  say "$count failed: once more, alone"
  cat "$failed"
  echo
  # The last -n holds: no worker beside this process.
  "$python" -m pytest "$@" -o "cache_dir=$cache" --last-failed --last-failed-no-failures=none -n 0 -vv || return 1
  UNSTEADY=$((UNSTEADY + count))
  say "unsteady: what is named above failed beside other tests and passed alone"
}
