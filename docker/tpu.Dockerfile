# The package for Cloud TPU, built from the wheel of this tree. At its top:
#
#   docker build --file=docker/tpu.Dockerfile --tag=exgrpo_jax:tpu .
#   docker run --init --privileged --network=host --volume="$PWD/runs:/runs" exgrpo_jax:tpu \
#     exgrpo train --config=smoke --workdir=/runs/smoke
#
# --privileged and --network=host are what a TPU VM asks for. The scripts in tpu_scripts/ need no
# image: they install the tree on the workers.
FROM python:3.12-slim AS build
WORKDIR /tree
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY configs configs
COPY exgrpo_jax exgrpo_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheel .

FROM python:3.12-slim
ARG EXTRAS=tpu,gcs,wandb
# The version is that of the wheel.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    set -- /wheel/*.whl && pip install --no-cache-dir "$1[$EXTRAS]"
WORKDIR /runs
CMD ["exgrpo"]
