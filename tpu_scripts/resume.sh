#!/usr/bin/env bash
# Keeps training going until it is done: requests the slice, sets it up, launches training, and
# starts over if the slice is preempted or training fails. You can stop and restart this script at
# any time.
#
# Training is done when it exits with code 0 on every worker. Exit code 2 means that training has
# rejected its input, such as a wrong flag or file, or has broken down. A restart would end in the
# same way, so the loop ends. If training had exited before this script started, the script launches
# it again, because the variables may have changed. Before the script requests a slice, it checks
# the config on this machine. This check needs neither the data nor the weights.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/node.sh"
begin 'resume.sh' '' "$@"
need PROJECT ZONE NAME ACCELERATOR_TYPE RUNTIME_VERSION SPOT SERVICE_ACCOUNT BUCKET RUN CONFIG \
  POLL_SECONDS MAX_FAILURES PYTHON
check_env_file

max_errors=10  # the loop gives up after this many failed attempts in a row
status_command="if [ -e $remote ]; then bash $remote status; else echo 'exgrpo: idle'; fi"

list_checkpoints() {
  run gcloud storage ls "gs://$BUCKET/$RUN/checkpoints/" --project="$PROJECT"
}

# restart_training: sets `launched` to yes or no. Stops training first, because it may still be
# running on other workers after one worker fails. If a script fails, the workers may still report
# the exit code of the previous training, which must be counted only once.
restart_training() {
  local script
  launched=no
  for script in stop set_up launch; do
    "$here/$script.sh" ${options[@]+"${options[@]}"} || return
  done
  launched=yes
}

[[ $dry_run == no ]] || say '# Check the config on this machine.'
check_config
if [[ $dry_run == yes ]]; then
  say '# One round, as after a preemption. Check the slice, and delete what is left of it.'
  show_node_checks
  delete_node
  say '# Request another slice, and wait for it.'
  request_node
  show_node_checks
  say '# Set it up, and launch training.'
  restart_training
  say "# Check the slice and training every $POLL_SECONDS seconds."
  show_node_checks
  on_workers all "$status_command"
  list_checkpoints
  exit
fi

newest_checkpoint() {
  { list_checkpoints 2>/dev/null || true; } | sed -n 's|.*/\([0-9][0-9]*\)/$|\1|p' | sort -n |
    tail -n 1
}

# check_training: sets `training` to idle, running, finished, refused, failed or unreachable.
check_training() {
  local answers statuses log
  log=$(mktemp)  # gcloud reports every connection on stderr
  if ! answers=$(on_workers all "$status_command" 2>"$log"); then
    training="unreachable ($(tail -n 1 "$log"))"
    answers=''
  fi
  rm -f "$log"
  [[ -n $answers ]] || return 0
  statuses=$(sed -n 's/^exgrpo: //p' <<<"$answers" | sort -u)
  if grep -qx 'exit_code 2' <<<"$statuses"; then
    training=refused
    return
  fi
  case $statuses in
    idle | running) training=$statuses ;;
    'exit_code 0') training=finished ;;
    $'exit_code 0\nrunning') training=running ;;  # the others are about to exit
    *) training=failed ;;
  esac
}

launched=''  # until this script has launched training or seen it running
errors=0 failures=0 newest=$(newest_checkpoint) last=''
while true; do
  check_node
  training=''
  [[ $stage != ready ]] || check_training
  [[ "$state $training" == "$last" ]] || say "$(date -u +%FT%TZ) $NAME: $state $training"
  last="$state $training"
  case $stage.$training in
    none.) request_node || errors=$((errors + 1)) ;;
    gone.) delete_node || errors=$((errors + 1)) ;;
    waiting.) errors=0 ;;
    failed.) die "the request for $NAME failed. Run create.sh to see the possible reasons." ;;
    ready.running) errors=0 launched=yes ;;
    ready.finished | ready.refused)
      if [[ $launched != yes ]]; then
        restart_training || errors=$((errors + 1))
      elif [[ $training == refused ]]; then
        die "training rejected its config, a flag or a file, or broke down. Run logs.sh to see why."
      else
        say "training is done. Run fetch.sh to copy the results here, and delete.sh to delete" \
            "$NAME."
        exit 0
      fi ;;
    ready.idle) restart_training || errors=$((errors + 1)) ;;
    ready.failed)
      latest=$(newest_checkpoint)
      [[ $latest == "$newest" ]] || failures=0
      newest=$latest
      [[ $launched == no ]] || failures=$((failures + 1))
      ((failures <= MAX_FAILURES)) ||
        die "training failed $failures times without a new checkpoint. Run logs.sh to see why."
      restart_training || errors=$((errors + 1)) ;;
    *) errors=$((errors + 1)) ;;  # gcloud failed, or a worker does not answer
  esac
  ((errors < max_errors)) ||
    die "$max_errors attempts in a row failed ($state $training). Running processes were not" \
        "stopped. Fix the cause, and then run resume.sh again."
  sleep "$POLL_SECONDS"
done
