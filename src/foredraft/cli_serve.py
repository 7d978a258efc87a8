"""The command ``foredraft serve``.

Owns: its options and how they are read.  Does not know: what is served, or how.
"""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft.cli_options import Device, Dtype, KvMemory, MaxModelLen, Model, Ops, Speculative, Threads, engine_options, given


def serve(
    model: Model,
    host: Annotated[str | None, typer.Option(help="Address to listen on; this machine only when not given.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for any; 8000 when not given.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="FOREDRAFT_API_KEY", metavar="KEY", help="Let in only who has this key; may be repeated."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(metavar="NAME", help="What clients call the model.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web pages that may ask; may be repeated.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Answers that are written at once.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Answers that may wait beyond those; more are refused.")] = None,
    request_timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Longest time for one answer.")] = None,
    write_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Longest time that a client may take no data.")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Longest time to finish running answers when told to stop.")
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest request body.")] = None,
    max_choices: Annotated[int | None, typer.Option(help="Most answers of one request.")] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Put prompts and answers into the log.")] = False,
    speculative_config: Speculative = None,
    device: Device = None,
    dtype: Dtype = None,
    ops: Ops = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KvMemory = None,
) -> None:
    """Serve a model to OpenAI's clients, and a page to watch speculation work."""
    from foredraft.server.serve import serve as run
    from foredraft.server.settings import ServerConfig
    from foredraft.terminal import note, open_llm

    config = ServerConfig(
        **given(
            host=host,
            port=port,
            api_keys=tuple(api_key) if api_key else None,
            served_model_name=served_model_name,
            cors_origins=tuple(cors_origin) if cors_origin else None,
            max_queue=max_queue,
            request_timeout=request_timeout,
            write_timeout=write_timeout,
            drain_timeout=drain_timeout,
            max_body_bytes=max_body_bytes,
            max_choices=max_choices,
            log_prompts=log_prompts,
        )
    )
    engine = engine_options(device, dtype, ops, threads, max_model_len, kv_cache_memory) | given(max_num_seqs=max_num_seqs)
    run(lambda: open_llm(model, speculative_config=speculative_config, **engine), config, note)
