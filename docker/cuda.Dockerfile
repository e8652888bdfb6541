# The package for NVIDIA GPUs, built from the wheel of this tree. At its top:
#
#   docker build --file=docker/cuda.Dockerfile --tag=exgrpo_jax:cuda .
#   docker run --init --gpus=all --volume="$PWD/runs:/runs" exgrpo_jax:cuda \
#     exgrpo train --config=smoke --workdir=/runs/smoke
#
# jax's wheels bring CUDA; the machine needs its driver and the NVIDIA Container Toolkit.
# --build-arg=EXTRAS=cuda13,wandb takes CUDA 13. What is fetched and compiled outlives the container with
# --volume=exgrpo:/root/.cache.
FROM python:3.12-slim AS build
WORKDIR /tree
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY configs configs
COPY exgrpo_jax exgrpo_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheel .

FROM python:3.12-slim
ARG EXTRAS=cuda12,wandb
# The version is that of the wheel.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    set -- /wheel/*.whl && pip install --no-cache-dir "$1[$EXTRAS]"
WORKDIR /runs
CMD ["exgrpo"]
