#!/usr/bin/env bash
# Build the kernels with sanitizers in a temporary folder and run their test program there.
#
# Usage: scripts/sanitize_kernels.sh [SANITIZERS ...], one build for each argument; by default address,undefined.  Also of use: thread.
# Needs a compiler with these sanitizers and CMake, here or in .venv; no Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cmake=$(command -v cmake || echo .venv/bin/cmake)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for sanitizers in "${@:-address,undefined}"; do
  echo "== kernels with -fsanitize=$sanitizers"
  "$cmake" -S . -B "$folder/$sanitizers" -DFOREDRAFT_SANITIZE="$sanitizers" >"$folder/log" || { cat "$folder/log"; exit 1; }
  "$cmake" --build "$folder/$sanitizers" --parallel 2 >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  "$folder/$sanitizers/test_kernels"
done
