#!/bin/sh
# One node: DEVICES=8 DATA=data sh torchrun.sh [FIELD=VALUE ...]
set -eu
exec torchrun --standalone --nproc-per-node="${DEVICES:-8}" \
    -m headrace train "${RECIPE:-paper-340m}" --data "${DATA:-data}" --output "${OUTPUT:-runs/paper-340m}" "$@"
