#!/usr/bin/env bash
# What PyPI alone gives to the demo: pip's own resolution here, uv's for every supported Python and platform. Installs nothing.
# The user's pip is not asked: no configuration, no extra index, no folder of wheels, an empty home.
#
#   PY=.venv/bin/python packaging/resolve.sh
set -euo pipefail
cd "$(dirname "$0")/.."
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
PY=$(cd "$(dirname "$PY")" && pwd)/$(basename "$PY")  # cwd-proof, but not resolved: a venv's python is a link
for name in $(env | sed -n 's/^\(\(PIP\|UV\)_[A-Z_]*\)=.*/\1/p'); do
  case $name in PIP_CERT | PIP_DEFAULT_TIMEOUT) ;; *) unset "$name" ;; esac
done
export HOME=$home XDG_CONFIG_DIRS=$home PIP_CONFIG_FILE=/dev/null UV_NO_CONFIG=1
export MACOSX_DEPLOYMENT_TARGET=14.0  # the oldest macOS that torch 2.13 has a wheel for

"$PY" -m venv "$home/venv"  # nothing is installed in it, so everything must come from PyPI
"$home/venv/bin/python" -m pip install --dry-run --quiet --disable-pip-version-check -c constraints.txt -e . > /dev/null
echo "pip finds on PyPI what the demo needs, for this Python and machine"

for python in 3.11 3.12 3.13; do
  for platform in x86_64-manylinux_2_28 aarch64-manylinux_2_28 aarch64-apple-darwin; do
    "$(dirname "$PY")/uv" pip compile --quiet --only-binary :all: --no-header \
      --python-version "$python" --python-platform "$platform" \
      -c constraints.txt pyproject.toml > "$home/resolved.txt"
    echo "Python $python, $platform: $(grep -c '^[a-z]' "$home/resolved.txt") packages, $(grep '^torch==' "$home/resolved.txt")"
  done
done
