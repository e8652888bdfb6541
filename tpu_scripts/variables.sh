# shellcheck shell=bash disable=SC2034
# The variables of the scripts in this folder. Fill in this file, or make a copy for each run and
# pass it as --variables=FILE. A script refuses to start if a variable that it needs is empty.

# The id of the Google Cloud project, as `gcloud projects list` prints it.
PROJECT=''

# A zone in which you have quota for ACCELERATOR_TYPE, such as us-west4-a.
ZONE=''

# The name of the slice, of its queued resource and, on GKE, of the workload. Use a different name
# for each run, with lowercase letters, digits and dashes.
NAME=''

# The type of the slice. v5litepod-16 is called v5e:4x4 in docs/slices.md. The number in a v5p type
# counts cores, two per chip, so v5p-128 is v5p:4x4x4. CONFIG must fit on the slice.
ACCELERATOR_TYPE='v5litepod-16'

# The image of the TPU VMs, by TPU generation: v2-alpha-tpuv5-lite for v5e, v2-alpha-tpuv5 for v5p,
# v2-alpha-tpuv6e for v6e.
RUNTIME_VERSION='v2-alpha-tpuv5-lite'

# yes: Spot VMs, which are cheaper but can be preempted at any time. no: on-demand VMs.
SPOT=''

# The bucket for checkpoints, data and results, without gs://. It needs a hierarchical namespace.
BUCKET=''

# The run's folder in BUCKET, such as runs/qwen2_5_math_1_5b. Training uses it as --workdir.
RUN=''

# The email address of the TPU VMs' service account, which needs read and write access to BUCKET.
SERVICE_ACCOUNT=''

# The --config flag for training: a file in this repository, or the name of a file in configs/.
CONFIG='configs/qwen2_5_math_1_5b.py'

# The other flags for training. Paths that begin with gs:// are read from the bucket.
TRAIN_FLAGS=(
  "--config.model.path=gs://$BUCKET/Qwen2.5-Math-1.5B"
  "--config.data.validation=(\"gs://$BUCKET/valid.parquet\",)"
)

# A file with lines NAME=value, which become environment variables for training only. Put secrets
# into this file, such as WANDB_API_KEY=… if TRAIN_FLAGS sets config.metrics.wandb_project, because
# they must not appear on a command line or in a log. Only you should be able to read the file
# (chmod 600). Empty: no file.
ENV_FILE=''

# A Python on this machine that has this package (pip install -e .): a path, absolute or relative to
# the tree. resume.sh uses it to check CONFIG and TRAIN_FLAGS before it requests a slice.
PYTHON='.venv/bin/python'

# Seconds between two checks of the slice while a script waits.
POLL_SECONDS=60

# resume.sh gives up if training fails more than this many times in a row without a new checkpoint.
# A preemption is not a failure.
MAX_FAILURES=5

# GKE only: the name of the cluster.
CLUSTER=''

# GKE only: the image that provides Python. This tree is installed in it when a pod starts.
DOCKER_IMAGE='python:3.12'

# GKE only: the maximum number of restarts of the workload, including restarts after preemptions.
MAX_RESTARTS=50
