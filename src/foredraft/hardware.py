"""Accelerators by name, and what a pass takes on one by arithmetic alone.

Owns: the table of data sheets, hardware files, and the roofline (Williams et al., 2009, "Roofline: an insightful visual performance
model").  Does not know: speculation, or the machine that this runs on; that one is measured.

How much of a data sheet's figures a real engine reaches is not known, only bracketed: hence three ``Efficiency`` values, and an
interval for all that follows from them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from foredraft.dims import ModelDims
from foredraft.types import ConfigError, refuse_unknown

GIB = 1024**3
TERA = 1e12
BYTES_PER_VALUE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class Hardware:
    """One accelerator: bytes/s, dense FLOP/s by format of the weights, bytes of memory, and where the figures are from.

    Figures of sparse arithmetic, which data sheets print larger, must be halved.

    Raises:
        ConfigError: a figure that no machine has; the message names it.
    """

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory_bytes: float
    source: str

    def __post_init__(self) -> None:
        figures = {"bandwidth": self.bandwidth, "memory_bytes": self.memory_bytes}
        figures |= {f"flops of {dtype}": value for dtype, value in self.flops.items()}
        for name, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"hardware {self.name}: {name} must be a finite number above 0, not {value!r}; correct it.")
        if not self.flops:
            raise ConfigError(f"hardware {self.name}: flops must name at least one of {', '.join(BYTES_PER_VALUE)}; add one.")
        for dtype in self.flops:
            refuse_unknown(f"format in the flops of hardware {self.name}", dtype, BYTES_PER_VALUE)


def _gpu(name: str, bandwidth_gb: float, gigabytes: float, source: str, **teraflops: float) -> Hardware:
    return Hardware(name, bandwidth_gb * 1e9, {dtype: value * TERA for dtype, value in teraflops.items()}, gigabytes * GIB, source)


# Tensor cores with float32 accumulation, dense.  A "GB" of a data sheet's memory is 2^30 bytes to the driver, or nearly.
HARDWARE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu(
            "a100", 2039, 80, "NVIDIA A100 80GB SXM data sheet, 2021",
            bfloat16=312, float16=312, float32=19.5,
        ),
        _gpu(
            "h100", 3350, 80, "NVIDIA H100 SXM data sheet, 2023 (1,979 and 3,958 TFLOPS with sparsity, halved)",
            bfloat16=989.5, float16=989.5, fp8=1979, float32=67,
        ),
        _gpu(
            "h200", 4800, 141, "NVIDIA H200 SXM data sheet, 2024 (1,979 and 3,958 TFLOPS with sparsity, halved)",
            bfloat16=989.5, float16=989.5, fp8=1979, float32=67,
        ),
        _gpu(
            "b200", 8000, 180, "NVIDIA DGX B200 data sheet, 2024 (an eighth of 1,440 GB, 64 TB/s and 72 PFLOPS FP8 with sparsity)",
            bfloat16=2250, float16=2250, fp8=4500,
        ),
        _gpu(
            "l4", 300, 24, "NVIDIA L4 data sheet, 2023 (242 and 485 TFLOPS with sparsity, halved)",
            bfloat16=121, float16=121, fp8=242.5, float32=30.3,
        ),
        _gpu(
            "l40s", 864, 48, "NVIDIA L40S data sheet, 2023 (the dense figures)",
            bfloat16=362.05, float16=362.05, fp8=733, float32=91.6,
        ),
        _gpu(
            "rtx3090", 936, 24, "NVIDIA Ampere GA102 white paper, 2020 (float32 accumulation)",
            bfloat16=71, float16=71, float32=35.6,
        ),
        _gpu(
            "rtx4090", 1008, 24, "NVIDIA Ada GPU architecture white paper, 2022 (float32 accumulation)",
            bfloat16=165.2, float16=165.2, fp8=330.3, float32=82.6,
        ),
        _gpu(
            "mi300x", 5300, 192, "AMD Instinct MI300X data sheet, 2023",
            bfloat16=1307.4, float16=1307.4, fp8=2614.9, float32=163.4,
        ),
    )
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """An entry of the table, or what the file of that name describes.

    Raises:
        ConfigError: neither, or a file that is wrong.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if name.endswith(".json") or os.sep in name or Path(name).is_file():
        return load_hardware(name)
    refuse_unknown("hardware", name, [*HARDWARE, "this"])
    raise AssertionError(name)


