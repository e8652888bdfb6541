#!/usr/bin/env bash
# Keeps training until it is done: asks for the slice, sets it up, launches, and begins again when
# the slice is taken away or training fails. It may itself be stopped and started at any moment.
#
# Done is: training ended with exit code 0 on every worker. Exit code 2 is a refusal (a wrong flag
# or file), which would only come again, so the loop stops there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/node.sh"
begin 'resume.sh' '' "$@"
need PROJECT ZONE NAME ACCELERATOR_TYPE RUNTIME_VERSION SPOT SERVICE_ACCOUNT BUCKET RUN CONFIG \
  POLL_SECONDS MAX_FAILURES

patience=10  # looks in a row that fail before the loop gives up
ask_status="if [ -e $remote ]; then bash $remote status; else echo 'exgrpo: idle'; fi"

list_checkpoints() {
  run gcloud storage ls "gs://$BUCKET/$RUN/checkpoints/" --project="$PROJECT"
}

# Where training failed on one worker, others may still run.
begin_training() {
  local script
  for script in stop set_up launch; do
    "$here/$script.sh" ${options[@]+"${options[@]}"} || return
  done
}

if [[ $dry_run == yes ]]; then
  say '# One round, as after a preemption. Looks at the slice, and deletes what is left of it:'
  show_look
  delete_node
  say '# asks for another and waits;'
  request_node
  show_look
  say '# sets it up and launches;'
  begin_training
  say "# and looks every $POLL_SECONDS seconds how training goes."
  show_look
  on_workers all "$ask_status"
  list_checkpoints
  exit
fi

newest_checkpoint() {
  { list_checkpoints 2>/dev/null || true; } | sed -n 's|.*/\([0-9][0-9]*\)/$|\1|p' | sort -n |
    tail -n 1
}

# look_at_training: sets `training` to idle, running, finished, refused, failed or unreachable.
look_at_training() {
  local answers codes complaint
  complaint=$(mktemp)  # gcloud tells of every connection
  if ! answers=$(on_workers all "$ask_status" 2>"$complaint"); then
    training="unreachable ($(tail -n 1 "$complaint"))"
    answers=''
  fi
  rm -f "$complaint"
  [[ -n $answers ]] || return 0
  codes=$(sed -n 's/^exgrpo: //p' <<<"$answers" | sort -u)
  case $codes in
    idle | running) training=$codes ;;
    'exit_code 0') training=finished ;;
    *'exit_code 2'*) training=refused ;;
    $'exit_code 0\nrunning') training=running ;;  # the others are about to end
    *) training=failed ;;
  esac
}

troubles=0 failures=0 newest=$(newest_checkpoint) last=''
while true; do
  look_at_node
  training=''
  [[ $stage != ready ]] || look_at_training
  [[ "$state $training" == "$last" ]] || say "$(date -u +%FT%TZ) $NAME: $state $training"
  last="$state $training"
  case $stage.$training in
    none.) request_node || troubles=$((troubles + 1)) ;;
    gone.) delete_node || troubles=$((troubles + 1)) ;;
    waiting.) troubles=0 ;;
    failed.) die "the request for $NAME failed; create.sh says what that may be." ;;
    ready.running) troubles=0 ;;
    ready.finished)
      say "training is done; fetch.sh brings its results here, delete.sh gives $NAME back."
      exit 0 ;;
    ready.refused) die "training refuses what it was given; logs.sh shows what and why." ;;
    ready.idle) begin_training || troubles=$((troubles + 1)) ;;
    ready.failed)
      latest=$(newest_checkpoint)
      [[ $latest == "$newest" ]] || failures=0
      newest=$latest
      failures=$((failures + 1))
      ((failures <= MAX_FAILURES)) ||
        die "training failed $failures times without a new checkpoint; logs.sh shows why."
      begin_training || troubles=$((troubles + 1)) ;;
    *) troubles=$((troubles + 1)) ;;  # gcloud fails, or a worker does not answer
  esac
  ((troubles < patience)) ||
    die "$patience attempts in a row failed ($state $training). What runs goes on running;" \
        "mend the cause and start resume.sh again."
  sleep "$POLL_SECONDS"
done
