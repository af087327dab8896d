"""The seal of a run: the SHA-256 of every record that its figures come from, written into the ledger when the run has ended."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from lockstep.reading import Damaged, read_file
from lockstep.run import Run, Spec

WHOLE = ("epochs.jsonl", "summary.json", "environment.json", "model.pt")
OF_RANK = ("steps.bin", "epochs.jsonl", "summary.json")
SPEC = "run.json"
"""In a seal: not of the file, but of what it says is computed, since paths are taken out of it before it is handed in."""
LARGEST = 256 << 20


def sealed_files(run: Run) -> dict[str, Path]:
    """The records of a run by their path in its folder, those that are there."""
    found = {name: run.folder / name for name in WHOLE}
    for folder in run.rank_folders():
        found |= {f"ranks/{folder.name}/{name}": folder / name for name in OF_RANK}
    return {name: path for name, path in found.items() if path.is_file() and not path.is_symlink()}


def seal(run: Run) -> dict[str, str]:
    """InputError where its run.json or a record cannot be read."""
    digests = {SPEC: spec_digest(run.spec())}
    for name, path in sealed_files(run).items():
        data = read_file(path, LARGEST)
        if data is None:
            raise Damaged(f"{name}: it is gone")
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests


def spec_digest(spec: Spec) -> str:
    """Of what was computed and where; of paths only the last part counts."""
    content = {
        "id": spec.id,
        "created": spec.created,
        "recipe": spec.recipe,
        "placement": spec.placement,
        "plan": spec.plan,
    }
    plain = _without_folders(msgspec.to_builtins(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _without_folders(value: Any) -> Any:
    if isinstance(value, str):
        return value.rpartition("/")[2]
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    return [_without_folders(one) for one in value] if isinstance(value, list) else value


def broken(run: Run, digests: dict[str, Any]) -> list[str]:
    """What is no longer as it was when the run ended."""
    try:
        now = seal(run)
    except Damaged as error:
        return [f"run {run.id}: {error}"]
    lost = [f"run {run.id}: {name} is missing" for name in digests if name not in now]
    return (
        lost
        + [
            f"run {run.id}: {name} was changed after the run ended"
            for name, digest in now.items()
            if digests.get(name) not in (None, digest)
        ]
        + [f"run {run.id}: {name} was not there when the run ended" for name in now if name not in digests]
    )
