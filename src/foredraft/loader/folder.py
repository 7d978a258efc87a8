"""A Hugging Face folder: settings, safetensors weights and tokenizer.

Owns: where a folder keeps what, and reading rows out of safetensors files.  Does not know: what the settings mean.
Pickled weights are never read: unpickling runs code from the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Architecture, Weight, Weights
from foredraft.loader.assemble import assemble, shifted
from foredraft.loader.tokenizer import Tokenizer, chat_renderer
from foredraft.types import FloatArray, ModelFileError, UnsupportedModelError

Bytes = npt.NDArray[np.uint8]

STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
PARTS = {
    "embed": "embed_tokens.weight",
    "norm": "norm.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
SANDWICH_PARTS = {
    **PARTS,
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
# Tensors beside the decoder that a text model has no use for: the vision part of Gemma 3, and tables of old checkpoints.
IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a folder: ``shapes``, ``formats`` and bytes by name; ``files`` are the memory-mapped files themselves."""

    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str]
    contents: Mapping[str, Bytes]
    files: tuple[Bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(len(file) for file in self.files)

    def weight(self, name: str) -> Weight:
        """One tensor, read by rows."""
        shape, format, content = self.shapes[name], self.formats[name], self.contents[name]

        def read(start: int, stop: int) -> FloatArray:
            assert 0 <= start <= stop <= shape[0], (name, start, stop, shape)
            return as_float32(content.view(STORED_AS[format]).reshape(shape)[start:stop], format)

        return Weight(shape, format, read)


def as_float32(values: npt.NDArray[Any], format: str) -> FloatArray:
    """A copy of values as they are stored; a BF16 number, which numpy does not have, is the upper half of a float32."""
    if format != "BF16":
        return np.array(values, np.float32)
    return (np.array(values, np.uint32) << 16).view(np.float32)


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file; an absent optional file reads as empty.

    Raises:
        ModelFileError: unreadable, or not a JSON object.
    """
    if not required and not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON ({error}); fetch it again.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not a {type(values).__name__}; fetch it again.")
    return values


def open_tensors(folder: Path, also: tuple[str, ...] = ()) -> TensorFiles:
    """Open ``model.safetensors``, or every shard that ``model.safetensors.index.json`` names.

    ``also`` names further formats that may be there; ``TensorFiles.weight`` cannot read those.

    Raises:
        ModelFileError: a file is missing, truncated or corrupt; or there are only pickled weights.
        UnsupportedModelError: a tensor in a format other than F32, F16 and BF16, and those of ``also``.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    formats: dict[str, str] = {}
    contents: dict[str, Bytes] = {}
    files = []
    paths, expected = _weight_files(folder)
    for path in paths:
        table, file = _open_file(path)
        files.append(file)
        for name, (format, shape, content) in table.items():
            shapes[name], formats[name], contents[name] = shape, format, content
    for name in expected:
        if name not in shapes:
            raise ModelFileError(f"{folder} has no tensor {name}, which its index names; fetch the folder again.")
    for name, format in formats.items():
        if format not in STORED_AS and format not in also:
            raise UnsupportedModelError(f"{folder}: tensor {name} is stored as {format}; only {', '.join(STORED_AS)} can be read.")
    return TensorFiles(shapes, formats, contents, tuple(files))


def _open_file(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], Bytes]], Bytes]:
    """Format, shape and bytes of each tensor of a file, and the file.

    The library checks the header against the file.  It is read again here because the library hands out values only as tensors
    of a framework, and numpy's have no BF16.
    """
    from safetensors import SafetensorError, safe_open

    open_file: Any = safe_open  # its type stubs are incomplete
    try:
        with open_file(path, framework="np"):
            file = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelFileError(f"{path} is missing, truncated or corrupt ({error}); fetch it again.") from error
    start = 8 + int.from_bytes(file[:8].tobytes(), "little")
    table = json.loads(file[8:start].tobytes())
    table.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), file[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in table.items()
    }, file


def _weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], []
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelFileError(
                f"{folder} has pickled weights only, and those are never loaded because unpickling can run code; "
                "convert the model to safetensors with transformers' save_pretrained."
            )
        raise ModelFileError(f"{folder} has neither model.safetensors nor model.safetensors.index.json; fetch the weights.")
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ModelFileError(f"{index} has no weight_map of file names; fetch it again.")
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index} names the file {name!r}; shards must be .safetensors files inside the folder.")
        if not (folder / name).is_file():
            raise ModelFileError(f"{folder} lacks the shard {name}; fetch it.")
    return [folder / name for name in names], list(table)


def folder_weights(folder: Path, files: TensorFiles, architecture: Architecture) -> Weights:
    """The canonical weights.

    Raises:
        ModelFileError: a tensor is missing or has the wrong shape.
        UnsupportedModelError: a tensor that the architecture has no use for.
    """
    gemma = architecture.family == "gemma3"
    names = SANDWICH_PARTS if architecture.sandwich_norms else PARTS
    roots = [name.removesuffix(names["embed"]) for name in files.shapes if name.endswith(names["embed"])]
    root = min(roots, key=len) if roots else "model."
    heads = [name for name in files.shapes if name.endswith("lm_head.weight")]
    used = set(heads) if architecture.tie_embeddings else set()

    def open_part(part: str, layer: int | None) -> Weight:
        if part == "lm_head":
            name = heads[0] if heads else "lm_head.weight"
        else:
            name = root + (names[part] if layer is None else f"layers.{layer}.{names[part]}")
        if name not in files.shapes:
            raise ModelFileError(
                f"{folder} has no tensor {name}; the weights are incomplete or of another model, fetch them again."
            )
        used.add(name)
        # Gemma's checkpoints store how far a norm's factor lies above 1.
        return shifted(files.weight(name), 1.0) if gemma and part.endswith("norm") else files.weight(name)

    weights = assemble(architecture, open_part)
    unused = sorted(
        name for name in set(files.shapes) - used if not (name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES))
    )
    if unused:
        raise UnsupportedModelError(
            f"{folder} holds the tensor {unused[0]}, which a plain {architecture.family} model does not have; "
            "choose a checkpoint without it."
        )
    return weights


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``tokenizer.json`` with the chat template of the folder.

    Raises:
        UnsupportedModelError: there is no ``tokenizer.json``.
        ModelFileError: it cannot be read.
    """
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library raises bare Exception for a broken tokenizer.json
        raise ModelFileError(f"the tokenizer of {folder} cannot be read ({error}); fetch it again.") from error
    render = chat_renderer(lambda: tokenizer) if tokenizer.chat_template else None
    return Tokenizer(tokenizer.backend_tokenizer, bos_id=tokenizer.bos_token_id, eos_id=tokenizer.eos_token_id, render=render)


def folder_eos_ids(folder: Path, config: Mapping[str, Any]) -> set[int]:
    """End-of-sequence ids of ``generation_config.json`` and ``config.json``."""
    text_config = config.get("text_config")
    sources = [config, read_json(folder / "generation_config.json", required=False)]
    sources += [text_config] if isinstance(text_config, Mapping) else []
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, int))
    return ids
