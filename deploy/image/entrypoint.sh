#!/bin/sh
# The image's entry point: `tilewire` with the container's arguments, as process 1, so that SIGTERM drains it.
set -eu

# KServe and Knative say in PORT where to listen; TILEWIRE_PORT and --port win over it.
if [ -n "${PORT:-}" ] && [ -z "${TILEWIRE_PORT:-}" ]; then
  export TILEWIRE_PORT="$PORT"
fi

# Kernels that the image brings, into the cache of this replica, which is writable: what it lacks is compiled there. One by one and
# renamed when whole, so that neither an older image's cache nor a start that was cut short leaves one out or half there.
kernels="$(dirname "$0")/../kernels"
mkdir -p "$TRITON_CACHE_DIR"
for kernel in "$kernels"/*; do
  there="$TRITON_CACHE_DIR/$(basename "$kernel")"
  if [ -e "$kernel" ] && [ ! -e "$there" ]; then
    rm -rf "$there.part"
    cp -R "$kernel" "$there.part"
    mv "$there.part" "$there"
  fi
done

exec tilewire "$@"
