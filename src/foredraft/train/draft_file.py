"""A draft model on disk, in the form of the target that it was made for.

Owns: which of the target's settings it keeps, its tensors' names and formats, and its provenance file.  Does not know: training.

The draft of a ``.gguf`` file is one, with the matrices quantised and the tokenizer cut to the draft's vocabulary; that of a Hugging
Face folder is a folder, in BF16, with the target's tokenizer.  Either is a model like any other.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Architecture
from foredraft.loader import Checkpoint
from foredraft.loader.assemble import STACKS
from foredraft.loader.folder import PARTS as FOLDER_PARTS
from foredraft.loader.folder import read_json
from foredraft.loader.gguf_model import PARTS as GGUF_PARTS
from foredraft.loader.gguf_model import row_order
from foredraft.types import CapacityError, FloatArray

GGUF_NAME, PROVENANCE_NAME = "draft.gguf", "provenance.json"
VOCABULARY_FORMAT, MATRIX_FORMAT = "Q4_0", "Q4_1"
# Columns per quantised block; rows that cannot be cut into those are stored as F16.
QUANTISED_STEP = 32
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_LIST_KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
_MERGES = "tokenizer.ggml.merges"

Tensors = Mapping[str, FloatArray]


def save_draft(
    folder: Path, target: Checkpoint, architecture: Architecture, tensors: Tensors, provenance: Mapping[str, Any]
) -> Path:
    """Write the draft model of canonical ``tensors`` and its provenance to ``folder``; what names it as a model.

    Raises:
        CapacityError: the folder cannot be written.
    """
    with _written(folder):
        path = folder
        if target.path.is_file():
            path = folder / GGUF_NAME
            _replace_whole(path, lambda new: _write_gguf(new, target.path, architecture, tensors))
        else:
            _write_folder(folder, target.path, architecture, tensors)
        text = json.dumps(provenance, indent=2, sort_keys=True) + "\n"
        _replace_whole(folder / PROVENANCE_NAME, lambda new: new.write_text(text, encoding="utf-8"))
    return path


def size_of(path: Path) -> int:
    """Bytes of a model's file, or of the files in its folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CapacityError(f"{folder} cannot be written ({reason}); free some space or choose another place.") from error


def _replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, and put it there once it is whole."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as place:
        new = Path(place) / path.name
        write(new)
        os.replace(new, path)


def _parts(architecture: Architecture, tensors: Tensors) -> Iterator[tuple[str, int | None, FloatArray]]:
    """(part, layer, values) of each tensor as files have them: q, k and v apart, and gate and up."""
    a = architecture
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    for name, values in tensors.items():
        stem = name.rsplit(".", 1)[-1]
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        cuts = [a.intermediate_size] if stem == "gate_up" else [q, q + kv]
        pieces = np.split(values, cuts) if stem in STACKS else [values]
        for part, rows in zip(STACKS.get(stem, (stem,)), pieces, strict=True):
            yield part, layer, np.ascontiguousarray(rows)


# ---------------------------------------------------------------------------------------------------------------- GGUF


def _write_gguf(path: Path, source: Path, architecture: Architecture, tensors: Tensors) -> None:
    from gguf import GGUFReader, GGUFWriter, quants
    from gguf.constants import GGMLQuantizationType, GGUFValueType

    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    family = str(fields.pop("general.architecture").contents())
    writer = GGUFWriter(path, family)
    values = {name: field.contents() for name, field in fields.items()}
    kept = _settings(family, architecture, values)
    for name, value in kept.items():
        types = fields[name].types if name in fields else [GGUFValueType.UINT32]
        writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            writer.add_tensor(tensor.name, np.array(tensor.data))
    for part, layer, rows in _parts(architecture, tensors):
        order = row_order(architecture, part, len(rows))
        stored = rows if order is None else rows[np.argsort(order)]
        kind = GGMLQuantizationType[_format(part, rows)]
        name = GGUF_PARTS[part] if layer is None else f"blk.{layer}.{GGUF_PARTS[part]}"
        writer.add_tensor(name, quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _format(part: str, rows: FloatArray) -> str:
    if rows.ndim == 1:
        return "F32"
    if rows.shape[1] % QUANTISED_STEP:
        return "F16"
    return VOCABULARY_FORMAT if part in ("embed", "lm_head") else MATRIX_FORMAT


def _settings(family: str, architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The target's metadata with the draft's sizes, and its tokenizer without the tokens that the draft does not have."""
    a, prefix = architecture, family + "."
    sizes = {
        "block_count": a.num_layers,
        "embedding_length": a.hidden_size,
        "feed_forward_length": a.intermediate_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "rope.dimension_count": a.head_dim,
        "vocab_size": a.vocab_size,
    }
    kept = {name: value for name, value in values.items() if name != "general.file_type"}
    kept |= {prefix + key: size for key, size in sizes.items()}
    tokens = values["tokenizer.ggml.tokens"][: a.vocab_size]
    for name in _LIST_KEYS:
        if name in kept:
            kept[name] = kept[name][: a.vocab_size]
    if _MERGES in kept:
        known = set(tokens)
        merges = [merge.split(" ", 1) for merge in kept[_MERGES]]
        kept[_MERGES] = [" ".join(pair) for pair in merges if {*pair, "".join(pair)} <= known]
    absent = [name for name, value in kept.items() if name.endswith("_token_id") and value >= len(tokens)]
    return {name: value for name, value in kept.items() if name not in absent}


# -------------------------------------------------------------------------------------------------------------- folder


def _write_folder(folder: Path, source: Path, architecture: Architecture, tensors: Tensors) -> None:
    a = architecture
    config = read_json(source / "config.json") | {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab_size,
        "torch_dtype": "bfloat16",
    }
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: a.num_layers]
    named = {
        ("" if part == "lm_head" else "model.") + (f"layers.{layer}." if layer is not None else "") + _folder_name(part): rows
        for part, layer, rows in _parts(a, tensors)
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    _replace_whole(folder / "config.json", lambda new: new.write_text(text, encoding="utf-8"))
    _replace_whole(folder / "model.safetensors", lambda new: _write_safetensors(new, named))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _folder_name(part: str) -> str:
    return "lm_head.weight" if part == "lm_head" else FOLDER_PARTS[part]


def _write_safetensors(path: Path, named: Mapping[str, npt.NDArray[np.float32]]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.from_numpy(rows).bfloat16() for name, rows in named.items()}, path, metadata={"format": "pt"})
