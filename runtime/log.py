"""Logging, configured once by an entry module; everything else only asks for its logger.

Lines go to stderr with the level and the rank. A progress bar that is being drawn is moved out of
the way.
"""

import logging
import sys
from typing import Any

PACKAGES = ("graphs", "model", "backends", "passes", "runtime")
LEVELS = ("debug", "info", "warning", "error")


class _StderrHandler(logging.Handler):
    """Write records to the current stderr, above a progress bar if one is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            tqdm: Any = sys.modules.get("tqdm")  # imported only where a bar was wanted
            if tqdm is not None and sys.stderr.isatty():
                tqdm.tqdm.write(line, file=sys.stderr)
            else:
                sys.stderr.write(line + "\n")
        except OSError:
            self.handleError(record)


def configure_logging(level: str = "info", *, quiet: bool = False, rank: int = 0) -> None:
    """Send the records of our packages to stderr.

    Calling it again replaces the earlier configuration. The root logger is left alone.

    Args:
        level: one of LEVELS.
        quiet: drop everything below warnings.
        rank: rank of this process, shown in each line; ranks above 0 only write warnings.
    """
    number = getattr(logging, level.upper())
    if quiet or rank > 0:
        number = max(number, logging.WARNING)
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s [rank {rank}] %(name)s: %(message)s"))
    for name in PACKAGES:
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(number)
