"""Options that several commands share, and how they are read.

Owns: their names, help texts and forms.  Does not know: any command.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id or an alias.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of one answer.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; drawn and printed when not given.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that make up this much probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Sample from tokens at least this likely, relative to the likeliest.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; may be repeated.")]
JsonSchema = Annotated[str | None, typer.Option(metavar="JSON|FILE", help="Answer with JSON that this schema allows.")]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", help="Answer with a text that matches as a whole.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Answer with one of these texts; to be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")]
Speculative = Annotated[
    str | None,
    typer.Option("--speculative-config", metavar="JSON", help='As {"method": "ngram"} or {"method": "none"}; auto without.'),
]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Mark the tokens that came from accepted drafts.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Ops = Annotated[str | None, typer.Option(help="auto, native or torch.")]
# As the name of a file; a bench's last line there is JSON in any case.
STANDARD_OUTPUT = Path("-")
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together; the model's own when not given.")]
KvMemory = Annotated[str | None, typer.Option("--kv-cache-memory", metavar="SIZE", help="As 512MB, 1GiB or a number of bytes.")]


def check_output(option: str, path: Path | None) -> None:
    """Find out now rather than after minutes of measuring that a file could not be written; None is none.

    Raises:
        ConfigError: it could not.
    """
    if path is None:
        return
    from foredraft.array_file import is_special

    try:
        is_wrong = path.is_dir() or (path.exists() and not os.access(path, os.W_OK))
        # A file is written beside its place first; a device or a pipe as it is.
        is_wrong = is_wrong or not (is_special(path) or os.access(path.resolve().parent, os.W_OK))
    except (OSError, RuntimeError):  # a name too long, a folder that may not be entered, a loop of links
        is_wrong = True
    if is_wrong:
        from foredraft.types import ConfigError

        raise ConfigError(f"{option} must name a file in a folder that can be written to, not {str(path)!r}; choose another.")


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave; the others keep the defaults of the classes that they go to."""
    return {name: value for name, value in options.items() if value is not None}


def structured_outputs(json_schema: str | None, regex: str | None, choice: list[str] | None) -> dict[str, Any]:
    """The option ``structured_outputs`` of SamplingParams; nothing when no shape is asked for.

    ``json_schema`` is the schema itself where it begins like one, else the path of its file.

    Raises:
        RequestError: the file cannot be read, or two shapes are asked for.
    """
    shapes = given(regex=regex, choice=choice or None)
    if json_schema is not None:
        shapes["json"] = json_schema if json_schema.lstrip().startswith("{") else _read_schema(json_schema)
    return {"structured_outputs": shapes} if shapes else {}


def _read_schema(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        from foredraft.types import RequestError

        reason = "it is no UTF-8 text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        raise RequestError(f"the schema {path} cannot be read ({reason}); give a file, or the schema itself.") from error


def parse_bytes(text: str | None) -> int | None:
    """A size such as ``512MB``, ``1GiB``, ``1.5 GiB`` or ``1000000`` in bytes; None for None.

    Raises:
        ConfigError: it is none of these.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        from foredraft.types import ConfigError

        raise ConfigError(f"kv_cache_memory must be a size like 512MB, 1GiB or a number of bytes, not {text!r}; write it so.")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def engine_options(
    device: str | None, dtype: str | None, ops: str | None, threads: int | None, max_model_len: int | None, kv_memory: str | None
) -> dict[str, Any]:
    """The engine's options among those that the user gave, as EngineConfig takes them."""
    num_bytes = parse_bytes(kv_memory)
    return given(device=device, dtype=dtype, ops=ops, threads=threads, max_model_len=max_model_len, kv_cache_memory=num_bytes)
