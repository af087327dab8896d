"""ONNX Runtime as the peer: our files in it, and its own quantizer on our model (extra `onnx`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.deploy import files
from lockstep.deploy.subject import Subject

OWN = "own-int8.onnx"
# As many images as `lockstep quantize` calibrates with by default.
CALIBRATION = 1024


def session(what: str, where: Path, subject: Subject, threads: int) -> Callable[[Tensor], Any]:
    """A call that takes images as ONNX Runtime does: as a numpy array."""
    name = {"fp32": files.ONNX_FP32, "int8": files.ONNX}.get(what)
    path = where / name if name else _own(where, subject)
    run, key = _open(path, threads)
    return lambda images: run(None, {key: images.numpy()})[0]


def predict(path: Path, threads: int) -> Callable[[Tensor], Tensor]:
    """The file's answers as a tensor, for its accuracy."""
    import torch

    run, key = _open(path, threads)
    return lambda images: torch.from_numpy(run(None, {key: images.contiguous().numpy()})[0])


def _open(path: Path, threads: int) -> tuple[Any, str]:
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return made.run, made.get_inputs()[0].name


def _own(where: Path, subject: Subject) -> Path:
    """The fp32 file quantized by ONNX Runtime itself, with the same images; seven bits, as it advises without VNNI."""
    tools = import_module("onnxruntime.quantization")
    path = where / OWN
    if path.is_file() and path.stat().st_mtime >= (where / files.ONNX_FP32).stat().st_mtime:
        return path
    logging.disable(logging.WARNING)
    ready = where / f".{OWN}.fp32"
    tools.quant_pre_process(str(where / files.ONNX_FP32), str(ready))
    _, key = _open(ready, 1)
    count = min(CALIBRATION, subject.spec.plan.train_samples)
    batches = iter([{key: images.contiguous().numpy()} for images in subject.calibration(count)])

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
            return next(batches, None)

    tools.quantize_static(
        str(ready),
        str(path),
        Reader(),
        per_channel=True,
        reduce_range=True,
        activation_type=tools.QuantType.QUInt8,
        weight_type=tools.QuantType.QInt8,
    )
    ready.unlink()
    logging.disable(logging.NOTSET)
    return path
