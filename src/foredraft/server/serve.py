"""Runs the server: listens, logs, and stops without breaking what runs.

Owns: the process's signals and log while it serves.  Does not know: what is served.
"""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from foredraft.llm import LLM
from foredraft.server.app import Server
from foredraft.server.settings import ServerConfig
from foredraft.types import ConfigError

# Whole numbers up to here are exact in every client, JavaScript included.
SEED_BITS = 53
CLOSE_SECONDS = 5


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, what happened, and the record's own fields."""
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Uncut(logging.Filter):
    """Keeps out requests that were cut because the server was told to end at once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is of anything else."""
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class DrainingServer(uvicorn.Server):
    """Stops in two steps: a first signal refuses new requests and lets those that run end, a second one ends at once."""

    def __init__(self, config: uvicorn.Config, server: Server, tell: Callable[[str], None]) -> None:
        super().__init__(config)
        self.parts = server
        self._tell = tell

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, or stop now."""
        if self.parts.service.admission.is_draining:
            self.should_exit = self.force_exit = True
        else:
            again = "; press Ctrl-C again to stop at once" if sig == signal.SIGINT else ""
            self._tell(f"finishing {self.parts.service.admission.num_open} answers{again}")
            self.drain()

    def drain(self) -> None:
        """Refuse new requests; stop when the others have ended or ``drain_timeout`` is over.  From any thread."""
        admission = self.parts.service.admission
        admission.is_draining = True
        threading.Thread(target=self._wait, name="foredraft-drain", daemon=True).start()

    def _wait(self) -> None:
        deadline = time.monotonic() + self.parts.config.drain_timeout
        while self.parts.service.admission.num_open and time.monotonic() < deadline and not self.should_exit:
            time.sleep(0.05)
        # Answers that still run are ended here, so that their clients are told.
        self.parts.engine.close()
        self.should_exit = True


def set_up_log() -> None:
    """Send this process's log to stderr, one JSON object a line."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonLines}},
            "filters": {"uncut": {"()": Uncut}},
            "handlers": {
                "stderr": {
                    "class": "logging.StreamHandler",
                    "formatter": "json",
                    "filters": ["uncut"],
                    "stream": "ext://sys.stderr",
                }
            },
            "loggers": {
                "foredraft": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
                "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            },
        }
    )


def listen(config: ServerConfig) -> socket.socket:
    """The socket to serve on.

    Raises:
        ConfigError: the address cannot be had.
    """
    listener = None
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another host or port."
        ) from error
    return listener


def make_server(llm: LLM, config: ServerConfig, tell: Callable[[str], None]) -> DrainingServer:
    """Everything, ready to run."""
    server = Server(llm, config, lambda: secrets.randbits(SEED_BITS))
    options = uvicorn.Config(
        server.app(),
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        lifespan="on",
        ws="none",
    )
    return DrainingServer(options, server, tell)


def serve(open_llm: Callable[[], LLM], config: ServerConfig, tell: Callable[[str], None]) -> None:
    """Serve until told to stop.

    Raises:
        ForedraftError: the model or the address cannot be had.
    """
    # The address is taken first: a model that took a while to load and then has no port would be a waste.
    with listen(config) as listener:
        llm = open_llm()
        # Also without speculation, which a request may ask for: later others run, and then nothing can be measured.
        llm.calibrate()
        set_up_log()
        server = make_server(llm, config, tell)
        host, port = listener.getsockname()[:2]
        tell(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}  (Ctrl-C stops)")
        if not config.api_keys and not config.is_local:
            tell("anyone who can reach this address may use it; see --api-key")
        asyncio.run(server.serve([listener]))
