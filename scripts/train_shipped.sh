#!/usr/bin/env bash
# Makes the drafters that come with foredraft for its demo model again, from texts that the model writes itself.
# It takes about six hours on two cores, most of it for texts and head; where it was stopped it goes on.
# The shipped draft model learned from texts whose questions the model began by itself, and so did the head at first; then it went on
# with others, three times as far as there were more of them. These commands make their like.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-build/shipped/smollm2-135m}
FOREDRAFT=${FOREDRAFT:-.venv/bin/foredraft}
mkdir -p "$OUT"
"$FOREDRAFT" train suffix smollm2-135m --tokens 1400000 --max-bytes 4350000 --out "$OUT/suffix.table"
"$FOREDRAFT" train eagle3 smollm2-135m --tokens 481000 --hours 1.22 --draft-vocab 5632 --out "$OUT/first_eagle3"
"$FOREDRAFT" train eagle3 smollm2-135m --start "$OUT/first_eagle3" --tokens 620000 --hours 0.69 --lr 7e-4 --loss lk --out "$OUT/second_eagle3"
"$FOREDRAFT" train eagle3 smollm2-135m --start "$OUT/second_eagle3" --tokens 1395000 --hours 0.95 --lr 1e-3 --loss lk --out "$OUT/third_eagle3"
"$FOREDRAFT" train eagle3 smollm2-135m --start "$OUT/third_eagle3" --tokens 1395000 --hours 0.36 --lr 6e-4 --loss lk --out "$OUT/eagle3"
"$FOREDRAFT" train draft smollm2-135m --tokens 340000 --hours 0.74 --loss tokens --lr 0.004 --vocab 12288 --out "$OUT/draft_model"
