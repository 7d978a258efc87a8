#!/usr/bin/env bash
# Makes the drafters that come with foredraft for its demo model again, from texts that the model writes itself.
# It takes about four hours on two cores, most of it for head and draft model; where it was stopped it goes on.
# Those two that are shipped learned from texts whose questions the model began by itself, and these commands make their like.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-build/shipped/smollm2-135m}
FOREDRAFT=${FOREDRAFT:-.venv/bin/foredraft}
mkdir -p "$OUT"
"$FOREDRAFT" train suffix smollm2-135m --tokens 640000 --out "$OUT/suffix.table"
"$FOREDRAFT" train eagle3 smollm2-135m --tokens 481000 --hours 1.22 --draft-vocab 5632 --out "$OUT/eagle3"
"$FOREDRAFT" train draft smollm2-135m --tokens 340000 --hours 0.74 --loss tokens --lr 0.004 --vocab 12288 --out "$OUT/draft_model"
