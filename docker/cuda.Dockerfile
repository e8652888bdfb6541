# An image with the package for NVIDIA GPUs, built from this clone. Run these commands in the clone's top folder:
#
#   docker build --file=docker/cuda.Dockerfile --tag=exgrpo_jax:cuda .
#   docker run --init --gpus=all --volume="$PWD/runs:/runs" exgrpo_jax:cuda \
#     exgrpo train --config=smoke --workdir=/runs/smoke
#
# JAX's wheels include CUDA. The machine only needs the NVIDIA driver and the NVIDIA Container Toolkit.
# For CUDA 13, build with --build-arg=EXTRAS=cuda13,wandb. To keep downloads and compiled programs for
# the next container, run with --volume=exgrpo:/root/.cache.
FROM python:3.12-slim AS build
WORKDIR /tree
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY configs configs
COPY exgrpo_jax exgrpo_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheel .

FROM python:3.12-slim
ARG EXTRAS=cuda12,wandb
# The package's version is the wheel's version.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    set -- /wheel/*.whl && pip install --no-cache-dir "$1[$EXTRAS]"
WORKDIR /runs
CMD ["exgrpo"]
