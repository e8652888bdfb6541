# An image with the package for Cloud TPU, built from this clone. Run these commands in the clone's top folder:
#
#   docker build --file=docker/tpu.Dockerfile --tag=exgrpo_jax:tpu .
#   docker run --init --privileged --network=host --volume="$PWD/runs:/runs" exgrpo_jax:tpu \
#     exgrpo train --config=smoke --workdir=/runs/smoke
#
# On a TPU VM, containers need --privileged and --network=host to use the TPU. The scripts in
# tpu_scripts/ do not need this image, because they install the clone on the workers.
FROM python:3.12-slim AS build
WORKDIR /tree
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY configs configs
COPY exgrpo_jax exgrpo_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheel .

FROM python:3.12-slim
ARG EXTRAS=tpu,gcs,wandb
# The package's version is the wheel's version.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    set -- /wheel/*.whl && pip install --no-cache-dir "$1[$EXTRAS]"
WORKDIR /runs
CMD ["exgrpo"]
