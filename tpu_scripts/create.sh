#!/usr/bin/env bash
# Asks for the slice and waits until it can be used. Safe to run again: it then only waits.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/node.sh"
begin 'create.sh' '' "$@"
need PROJECT ZONE NAME ACCELERATOR_TYPE RUNTIME_VERSION SPOT SERVICE_ACCOUNT POLL_SECONDS

if [[ $dry_run == yes ]]; then
  request_node
  show_look
  exit
fi

look_at_node
[[ $stage != none ]] || request_node
last=''
while true; do
  look_at_node
  [[ $state == "$last" ]] || say "$NAME: $state"
  last=$state
  case $stage in
    ready) exit 0 ;;
    none) die "$NAME is not there any more; somebody else deleted it?" ;;
    gone) die "$NAME has lost its VMs ($state). delete.sh, then create.sh asks again;" \
              "resume.sh does both by itself." ;;
    failed) die "$NAME will not come: the request failed, by quota, by a wrong zone or type." \
                "'gcloud compute tpus queued-resources describe $NAME" \
                "--project=$PROJECT --zone=$ZONE' says more; then delete.sh." ;;
    unknown) die "$state" ;;
  esac
  sleep "$POLL_SECONDS"
done
