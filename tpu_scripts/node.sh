# shellcheck shell=bash
# The slice as a queued resource: asking for it, looking at it, giving it back.

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

# Prints the commands by which look_at_node finds the state.
show_look() {
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

# look_at_node: sets `state` to what gcloud says, and `stage` to what that means.
#
# none: there is no queued resource. waiting: it is on its way, or being taken away. ready: ssh
# works. gone: it has lost its VMs and must be deleted. failed: it will never come. unknown: gcloud
# itself failed, with the message in `state`.
# shellcheck disable=SC2034
look_at_node() {
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

describe() {
  local complaint
  complaint=$(mktemp)
  if ! state=$("$1" command 2>"$complaint"); then
    if grep -q 'NOT_FOUND' "$complaint"; then
      state=NOT_FOUND
    else
      state="gcloud: $(tail -n 1 "$complaint")"
    fi
  fi
  rm -f "$complaint"
}
