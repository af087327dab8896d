"""A finished run's model as an int8 program on an engine: what `lockstep quantize` does (docs/quantization.md).

    subject.py       a run's model and data             tune.py       more epochs with fake quantization, for --method qat
    graph.py         the exported graph, put in order   engines.py    the engines of this machine; the graph on their kernels.py
    files.py         what is written                    bench.py      times and memory in a process of its own; timing.py starts it
    onnx_runtime.py  our files in ONNX Runtime          published.py  document D's figures beside ours
    tables.py        the document as tables             winograd.py   our own 3x3 convolution, for CPUs with AVX2 and without VNNI

May import launch/, training/ and what is below them. Its door is command.py: load, convert (quantize/), export, test, write, measure.
"""
