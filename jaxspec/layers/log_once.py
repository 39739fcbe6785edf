"""Messages about decisions that every trace of a program takes again."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def log_once(message: str) -> None:
    """Log a message once, or about once in threads, although every trace takes its decision."""
    logger.info("%s", message)
