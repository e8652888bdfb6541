#!/usr/bin/env bash
# Creates a GKE cluster with one slice through xpk, and attaches the bucket to its pods as storage.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'gke_create.sh' '' "$@"
need PROJECT ZONE CLUSTER ACCELERATOR_TYPE SPOT BUCKET

capacity=--on-demand
[[ $SPOT == no ]] || capacity=--spot
run xpk cluster create --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --tpu-type="$ACCELERATOR_TYPE" --num-slices=1 "$capacity" --enable-gcsfuse-csi-driver
# worker.sh uses the same options on TPU VMs, and explains them.
mount_options='metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0'
mount_options+=',write:enable-streaming-writes:false'
run xpk storage attach exgrpo-bucket --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --type=gcsfuse --bucket="$BUCKET" --mount-point="/mnt/$BUCKET" --readonly=false \
  --auto-mount=false --size=1 --mount-options="$mount_options"
