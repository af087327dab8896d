"""What `lockstep quantize` writes next to a run, and how large it is.

RUN/quantized/METHOD/int8.pt       bytes, scales and what is left of the floats: a plain state dict
                     int8.pt2      the model as torch.export writes it: loads without Lockstep
                     int8.onnx     the same for ONNX Runtime and others, where the packages for it are installed
                     fp32.onnx     the model as it was, to compare with
                     report.json   everything that was measured
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.files import replacing, write_atomically
from lockstep.run import Run, folder_error
from lockstep.training.checkpoint import save_whole

FOLDER = "quantized"
INT8, PROGRAM, ONNX, ONNX_FP32, REPORT = "int8.pt", "int8.pt2", "int8.onnx", "fp32.onnx", "report.json"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def folder(run: Run, method: str) -> Path:
    path = run.folder / FOLDER / method
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(run.folder, error) from None
    return path


def onnx_missing() -> list[str]:
    """The packages that the ONNX files need and that are not here (extra `onnx`)."""
    return [name for name in ONNX_PACKAGES if find_spec(name) is None]


def write_weights(where: Path, model: nn.Module) -> dict[str, int]:
    """The int8 state dict; returns the file's bytes and those of its tensors alone."""
    state = model.state_dict()
    save_whole(where / INT8, state)
    return sizes(state)


def sizes(state: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of a file of torch with this in it, and those of its tensors alone."""
    content = io.BytesIO()
    torch.save(state, content)
    weights = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return {"file": content.tell(), "weights": weights}


def write_program(where: Path, program: torch.export.ExportedProgram) -> None:
    # Into memory first: torch looks at no name then.
    content = io.BytesIO()
    torch.export.save(program, content)
    write_atomically(where / PROGRAM, content.getvalue())


def write_onnx(where: Path, name: str, program: torch.export.ExportedProgram) -> None:
    """Needs the packages of the extra `onnx`."""
    for name_of_logger in ("onnxscript", "torch.onnx"):  # what they say of packages that nobody needs here
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    assert converted is not None
    with replacing(where / name) as temporary:
        converted.save(str(temporary))
