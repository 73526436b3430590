#!/usr/bin/env bash
# On a TPU host: a run that outlives tpu_pod.sh, which follows, stops and finds it again through this script.
#   ./launch/tpu_host.sh start FOLDER COMMAND…        does nothing while a run is under way: gcloud may run it again
#   ./launch/tpu_host.sh follow FOLDER                numbered lines of its output, then end|STATUS
#   ./launch/tpu_host.sh signal FOLDER INT|KILL       to the command
#   ./launch/tpu_host.sh running FOLDER               whether there is one
# Environment of start: RUN_BUCKET (gs://… of the run), RUN_HOST (names the log there); on the host that writes the run
# folder also RUN_FOLDER, and RUN_RESTORE=1 to begin with the bucket's.
# Exit status of follow: the run's; 70 if it was killed without leaving one; 71 if there is none.
set -euo pipefail
action="$1" folder="$2"
shift 2
log="$folder/output.log" process="$folder/process" status="$folder/status"
LOST=70 NO_RUN=71

# Sets $supervisor and $child.
under_way() {
  [ ! -e "$status" ] && [ -e "$process" ] && read -r supervisor child <"$process" &&
    grep -qs tpu_host "/proc/$supervisor/cmdline" # not another process with the same id
}

write() { # FILE TEXT: at once
  echo "$2" >"$1.new"
  mv "$1.new" "$1"
}

storage() {
  local message
  message="$(timeout 300 gcloud storage "$@" --quiet 2>&1 >/dev/null)" ||
    echo "gcloud storage $1 failed: $(tail -c 300 <<<"$message" | tr '\n' ' ')"
}

copy() {
  [ -n "${RUN_BUCKET:-}" ] || return 0
  storage cp "$log" "$RUN_BUCKET/logs/$RUN_HOST-$began.log"
  [ -d "${RUN_FOLDER:-}" ] || return 0
  storage rsync --recursive --exclude='^engines\.json$' "$RUN_FOLDER" "$RUN_BUCKET/run" # not the run's token
}

supervise() {
  set -m # a process group for each of the two below; SIGINT is not ignored
  write "$process" "$BASHPID"
  began="$(date -u +%Y%m%dT%H%M%SZ)"
  if [ -n "${RUN_RESTORE:-}" ] && gcloud storage ls "$RUN_BUCKET/run" --quiet >/dev/null 2>&1; then
    mkdir -p "$RUN_FOLDER"
    storage rsync --recursive "$RUN_BUCKET/run" "$RUN_FOLDER"
  fi
  local supervisor=$BASHPID result=0
  {
    write "$process" "$supervisor $BASHPID" # before the command says anything, which a signal may follow
    exec "$@"
  } &
  local child=$!
  while sleep 15 && kill -0 "$$" 2>/dev/null; do copy; done & # not beyond a supervisor that was killed
  local copier=$!
  disown "$copier" # its end is no news
  wait "$child" || result=$?
  kill -KILL -- "-$copier" || true
  copy
  write "$status" "$result"
}

case "$action" in
  start)
    mkdir -p "$folder"
    if under_way; then
      echo "a run is under way here already"
      exit
    fi
    rm -f "$status" "$process"
    : >"$log"
    setsid "${BASH_SOURCE[0]}" supervise "$folder" "$@" </dev/null >>"$log" 2>&1 &
    while [ ! -e "$process" ]; do # from then on follow finds it
      kill -0 "$!"
      sleep 0.02
    done
    ;;
  supervise) supervise "$@" ;;
  running) under_way || exit "$NO_RUN" ;;
  signal)
    under_way && [ -n "$child" ] && kill -s "$1" -- "-$child" || exit "$NO_RUN"
    while [ "$1" = KILL ] && under_way; do sleep 0.02; done
    ;;
  follow)
    result="$NO_RUN"
    if [ ! -e "$log" ]; then
      echo "there is no run here"
    else
      if under_way; then tail -n +1 -s 0.5 -f --pid="$supervisor" "$log"; else cat "$log"; fi |
        LC_ALL=C grep -an --line-buffered '' || true
      result="$(cat "$status" 2>/dev/null || echo "$LOST")"
    fi
    echo "end|$result"
    exit "$result"
    ;;
esac
