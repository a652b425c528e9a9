#!/bin/sh
# The image's entry point: `tilewire` with the container's arguments, as process 1, so that SIGTERM drains it.
set -eu

# KServe and Knative say in PORT where to listen; TILEWIRE_PORT and --port win over it.
if [ -n "${PORT:-}" ] && [ -z "${TILEWIRE_PORT:-}" ]; then
  export TILEWIRE_PORT="$PORT"
fi

# Kernels that the image brings, into the cache of this replica, which is writable: what it lacks is compiled there. All at once into a
# new cache, and one by one into one that is there, each renamed when whole: neither an older image's cache nor a start that was
# cut short leaves one out or half there.
kernels="${0%/*}/../kernels"
if [ -d "$kernels" ] && [ ! -e "$TRITON_CACHE_DIR" ]; then
  mkdir -p "$(dirname "$TRITON_CACHE_DIR")"
  rm -rf "$TRITON_CACHE_DIR.part"
  cp -R "$kernels/." "$TRITON_CACHE_DIR.part"
  mv "$TRITON_CACHE_DIR.part" "$TRITON_CACHE_DIR"
fi
mkdir -p "$TRITON_CACHE_DIR"
for kernel in "$kernels"/*; do
  there="$TRITON_CACHE_DIR/${kernel##*/}"
  if [ -e "$kernel" ] && [ ! -e "$there" ]; then
    rm -rf "$there.part"
    cp -R "$kernel" "$there.part"
    mv "$there.part" "$there"
  fi
done

exec tilewire "$@"
