"""A model's weights against its architecture, and from their file a few rows at a time.

Owns: the check of names and shapes, the size of a read and the check of what came back.  Does not know: where the rows go, or the
file's format.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foredraft.architecture import Architecture, Weight, Weights
from foredraft.types import FloatArray, ModelFileError

CHUNK_BYTES = 4 * 1024 * 1024


def check_weights(architecture: Architecture, weights: Weights) -> None:
    """Every weight of the architecture is there with its shape, and no other.

    Raises:
        ModelFileError: names the tensor.
    """
    shapes = architecture.weight_shapes()
    for name, shape in shapes.items():
        if name not in weights:
            raise ModelFileError(f"tensor {name!r} {shape} is missing from the model; fetch the model again.")
        if tuple(weights[name].shape) != shape:
            raise ModelFileError(
                f"tensor {name!r} must have shape {shape} as the model's config says, not {tuple(weights[name].shape)}; "
                "fetch config and weights of the same model."
            )
    ignored = {"lm_head"} if architecture.tie_embeddings else set()
    unexpected = sorted(set(weights) - set(shapes) - ignored)
    if unexpected:
        raise ModelFileError(
            f"tensor {unexpected[0]!r} has no place in a {architecture.family} model as its config describes it; "
            "fetch config and weights of the same model."
        )


def read_chunks(name: str, weight: Weight) -> Iterator[tuple[int, FloatArray]]:
    """Row offset and float32 rows of a weight, about 4 MiB at a time, so that loading needs no second copy of it.

    Raises:
        ModelFileError: the file gave rows of another shape.
    """
    num_rows, columns = weight.shape[0], weight.shape[1:]
    step = max(1, CHUNK_BYTES // (4 * int(np.prod(columns, dtype=np.int64))))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = weight.read(start, stop)
        if rows.shape != (stop - start, *columns):
            raise ModelFileError(
                f"tensor {name!r} must have shape {weight.shape}, but rows {start} to {stop} came as {rows.shape}; "
                "fetch the model again."
            )
        yield start, np.require(rows, np.float32, ["C", "W"])
