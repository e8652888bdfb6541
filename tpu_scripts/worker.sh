#!/usr/bin/env bash
# Runs on a worker. The other scripts copy this file to the workers and call it there.
#
#   install                    installs Python and this tree with its libraries in ~/exgrpo/venv,
#                              and creates the folder for ENV_FILE
#   mount BUCKET               mounts the bucket at /mnt/BUCKET
#   free                       fails if training is running
#   start WORKDIR COMMAND...   runs the command detached; its output goes to ~/exgrpo/log
#   stop                       sends SIGTERM, and SIGKILL after STOP_SECONDS
#   status                     prints one line: exgrpo: idle, running, lost, or exit_code N
#   run WORKDIR COMMAND...     runs the command in the foreground and returns its exit code (GKE)
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=$HOME/exgrpo
PATH=$state/venv/bin:$HOME/.local/bin:$PATH
: "${STOP_SECONDS:=300}"  # time to finish the step and save it

install() {
  # The image's own Python is older than 3.11, which this package needs.
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  if [[ ! -x $state/venv/bin/pip ]]; then  # uv may have been killed
    rm -rf "$state/venv"
    uv venv --quiet --seed --python 3.12 "$state/venv"
  fi
  "$state/venv/bin/pip" install --quiet --constraint="$tree/tpu_scripts/constraints.txt" \
    -e "${tree}[tpu,gcs,wandb]"
  rm -rf "$state/private"
  mkdir -m 700 "$state/private"
}

# Exports the variables in ENV_FILE. If it is set, set_up.sh has copied the file to the worker.
export_environment() {
  local line
  [[ -e $state/private/env ]] || return 0
  while IFS= read -r line || [[ -n $line ]]; do
    [[ ! $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || export "${line?}"
  done <"$state/private/env"
}

mount_bucket() {
  local point=/mnt/$1 codename
  if ! command -v gcsfuse >/dev/null; then
    codename=$(lsb_release -cs)
    curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg |
      sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null
    echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc]" \
      "https://packages.cloud.google.com/apt gcsfuse-$codename main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get update -qq
    sudo apt-get install -qq -y gcsfuse
  fi
  if ! mountpoint -q "$point"; then
    sudo mkdir -p "$point"
    sudo chown "$(id -u)" "$point"
    # Caches are off because the other workers must see a written file at once. Streaming writes are
    # off because otherwise fsync does not upload an open file (see sync_metrics).
    gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
      --enable-streaming-writes=false "$1" "$point"
  fi
}

# sync_metrics WORKDIR: uploads metrics.jsonl once a minute. The file stays open during training,
# and an open file is uploaded only by fsync.
sync_metrics() {
  local sleeper=''
  trap 'kill "$sleeper"; exit' TERM  # otherwise, the sleep would outlive this process
  while true; do
    sleep 60 &
    sleeper=$!
    wait "$sleeper"
    [[ ! -e $1/metrics.jsonl ]] || sync "$1/metrics.jsonl" || true
  done
}

# terminate PROCESS: sends SIGTERM. Does nothing if PROCESS is empty or is not running.
terminate() {
  [[ -z $1 ]] || kill -TERM "$1" 2>/dev/null || true
}

# run_in_foreground WORKDIR COMMAND...: passes SIGTERM on, and returns the command's exit code.
run_in_foreground() {
  local code=0 child='' early='' syncer signalled
  local workdir=$1
  shift
  cd "$tree"
  export_environment
  sync_metrics "$workdir" >/dev/null 2>&1 &
  syncer=$!
  # Set before the child starts: SIGTERM must not end this process and leave the child running.
  # A SIGTERM that arrives before the child's id is known is sent later, but only once: two kill it.
  trap 'signalled=yes; [[ -n ${child:-} ]] || early=yes; terminate "${child:-}"' TERM
  "$@" &
  child=$!
  [[ -z $early ]] || terminate "$child"
  signalled=yes
  while [[ $signalled == yes ]]; do  # a signal interrupts the wait, but does not end the command
    signalled=no
    code=0
    wait "$child" || code=$?
  done
  kill "$syncer"
  return "$code"
}

check_free() {
  ! running || {
    echo 'error: training is already running. To stop it, run stop.sh.' >&2
    exit 1
  }
}

start() {
  check_free
  mkdir -p "$state"
  rm -f "$state/exit_code" "$state/pid"
  echo "--- $(date -u +%FT%TZ) ${*:2}" >>"$state/log"
  setsid bash "${BASH_SOURCE[0]}" supervise "$@" >>"$state/log" 2>&1 </dev/null &
  # Otherwise, a status check right after this could report idle, and training would start twice.
  while [[ ! -e $state/pid ]]; do
    kill -0 $! 2>/dev/null || {
      echo "error: training did not start. Check $state/log for the reason." >&2
      exit 1
    }
    sleep 0.1
  done
}

# Records this process's id, runs the command, and records its exit code. Both writes are atomic.
supervise() {
  local code=0
  echo $$ >"$state/pid.new"
  mv "$state/pid.new" "$state/pid"
  run_in_foreground "$@" || code=$?
  echo "$code" >"$state/exit_code.new"
  mv "$state/exit_code.new" "$state/exit_code"
}

# Succeeds if the supervisor that `start` started is running.
running() {
  local process
  [[ -e $state/pid && ! -e $state/exit_code ]] || return 1
  process=$(<"$state/pid")
  # After a reboot of the worker, another process may have this id.
  tr '\0' ' ' 2>/dev/null <"/proc/$process/cmdline" | grep -q 'worker.sh supervise'
}

stop() {
  local process waited=0
  running || return 0
  process=$(<"$state/pid")
  kill -TERM "$process"
  while running && ((waited < STOP_SECONDS)); do
    sleep 1
    waited=$((waited + 1))
  done
  kill -KILL -- "-$process" 2>/dev/null || true
}

status() {
  if [[ -e $state/exit_code ]]; then
    echo "exgrpo: exit_code $(<"$state/exit_code")"
  elif running; then
    echo 'exgrpo: running'
  elif [[ -e $state/pid ]]; then
    echo 'exgrpo: lost'  # killed, or the worker was rebooted
  else
    echo 'exgrpo: idle'
  fi
}

verb=${1:-}
[[ $# -eq 0 ]] || shift
case $verb in
  install) install ;;
  mount) mount_bucket "$1" ;;
  free) check_free ;;
  start) start "$@" ;;
  supervise) supervise "$@" ;;
  stop) stop ;;
  status) status ;;
  run) run_in_foreground "$@" ;;
  *)
    sed -n '2,/^set/{/^#/p;}' "${BASH_SOURCE[0]}" >&2
    exit 2 ;;
esac
