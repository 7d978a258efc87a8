"""What the server listens on and what it accepts, checked where it is made.

Owns: ServerConfig, its names, defaults and ranges.  Does not know: the engine's own options.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from foredraft.params import MAX_LOGPROBS, MAX_STOP_STRINGS
from foredraft.types import ConfigError

MAX_CHOICES = 64


@dataclass(frozen=True)
class ServerConfig:
    """Sizes in bytes, times in seconds.

    ``api_keys``: whoever has none of them is refused; none lets everybody in.  ``cors_origins``: pages of these origins may ask.
    ``max_queue``: answers that may wait while ``max_num_seqs`` others are written; more are refused with 429.
    ``request_timeout``: an answer that takes longer is ended.  ``write_timeout``: a client that takes no data for so long is left.
    ``body_timeout``: a body that takes longer to come is refused.  ``drain_timeout``: how long running requests may still take
    when the server is told to stop.  ``max_choices``: answers of one request, prompts times ``n``.  ``log_prompts``: put prompts
    and answers into the log.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_queue: int = 128
    request_timeout: float = 600.0
    write_timeout: float = 60.0
    drain_timeout: float = 30.0
    max_connections: int = 1024
    max_body_bytes: int = 2 * 1024 * 1024
    body_timeout: float = 30.0
    max_choices: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    log_prompts: bool = False

    def __post_init__(self) -> None:
        self._require("port", 0 <= self.port <= 65535, "from 0 to 65535")
        for name in ("max_connections", "max_body_bytes"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name, low, high in (
            ("max_queue", 0, 1_000_000),
            ("max_choices", 1, MAX_CHOICES),
            ("max_logprobs", 0, MAX_LOGPROBS),
            ("max_stop_strings", 0, MAX_STOP_STRINGS),
        ):
            self._require(name, low <= getattr(self, name) <= high, f"from {low} to {high}")
        for name in ("request_timeout", "write_timeout", "drain_timeout", "body_timeout"):
            self._require(name, 0.0 < getattr(self, name) < float("inf"), "a number above 0")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII without spaces; choose another.")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ConfigError('cors_origins must be "*" alone or a list of origins; leave one of them out.')

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name} must be {rule}, not {getattr(self, name)!r}; change {name}.")
