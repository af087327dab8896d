"""Runs many scripts one after the other in one process, each with records of its own: `driver.py SCRIPT FOLDER`.

FOLDER/rows.json has, for each, the script's arguments and what the witness is asked for; the records of row n are in FOLDER/n. Starting Python and
torch takes longer than eight steps do.
"""

import atexit
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

script, folder = sys.argv[1:3]
hooks = next(found for found in sys.meta_path if type(found).__name__ == "Watcher")._hooks
if Path(script).stem != "accelerated":
    dist.init_process_group("gloo")
for number, row in enumerate(json.loads(Path(folder, "rows.json").read_text())):
    hooks._settings = {**hooks._settings, **row["settings"]}
    hooks.begin(str(Path(folder, str(number))))
    sys.argv = [script, *row["arguments"]]
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        print(row, traceback.format_exc(), file=sys.stderr, flush=True)
        raise
# gloo's threads may abort a process that ends in order on a busy machine ("terminate called without an active exception").
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