def load_hardware(path: str) -> Hardware:
    """A JSON file: ``{"bandwidth_gb_per_s", "tflops": {"bfloat16": ...}, "memory_gib"}``, and ``name`` and ``source`` if wanted.

    Raises:
        ConfigError: unreadable, not JSON, a missing, unknown or impossible field.
    """
    try:
        values: Any = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such home, or brackets too deep
        raise ConfigError(f"hardware file {path} cannot be read as JSON ({error}); mend it.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"hardware file {path} must hold a JSON object, not a {type(values).__name__}; mend it.")
    for name in values:
        refuse_unknown(f"field of hardware file {path}:", name, ("name", "source", "bandwidth_gb_per_s", "tflops", "memory_gib"))
    for name in ("bandwidth_gb_per_s", "tflops", "memory_gib"):
        if name not in values:
            raise ConfigError(f"hardware file {path} has no {name}; add it.")
    if not isinstance(values["tflops"], dict):
        raise ConfigError(f'hardware file {path}: tflops must be an object such as {{"bfloat16": 312}}; mend it.')
    return Hardware(
        str(values.get("name", Path(path).stem)),
        _times(values["bandwidth_gb_per_s"], 1e9),
        {dtype: _times(value, TERA) for dtype, value in values["tflops"].items()},
        _times(values["memory_gib"], GIB),
        str(values.get("source", path)),
    )


def _times(value: Any, unit: float) -> Any:
    """In the unit's base; what is no number stays, for Hardware to refuse."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    try:
        return value * unit
    except OverflowError:
        return math.inf


# ------------------------------------------------------------------------------------------------ the roofline


@dataclass(frozen=True)
class Efficiency:
    """What of a data sheet is reached: shares of ``bandwidth`` and ``compute``, and seconds per layer that neither explains.

    ``layer_seconds`` are launches and small kernels; ``link_seconds`` the exchanges between GPUs that share a layer.
    """

    bandwidth: float
    compute: float
    layer_seconds: float
    link_seconds: float


# The published speeds of gpt-fast on A100s (README, 2024: Llama 2 7B and 70B on 1 to 8 GPUs) lie within what these give; a test
# checks it.  The share of compute is what large matrix products of libraries reach, 60-80 %, less for the shapes of a decode step.
LEAST = Efficiency(0.6, 0.4, 30e-6, 60e-6)
MIDDLE = Efficiency(0.75, 0.6, 12e-6, 35e-6)
MOST = Efficiency(0.9, 0.8, 4e-6, 10e-6)


def efficiencies() -> list[Efficiency]:
    """The middle one first, then every combination of extremes: a ratio of two passes may be extreme at any of them."""
    ends = [(getattr(LEAST, name), getattr(MOST, name)) for name in ("bandwidth", "compute", "layer_seconds", "link_seconds")]
    return [MIDDLE, *(Efficiency(*values) for values in product(*ends))]


@dataclass(frozen=True)
class Roofline:
    """Seconds of passes of one model on ``num_gpus`` of one kind, which share every layer's weights, heads and cache evenly."""

    hardware: Hardware
    dims: ModelDims
    dtype: str
    efficiency: Efficiency
    num_gpus: int = 1

    def seconds(self, num_rows: float, num_seqs: float, context: float) -> float:
        """A pass of ``num_rows`` rows of ``num_seqs`` sequences, each of which has ``context`` cached tokens.

        The weights are read once while all rows are multiplied with them, whichever takes longer; so are keys and values, which
        the rows of one sequence share.
        """
        dims, how = self.dims, self.efficiency
        bandwidth = self.hardware.bandwidth * how.bandwidth * self.num_gpus
        flops = self.hardware.flops[self.dtype] * how.compute * self.num_gpus
        weights = max(dims.pass_params * BYTES_PER_VALUE[self.dtype] / bandwidth, 2 * dims.pass_params * num_rows / flops)
        kv_bytes = num_seqs * context * dims.kv_per_token * kv_bytes_per_value(self.dtype)
        scores = 4 * dims.num_layers * dims.attention_width * context * num_rows
        layer = how.layer_seconds + (how.link_seconds if self.num_gpus > 1 else 0.0)
        return weights + max(kv_bytes / bandwidth, scores / flops) + dims.num_layers * layer


def kv_bytes_per_value(dtype: str) -> int:
    """Bytes of a cached value: 16 bits also where the weights have 8, as vLLM keeps them unless told otherwise."""
    return max(2, BYTES_PER_VALUE[dtype])
