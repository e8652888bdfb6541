# shellcheck shell=bash disable=SC2034
# What the scripts here need to know; they read this file, or the one given as --variables=FILE.
# Fill it in, or keep a copy for each run. A script refuses to start without what it needs.

# The Google Cloud project's id, as `gcloud projects list` prints it.
PROJECT=''

# The zone, such as us-west4-a: one where you have quota for ACCELERATOR_TYPE.
ZONE=''

# The name of the slice, of its queued resource and on GKE of the workload; one for each run. Small
# letters, digits and dashes.
NAME=''

# The slice. v5litepod-16 is v5e:4x4 of the table in README.md; CONFIG must fit it.
ACCELERATOR_TYPE='v5litepod-16'

# The image of the TPU VMs, by kind of TPU: v2-alpha-tpuv5-lite for v5e, v2-alpha-tpuv6e for v6e.
RUNTIME_VERSION='v2-alpha-tpuv5-lite'

# yes: Spot VMs, cheaper, and taken away at any moment; no: on demand.
SPOT=''

# The bucket for checkpoint, data and results, without gs://, with a hierarchical namespace.
BUCKET=''

# The run's folder in BUCKET, such as runs/qwen2_5_math_1_5b: training's --workdir.
RUN=''

# The service account's address that the TPU VMs work as; it may read and write BUCKET.
SERVICE_ACCOUNT=''

# Training's --config, a file of this repository.
CONFIG='configs/qwen2_5_math_1_5b.py'

# Training's other flags. What begins with gs:// is read from there.
TRAIN_FLAGS=(
  "--config.model.path=gs://$BUCKET/Qwen2.5-Math-1.5B"
  "--config.data.train=gs://$BUCKET/openr1_math_46k.parquet"
  "--config.data.evaluation=(\"gs://$BUCKET/math_benchmarks.parquet\",)"
)

# Seconds between two looks at the slice while a script waits.
POLL_SECONDS=60

# resume.sh gives up after so many failures of training in a row without a new checkpoint between
# them. A slice that is taken away is no failure.
MAX_FAILURES=5

# GKE only: the cluster's name.
CLUSTER=''

# GKE only: the image that holds Python; the project is installed on top when a pod starts.
DOCKER_IMAGE='python:3.12'

# GKE only: how often the workload is started again in all, preemptions included.
MAX_RESTARTS=50
