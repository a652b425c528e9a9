# Tilewire in a container: one file for CUDA, for ROCm and for machines without a GPU. docs/operations/deployment.md has the command lines.
#
#   BASE_IMAGE   a Debian or Ubuntu with Python 3.11 or newer. torch comes from it where it has one (pytorch/pytorch, rocm/pytorch);
#                where it has none, the CPU build is installed. Everything else is pinned by constraints/cpu.txt.
#   PRECOMPILE   for which devices kernels are compiled into the image, such as "cuda:80 cuda:90" or "hip:gfx942"; empty for none.
#
# It runs as user 10001 without capabilities, on a read-only root. Writable: /tmp (compilers and drivers; a few MiB) and
# /var/cache/tilewire (kernels that are compiled later; one per replica). It needs nothing of /dev/shm: arenas are memfds and
# count towards the memory limit.
ARG BASE_IMAGE=pytorch/pytorch:2.12.0-cuda12.6-cudnn9-runtime

# A compiler and Python's headers stay in the image: on ROCm Triton 3.6 compiles a launcher for each signature.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS base
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY deploy/set_up.py deploy/
COPY kernels kernels
COPY service service
COPY tilewire tilewire
# Where packages come from, when it is not the default index, is a secret of the build and leaves no trace in a layer.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 python3 deploy/set_up.py --venv /opt/tilewire --extra server --image \
    && /opt/tilewire/bin/python -m pip list --format=freeze > /opt/tilewire/packages.txt
ARG PRECOMPILE="cuda:90"
RUN set --; for target in ${PRECOMPILE}; do set -- "$@" --target "${target}"; done; mkdir /opt/tilewire/kernels; \
    if [ "$#" -gt 0 ]; then /opt/tilewire/bin/tilewire precompile "$@" --cache /opt/tilewire/kernels; fi

FROM base AS runtime
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tilewire" \
      org.opencontainers.image.description="GPU linear algebra over HTTP: products, softmax, exact search, reductions, and programs of them" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      tilewire.writable="/tmp /var/cache/tilewire" \
      tilewire.packages="/opt/tilewire/packages.txt"
COPY --from=build /opt/tilewire /opt/tilewire
COPY deploy/image/entrypoint.sh deploy/image/health.py /opt/tilewire/bin/
RUN install -d -o 10001 -g 10001 -m 0755 /var/cache/tilewire
ENV PATH=/opt/tilewire/bin:${PATH} \
    HOME=/var/cache/tilewire \
    TMPDIR=/tmp \
    TRITON_CACHE_DIR=/var/cache/tilewire/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    TILEWIRE_HOST=0.0.0.0 \
    TILEWIRE_LOG_FORMAT=json
USER 10001:10001
WORKDIR /tmp
VOLUME ["/tmp", "/var/cache/tilewire"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["/opt/tilewire/bin/python", "-I", "/opt/tilewire/bin/health.py"]
ENTRYPOINT ["/opt/tilewire/bin/entrypoint.sh"]
CMD ["serve"]
