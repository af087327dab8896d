"""Vega, Vega-Lite and vega-embed as one script, taken out of vl_convert and kept beside the data cache: to put it together takes seconds."""

from __future__ import annotations

import base64
import gzip
import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lockstep.files import write_atomically

SNIPPET = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class Bundle:
    script: str
    packed: bytes
    """The same, gzipped."""

    @property
    def digest(self) -> str:
        """As a content-security policy names a script."""
        return "sha256-" + base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()

    @property
    def text(self) -> str:
        """As a page holds it."""
        return base64.b64encode(self.packed).decode()


def bundle(cache: Path | None = None) -> Bundle:
    path = (cache or folder()) / f"vl-convert-{version('vl-convert-python')}.js.gz"
    try:
        packed = path.read_bytes()
        return Bundle(gzip.decompress(packed).decode(), packed)
    except (OSError, EOFError, gzip.BadGzipFile, UnicodeDecodeError):
        return _made(path)


def folder() -> Path:
    from lockstep.machine.cache import cache_folder

    return cache_folder().parent / "vega"


def _made(path: Path) -> Bundle:
    import vl_convert

    script = vl_convert.javascript_bundle(SNIPPET)
    packed = gzip.compress(script.encode(), 9, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, packed, durable=False)
    except OSError:
        pass  # a page can be made without a place to keep it; it only takes longer
    return Bundle(script, packed)
