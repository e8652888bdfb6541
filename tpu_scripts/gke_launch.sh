#!/usr/bin/env bash
# Starts training as a workload of the cluster. The cluster restarts it up to MAX_RESTARTS times.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'gke_launch.sh' '' "$@"
need PROJECT ZONE CLUSTER NAME ACCELERATOR_TYPE BUCKET RUN CONFIG DOCKER_IMAGE MAX_RESTARTS
check_env_file

environment=()
[[ -z ${ENV_FILE:-} ]] || environment=(--env-file="$ENV_FILE")
pack
# exec makes worker.sh the pod's first process. Only this process gets SIGTERM.
run xpk workload create --workload="$NAME" --cluster="$CLUSTER" --project="$PROJECT" \
  --zone="$ZONE" --tpu-type="$ACCELERATOR_TYPE" --num-slices=1 \
  --base-docker-image="$DOCKER_IMAGE" --script-dir="$(dirname "$packed")" \
  --storage=exgrpo-bucket --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes=1,75 \
  ${environment[@]+"${environment[@]}"} \
  --command="tar -xzf tree.tar.gz && \
python -m pip install --quiet --constraint=tpu_scripts/constraints.txt '.[tpu,gcs,wandb]' && \
exec bash tpu_scripts/worker.sh run $(show "$(workdir)") $(train_command)"
