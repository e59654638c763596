"""What may be set about a gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Limits and times of a gateway.

    Args:
        keepalive_seconds: after so long a silence a streaming client gets a comment, whether it is held or in prefill.
            Below the idle limit of any proxy in front (60 s is common) and of impatient clients (30 s).
        upload_silence_seconds: so long a client may pause in the middle of its body.
        buffered_bytes: bodies kept in memory at a time, of all requests; beyond it requests get 429.
        drain_seconds: so long requests in flight may go on when the gateway ends.
        admin_seconds: how long a wake or evict asked for over HTTP may take when the caller does not say.
        needs_pool: whether it is ready only while a pool serves. One before many pods is there for whoever asks why
            none does.
    """

    keepalive_seconds: float = 10.0
    upload_silence_seconds: float = 60.0
    buffered_bytes: int = 512 << 20
    drain_seconds: float = 30.0
    admin_seconds: float = 300.0
    needs_pool: bool = True
