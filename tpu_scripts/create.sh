#!/usr/bin/env bash
# Requests the slice and waits until it is ready. If you run it again, it only waits.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/node.sh"
begin 'create.sh' '' "$@"
need PROJECT ZONE NAME ACCELERATOR_TYPE RUNTIME_VERSION SPOT SERVICE_ACCOUNT POLL_SECONDS

if [[ $dry_run == yes ]]; then
  request_node
  show_node_checks
  exit
fi

check_node
[[ $stage != none ]] || request_node
last=''
while true; do
  check_node
  [[ $state == "$last" ]] || say "$NAME: $state"
  last=$state
  case $stage in
    ready) exit 0 ;;
    none) die "$NAME no longer exists. Check whether somebody else deleted it." ;;
    gone) die "$NAME has lost its VMs ($state). Run delete.sh and then create.sh, or resume.sh," \
              "which does both." ;;
    failed) die "the request for $NAME failed, because of quota or a wrong zone or type. For the" \
                "exact reason, run 'gcloud compute tpus queued-resources describe $NAME" \
                "--project=$PROJECT --zone=$ZONE'. Then run delete.sh." ;;
    unknown) die "$state" ;;
  esac
  sleep "$POLL_SECONDS"
done
