# shellcheck shell=bash
# Functions that request the slice as a queued resource, get its state, and delete it.

request_node() {
  local capacity=()
  [[ $SPOT == no ]] || capacity=(--spot)
  run gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" \
    --project="$PROJECT" --zone="$ZONE" --accelerator-type="$ACCELERATOR_TYPE" \
    --runtime-version="$RUNTIME_VERSION" --service-account="$SERVICE_ACCOUNT" \
    ${capacity[@]+"${capacity[@]}"}
}

delete_node() {
  run gcloud compute tpus queued-resources delete "$NAME" --project="$PROJECT" --zone="$ZONE" \
    --force --quiet
}

# Prints the commands that check_node runs.
show_node_checks() {
  request_state_command show
  node_state_command show
}

request_state_command() {
  "$@" gcloud compute tpus queued-resources describe "$NAME" --project="$PROJECT" \
    --zone="$ZONE" --format='value(state.state)'
}

node_state_command() {
  "$@" gcloud compute tpus tpu-vm describe "$NAME" --project="$PROJECT" --zone="$ZONE" \
    --format='value(state)'
}

# check_node: sets `state` to the state that gcloud reports, and `stage` to one of these values.
#
# none: there is no queued resource. waiting: it is being provisioned or removed. ready: ssh
# works. gone: it has lost its VMs and must be deleted. failed: it will never be provisioned.
# unknown: gcloud itself failed, and `state` contains its message.
# shellcheck disable=SC2034
check_node() {
  describe request_state_command
  case $state in
    ACTIVE)
      describe node_state_command
      case $state in
        READY) stage=ready ;;
        NOT_FOUND | PREEMPTED | TERMINATED | STOPPED | HIDDEN | UNKNOWN) stage=gone ;;
        "gcloud: "*) stage=unknown ;;
        *) stage=waiting ;;
      esac ;;
    NOT_FOUND) stage=none ;;
    SUSPENDED) stage=gone ;;
    FAILED) stage=failed ;;
    "gcloud: "*) stage=unknown ;;
    *) stage=waiting ;;  # CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, SUSPENDING, …
  esac
}

# describe STATE_COMMAND: sets `state` to its output, or to the reason why it failed.
describe() {
  local errors
  errors=$(mktemp)
  if ! state=$("$1" command 2>"$errors"); then
    if grep -q 'NOT_FOUND' "$errors"; then
      state=NOT_FOUND
    else
      state="gcloud: $(tail -n 1 "$errors")"
    fi
  fi
  rm -f "$errors"
}
