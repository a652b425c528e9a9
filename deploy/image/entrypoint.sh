#!/bin/sh
# The image's entry point: `tilewire` with the container's arguments, as process 1, so that SIGTERM drains it.
set -eu

# KServe and Knative say in PORT where to listen; TILEWIRE_PORT and --port win over it.
if [ -n "${PORT:-}" ] && [ -z "${TILEWIRE_PORT:-}" ]; then
  export TILEWIRE_PORT="$PORT"
fi

# Kernels that the image brings, into the cache of this replica: the root is read-only, and what is missing is compiled there.
if [ -n "$(ls -A /opt/tilewire/kernels)" ] && [ ! -e "$TRITON_CACHE_DIR" ]; then
  cp -R /opt/tilewire/kernels "$TRITON_CACHE_DIR.part"
  mv "$TRITON_CACHE_DIR.part" "$TRITON_CACHE_DIR"
fi

exec tilewire "$@"
