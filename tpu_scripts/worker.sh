#!/usr/bin/env bash
# What happens on a worker itself; the other scripts copy this file there and call it.
#
#   install                    Python and this tree with its libraries, into ~/exgrpo/venv
#   mount BUCKET               the bucket as the folder /mnt/BUCKET
#   free                       fails if training runs
#   start WORKDIR COMMAND...   runs the command detached; output to ~/exgrpo/log
#   stop                       SIGTERM, and after STOP_SECONDS SIGKILL
#   status                     one line: idle, running, lost, or 'exit_code N'
#   run WORKDIR COMMAND...     runs the command here and exits as it does (GKE)
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=$HOME/exgrpo
PATH=$state/venv/bin:$HOME/.local/bin:$PATH
: "${STOP_SECONDS:=300}"  # a step is finished and saved first

install() {
  # The image's own Python is older than 3.11.
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  [[ -e $state/venv ]] || uv venv --quiet --seed --python 3.12 "$state/venv"
  "$state/venv/bin/pip" install --quiet -e "${tree}[tpu,gcs]"
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
    # Caches off: what one worker makes, the others must see at once. Streaming off: only then does
    # fsync bring an open file into the bucket (keep_metrics).
    gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
      --enable-streaming-writes=false "$1" "$point"
  fi
}

# metrics.jsonl stays open, and an open file reaches the bucket only by fsync.
keep_metrics() {
  local sleeper=''
  trap 'kill "$sleeper"; exit' TERM  # leaves no sleep behind
  while true; do
    sleep 60 &
    sleeper=$!
    wait "$sleeper"
    [[ ! -e $1/metrics.jsonl ]] || sync "$1/metrics.jsonl" || true
  done
}

run_here() {
  local code=0 child keeper signalled
  local workdir=$1
  shift
  cd "$tree"
  keep_metrics "$workdir" >/dev/null 2>&1 &
  keeper=$!
  "$@" &
  child=$!
  # The command hears of it, and may take its time to save.
  trap 'signalled=yes; kill -TERM "$child" 2>/dev/null || true' TERM
  signalled=yes
  while [[ $signalled == yes ]]; do  # a signal ends the wait, not the command
    signalled=no
    code=0
    wait "$child" || code=$?
  done
  kill "$keeper"
  return "$code"
}

check_free() {
  ! running || {
    echo 'error: training runs already; stop.sh ends it.' >&2
    exit 1
  }
}

start() {
  check_free
  mkdir -p "$state"
  rm -f "$state/exit_code"
  echo "--- $(date -u +%FT%TZ) ${*:2}" >>"$state/log"
  setsid bash "${BASH_SOURCE[0]}" supervise "$@" >>"$state/log" 2>&1 </dev/null &
  echo $! >"$state/pid"
}

supervise() {
  local code=0
  run_here "$@" || code=$?
  echo "$code" >"$state/exit_code.new"
  mv "$state/exit_code.new" "$state/exit_code"
}

running() {
  local process
  [[ -e $state/pid && ! -e $state/exit_code ]] || return 1
  process=$(<"$state/pid")
  # Not another process that got the number after the worker was started anew.
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
    echo 'exgrpo: lost'  # killed, or the worker was started anew
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
  run) run_here "$@" ;;
  *)
    sed -n '2,/^set/{/^#/p;}' "${BASH_SOURCE[0]}" >&2
    exit 2 ;;
esac
