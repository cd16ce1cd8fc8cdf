#!/bin/sh
# Several nodes, the same command on each: HEAD=node-0 NODES=4 sh torchrun-nodes.sh [FIELD=VALUE ...]
# HEAD is the name of one of them; DATA and OUTPUT are folders that all nodes see.
set -eu
exec torchrun --nnodes="${NODES:-2}" --nproc-per-node="${DEVICES:-8}" \
    --rdzv-backend=c10d --rdzv-endpoint="${HEAD:?the name of one of the nodes}:29500" --rdzv-id="${RUN:-headrace}" \
    -m headrace train "${RECIPE:-paper-340m}" --data "${DATA:-data}" --output "${OUTPUT:-runs/paper-340m}" "$@"
