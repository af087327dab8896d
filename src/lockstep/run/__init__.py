"""The run folder: one run on disk, written so that a kill at any moment leaves it readable.

    run.json            recipe, placement, plan, launch command, options: written once, before anything starts
    status.json         planned, starting, running, done, failed (with the first cause), cancelled
    environment.json    what the run ran on
    epochs.jsonl        one line an epoch, over all ranks
    summary.json        the totals, written at the end
    model.pt            the trained weights (a plain state dict)
    model.json          of a user's own model: what was changed about it, and what ranks may compute otherwise than one process
    kernels.json        with fused=true: the times by which all ranks chose how each layer is computed (kernels/table.py)
    checkpoints/        where asked for: the last ones and the best (training/checkpoint.py)
    ranks/0000/         of each rank: steps.bin (measure/records.py), epochs.jsonl, status.json, failure.json, log.txt
    tensorboard/        event files of each rank
    hang.json           where ranks waited for one that did not come: who it was, and where (launch/hang.py)
    tags.json           where people gave it names (run/tags.py)

Small JSON files are replaced atomically; appended records tolerate a cut last line. Everything downstream only reads.
May import placement.py and the files below it. Its door is `Run`, and `Spec` for what run.json holds.
"""

from __future__ import annotations

from lockstep.run.errors import FolderError, FolderExists, folder_error, folder_problem, writing
from lockstep.run.folder import (
    ANSWERS,
    CHECKPOINTS,
    DATA,
    DESK,
    HANG,
    KERNELS,
    KERNELS_OF_RUN,
    MODEL_NOTES,
    ORDERS,
    PLANNING,
    QUEUE_AGAIN,
    RESERVE,
    Run,
    list_runs,
)
from lockstep.run.json_files import append_line, read_json, read_lines, read_struct, write_atomic
from lockstep.run.names import check_name, is_run_name, new_id, run_folders, runs_root
from lockstep.run.removal import delete, size_of, sweep, why_kept
from lockstep.run.spec import Options, Part, Probe, Proof, Spec
from lockstep.run.status import DAMAGED, ENDED, OVER
from lockstep.run.tags import check_tag, tags_of, write_tags

__all__ = [
    "ANSWERS",
    "CHECKPOINTS",
    "DAMAGED",
    "DATA",
    "DESK",
    "ENDED",
    "HANG",
    "KERNELS",
    "KERNELS_OF_RUN",
    "MODEL_NOTES",
    "ORDERS",
    "OVER",
    "PLANNING",
    "QUEUE_AGAIN",
    "RESERVE",
    "FolderError",
    "FolderExists",
    "Options",
    "Part",
    "Probe",
    "Proof",
    "Run",
    "Spec",
    "append_line",
    "check_name",
    "check_tag",
    "delete",
    "folder_error",
    "folder_problem",
    "is_run_name",
    "list_runs",
    "new_id",
    "read_json",
    "read_lines",
    "read_struct",
    "run_folders",
    "runs_root",
    "size_of",
    "sweep",
    "tags_of",
    "why_kept",
    "write_atomic",
    "write_tags",
    "writing",
]
