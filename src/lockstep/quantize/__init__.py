"""Eight-bit integers instead of floats: fake quantization in training, int8 models after it (docs/quantization.md).

    scheme.py     how numbers become integers        fake.py, layers.py   layers that pretend to, and layers that do
    convert.py    which layers, ranges, conversion   fold.py              batch norm into a convolution's weights
    training.py   quantization-aware training, on all ranks alike
    graph.py      the exported graph, put in order   engines.py           the engines of this machine; kernels.py: their kernels
    subject.py    a run's model and its data         tune.py              some epochs more, for --method qat
    files.py      what is written                    peer.py              ONNX Runtime
    bench.py      times and memory, in a process of its own, which timing.py starts
    published.py  document D's figures beside ours   tables.py            the document as tables
    job.py        what `lockstep quantize` does, top to bottom

scheme, fake, layers, convert, fold and training are below `lockstep.training`, which calls them; the others are above it.
"""
