"""Messages about decisions that every trace of a program takes again."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def log_once(message: str) -> None:
    """Log a message once, although every trace of a program takes the same decision."""
    logger.info("%s", message)
